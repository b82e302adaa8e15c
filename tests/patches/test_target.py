"""Patching a user's own Megatron by the series that fits: a change is made as a whole, undone to
the byte, and recognized by looking at files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from byteps.patching import writing
from byteps.patching.series import PatchError, load_lock
from byteps.patching.target import Target

from scripts.patchkit.tree import unpack
from tests.patches.patch_project import (
    NEWEST_FILES,
    REPOSITORY,
    UPSTREAM_FILES,
    Project,
    contents,
    git,
    run_script,
)

OWN = "0101-second-hook-too.patch"
LOOP, HOOK, SECOND = "trainer/loop.py", "trainer/extra/hook.py", "trainer/second.py"
OLD = {LOOP: UPSTREAM_FILES["trainer"][LOOP]}
NEW = {path: text for path, text in NEWEST_FILES.items() if path != "trainer/info.py"}


def make(folder: Path, version: str, files: dict[str, str]) -> Path:
    major, minor, patch = version.split(".")
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
    for path, text in ({"trainer/info.py": info} | files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a user's own copy of the trainer, and return its folder."""
    return make(tmp_path / "mine", "3.1.4", OLD)


@pytest.fixture
def target(two_series: Project, checkout: Path) -> Target:
    return Target.of(checkout, two_series.root)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """A function that returns all output since its last call."""

    def read() -> str:
        captured = capsys.readouterr()
        return captured.out + captured.err

    return read


def test_forward_and_back(target: Target, checkout: Path, said: Callable[[], str]) -> None:
    loop = checkout / LOOP
    loop.write_text(loop.read_text() + "\n\n\n\n# mine\n")
    loop.chmod(0o640)
    os.utime(loop, (1_000_000_000, 1_000_000_000))
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "mine")
    before, other_name = contents(checkout), checkout.parent / "cached.py"
    os.link(loop, other_name)
    target.apply()
    assert "3.1.4, series for trainer 1.0: added 1 files, patched 1 (1 patches)" in said()
    text = loop.read_text()
    assert "    hook()\n" in text and text.endswith("# mine\n")
    assert (checkout / HOOK).read_text() == "HOOK = 1\n"
    assert stat.S_IMODE(loop.stat().st_mode) == 0o640
    assert "hook()" not in other_name.read_text(), "an installer's cache may have this name"
    status = git(checkout, "status", "--porcelain", "--untracked-files=all")
    assert status.split("\n") == [f" M {LOOP}", f"?? {HOOK}", ""]
    assert target.status()
    after = contents(checkout)
    target.apply()
    assert "applied already" in said() and contents(checkout) == after
    # An interpreter's files are removed together with ours.
    (checkout / "trainer/extra/__pycache__").mkdir()
    (checkout / "trainer/extra/__pycache__/hook.pyc").write_bytes(b"x")
    target.reverse()
    assert "undone; 2 files" in said()
    assert contents(checkout) == before
    assert loop.stat().st_mtime == 1_000_000_000
    assert not target.status()
    target.reverse()
    assert "nothing to undo" in said()


@pytest.mark.parametrize(
    ("version", "files", "series", "is_warned"),
    [
        ("3.1.4", OLD, "trainer 1.0", False),
        ("4.0.0", NEW, "newest 4.0", False),
        ("3.1.4", NEW, "trainer 1.0", False),
        ("4.0.1", NEW, "newest 4.0", True),
        ("4.0.0", OLD, "trainer 1.0", True),
    ],
)
def test_series_that_fits_is_taken(
    two_series: Project,
    tmp_path: Path,
    said: Callable[[], str],
    version: str,
    files: dict[str, str],
    series: str,
    is_warned: bool,
) -> None:
    target = Target.of(make(tmp_path / "mine", version, files), two_series.root)
    target.apply()
    output = said()
    assert f"Megatron-LM {version}, series for {series}: added 1 files" in output
    assert ("warning" in output) is is_warned
    if is_warned and series == "trainer 1.0":
        assert f"newest 4.0 does not apply:\n    patches/newest/{OWN}: {SECOND}" in output
    second = target.root / SECOND
    assert (series == "newest 4.0") == (second.is_file() and "hook()" in second.read_text())
    assert "    hook()" in (target.root / LOOP).read_text()


def test_unknown_tree_hears_which_hunks_fail(two_series: Project, tmp_path: Path) -> None:
    loop = OLD[LOOP].replace("reduce()", "reduce(all)")
    checkout = make(tmp_path / "mine", "5.0.0", {LOOP: loop})
    before = contents(checkout)
    with pytest.raises(PatchError) as caught:
        Target.of(checkout, two_series.root).apply()
    hunk = (
        f"    patches/trainer/0001-loop-hook.patch: {LOOP}: hunk 1 of 1, from line 3: the file has "
        "no line '    reduce()'\n"
    )
    assert str(caught.value) == (
        f"no series of patches applies to {checkout} (Megatron-LM 5.0.0); nothing was changed\n"
        f"  newest 4.0 does not apply:\n{hunk}"
        f"    patches/newest/{OWN}: {SECOND}: there is no such file\n"
        f"  trainer 1.0 does not apply:\n{hunk[:-1]}"
    )
    assert contents(checkout) == before


def test_hunk_that_fits_at_two_places_is_refused(target: Target, checkout: Path) -> None:
    (checkout / LOOP).write_text("import time\n" + OLD[LOOP] * 2)
    with pytest.raises(PatchError, match="hunk 1 of 1, from line 3, fits at lines 4, 11"):
        target.apply()


def test_failure_does_not_hide_those_of_later_patches(patched: Project, checkout: Path) -> None:
    """A later patch is not blamed for needing another hunk of an earlier patch that fails."""
    loop = patched.tree("trainer") / LOOP
    loop.write_text(loop.read_text() + "".join(f"line {number}\n" for number in range(30)))
    git(patched.tree("trainer"), "commit", "-q", "-a", "-m", "loop: lines")
    patched.commit(LOOP, "line 20\n", "line twenty\n", "loop: twenty", "trainer")
    patched.commit("trainer/info.py", "MINOR = 1", "MINOR = 2", "info: two", "trainer")
    patched.ok("export")
    (checkout / LOOP).write_text(OLD[LOOP].replace("update()", "update(1)"))
    (checkout / "trainer/info.py").write_text("MAJOR = 3\nMINOR = 1\nPATCH = 4\nSUFFIX = 1\n")
    with pytest.raises(PatchError) as caught:
        Target.of(checkout, patched.root).apply()
    assert f"0001-loop-hook.patch: {LOOP}: hunk 1 of 1" in str(caught.value)
    assert "0004-info-two.patch: trainer/info.py: hunk 1 of 1" in str(caught.value)


# ----------------------------------------------------------------- changes by others since


@pytest.mark.parametrize("gone", [LOOP, HOOK])
def test_what_git_took_back_is_patched_again(
    target: Target, checkout: Path, said: Callable[[], str], gone: str
) -> None:
    """A file is as after ``git checkout .`` or ``git clean``."""
    before = contents(checkout)
    target.apply()
    after = contents(checkout)
    (checkout / gone).write_bytes(before[gone][0]) if gone in before else (checkout / gone).unlink()
    assert not target.status()
    assert f"without the patches: {gone} (git, or an upgrade" in said()
    target.apply()
    assert contents(checkout) == after and target.status()
    (checkout / gone).write_bytes(before[gone][0]) if gone in before else (checkout / gone).unlink()
    target.reverse()
    assert contents(checkout) == before


def test_an_upgrade_is_seen_and_patched(
    target: Target, checkout: Path, two_series: Project, said: Callable[[], str]
) -> None:
    """pip has replaced the patched files, and left the files that we added."""
    target.apply()
    make(checkout, "4.0.0", NEW)
    target = Target.of(checkout, two_series.root)
    assert not target.status()
    assert "Megatron-LM 4.0.0: 1 files as" in said()
    target.apply()
    assert "series for newest 4.0" in said() and target.status()
    target.reverse()
    assert contents(checkout) == contents(make(checkout.parent / "new", "4.0.0", NEW))
    # The same upgrade without our patches: our files are removed, and the new files stay.
    make(checkout, "3.1.4", OLD)
    target.apply()
    make(checkout, "4.0.0", NEW)
    target.reverse()
    assert contents(checkout) == contents(checkout.parent / "new")


@pytest.mark.parametrize("path", [LOOP, HOOK])
def test_files_that_were_edited_since_are_kept(
    target: Target, checkout: Path, said: Callable[[], str], path: str
) -> None:
    target.apply()
    with (checkout / path).open("a") as file:
        file.write("# edited\n")
    after = contents(checkout)
    assert target.status() and f"changed since: {path}" in said()
    target.apply()
    assert f"applied already; changed since: {path}" in said()
    with pytest.raises(PatchError, match=f"changed since the patches were applied: {path}"):
        target.reverse()
    assert contents(checkout) == after


def test_other_state_of_the_series_takes_the_place(
    target: Target, checkout: Path, two_series: Project, said: Callable[[], str]
) -> None:
    before = contents(checkout)
    target.apply()
    two_series.write_overlay("trainer/extra/more.py", "MORE = 1\n", "trainer")
    (two_series.root / "trainer" / HOOK).unlink()
    assert not target.status() and "by another version of byteps" in said()
    target.apply()
    assert not (checkout / HOOK).exists() and (checkout / "trainer/extra/more.py").exists()
    target.reverse()
    assert contents(checkout) == before


def test_a_copy_without_the_record_is_known(
    target: Target, checkout: Path, said: Callable[[], str]
) -> None:
    """The folder is like a clone of a checkout in which patched files were committed."""
    target.apply()
    shutil.rmtree(checkout / writing.RECORD)
    assert target.status() and "patched, series for trainer 1.0" in said()
    target.apply()
    assert "applied already (series for trainer 1.0)" in said()
    with pytest.raises(PatchError, match="but not the original files"):
        target.reverse()


# ----------------------------------------------------------------- refused cases


def test_file_in_an_overlay_files_place_is_refused(target: Target, checkout: Path) -> None:
    (checkout / "trainer/extra").mkdir()
    (checkout / HOOK).write_text("mine\n")
    with pytest.raises(PatchError, match=f"overlay file trainer/{HOOK} would overwrite"):
        target.apply()


def test_symbolic_link_is_refused(target: Target, checkout: Path) -> None:
    (checkout / LOOP).rename(checkout / "elsewhere.py")
    (checkout / LOOP).symlink_to(checkout / "elsewhere.py")
    with pytest.raises(PatchError, match="is a symbolic link"):
        target.apply()


def test_folder_that_is_no_checkout_is_refused(target: Target, two_series: Project) -> None:
    for folder in (two_series.root, two_series.root / "none"):
        for do in ("apply", "reverse", "status"):
            with pytest.raises(PatchError, match="no Megatron-LM checkout"):
                getattr(Target.of(folder, two_series.root), do)()


def test_part_that_the_lock_does_not_know(
    target: Target, checkout: Path, two_series: Project
) -> None:
    patch = next(two_series.patch_folder("trainer").glob("*.patch"))
    patch.write_text(patch.read_text().replace("\n---\n", "\nPart: gpu\n---\n", 1))
    with pytest.raises(PatchError, match="Part: gpu"):
        target.apply()


# ----------------------------------------------------------------- amid a change


class Killed(BaseException):
    """Stands for the end of the process."""


class Fault:
    """Makes calls that change files fail, from the call of this number on. `kills`: as if the
    process were killed."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, *, kills: bool) -> None:
        self._left, self._kills, self._recover = number, kills, writing.recover
        for name in ("replace", "rename", "unlink", "write_bytes"):
            patch.setattr(Path, name, self._failing(getattr(Path, name)))
        patch.setattr(writing, "recover", self._take_back)

    def _failing(self, call: Callable[..., object]) -> Callable[..., object]:
        def instead(*arguments: object, **more: object) -> object:
            self._left -= 1
            if self._left < 0:
                raise Killed if self._kills else OSError("no space left")
            return call(*arguments, **more)

        return instead

    def _take_back(self, root: Path) -> None:
        """Ends the effect of an error before files are restored. A killed process restores
        nothing."""
        if self._left < 0 and not self._kills:
            self._left = 1000
        if self._left >= 0:
            self._recover(root)


@pytest.mark.parametrize("do", ["apply", "reverse"])
@pytest.mark.parametrize("kills", [False, True], ids=["error", "killed"])
def test_a_change_is_made_as_a_whole(
    target: Target, checkout: Path, monkeypatch: pytest.MonkeyPatch, do: str, kills: bool
) -> None:
    if do == "reverse":
        target.apply()
    before, staged = contents(checkout), f"{writing.RECORD}.new"
    for number in range(100):
        with monkeypatch.context() as patch:
            Fault(patch, number, kills=kills)
            try:
                getattr(target, do)()
                break
            except (Killed, OSError):
                pass
        # The process that takes the change back may be killed, too.
        for further in range(100 if kills else 0):
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                Fault(patch, further, kills=True)
                writing.recover(checkout)
                break
        assert contents(checkout) == before
    assert number >= 4
    assert contents(checkout) != before
    assert not (checkout / staged).exists()


# ----------------------------------------------------------------- the real series


def test_megatron_forward_and_back(tmp_path: Path) -> None:
    """The real series makes the real upstream equal to the assembled tree, and can be undone."""
    # The test has its own tree, since somebody may be working in build/.
    root = tmp_path / "project"
    root.mkdir()
    for name in ("upstream.lock", "patches", "Megatron-LM"):
        (root / name).symlink_to(REPOSITORY / name)
    result = run_script("--root", str(root), "apply", "--only", "megatron-core")
    assert result.status == 0, result.output
    tree = root / "build/Megatron-LM"
    patched_files = contents(tree)
    git(tree, "checkout", "-q", "upstream")
    before = contents(tree)
    assert before != patched_files

    def run(*options: str) -> str:
        result = run_script("--root", str(root), "apply", "--target", str(tree), *options)
        assert result.status == 0, result.output
        return result.output

    # Without --cpu, the part for CPUs is left out, because a node whose driver is broken must fail.
    assert "(6 patches)" in run()
    assert (tree / "megatron/core/distributed/dpu_reduce/__init__.py").exists()
    assert not (tree / "megatron/training/cpu_platform.py").exists()
    # Only our checker of arguments, which needs no GPU, may use that part if it is there.
    upstreams = {n: c for n, (c, _) in contents(tree).items() if "dpu_reduce/" not in n}
    assert not any(b"cpu_platform" in content for content in upstreams.values())
    run("--cpu")
    after = contents(tree)
    assert {name for name in after if not name.startswith(writing.RECORD)} == set(patched_files)
    for name, content in patched_files.items():
        assert after[name] == content, name
    run("--reverse")
    assert contents(tree) == before


def test_installed_package_in_place_and_back(tmp_path: Path) -> None:
    """The command runs as from a wheel: without the project, and without git."""
    site = tmp_path / "site-packages"
    (upstream,) = (
        upstream for upstream in load_lock(REPOSITORY) if upstream.name == "megatron-core"
    )
    unpack(upstream, site)
    before = contents(site)
    for name in ("cli", "patching"):
        shutil.copytree(REPOSITORY / "byteps/byteps" / name, tmp_path / "ours/byteps" / name)
    data = tmp_path / "ours/byteps/patching/data"
    shutil.copytree(REPOSITORY / "patches", data / "patches")
    shutil.copytree(REPOSITORY / "Megatron-LM", data / "Megatron-LM")
    shutil.copy(REPOSITORY / "upstream.lock", data)
    env = {"PYTHONPATH": f"{tmp_path / 'ours'}:{site}", "PATH": ""}

    def run(command: str, status: int) -> str:
        words = [sys.executable, "-S", "-B", "-m", "byteps.cli", command]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert f"{site}: Megatron-LM 0.19.2: not patched" in run("status", 1)
    assert "series for megatron-core 0.19.2" in run("patch", 0)
    assert re.search(r": Megatron-LM 0\.19\.2: \d+ files as the series ", run("status", 0))
    assert "undone" in run("unpatch", 0)
    assert contents(site) == before
