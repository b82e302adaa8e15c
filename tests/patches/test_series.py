"""Two series of one overlay. What they share is stored once."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from byteps.patching.series import PatchError, Upstream, load_lock

from scripts.children import captured
from scripts.patchkit.export import check_form
from scripts.patchkit.tree import unpack
from tests.patches.patch_project import (
    REPOSITORY,
    Project,
    contents,
    git,
    run_script,
)

OWN = "0101-second-hook-too.patch"


@pytest.fixture
def newest(two_series: Project) -> Path:
    """The checkout that has the commit of `newest`."""
    return two_series.root.parent / "newest"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ----------------------------------------------------------------- one patch for two upstreams


def test_shared_patch_stands_once(two_series: Project, newest: Path) -> None:
    folder = two_series.patch_folder("newest")
    assert names(folder) == {"series", OWN}
    assert (folder / "series").read_text() == f"../trainer/series\n{OWN}\n"
    subjects = two_series.git("log", "--reverse", "--format=%s", name="newest").splitlines()
    assert subjects == [
        "newest 4.0",
        "Overlay of Megatron-BytePS",
        "loop: hook",
        "second: hook too",
    ]
    assert newest.name not in two_series.ok("apply"), "no build needs it"
    output = two_series.ok("apply", "--check", "--only", "newest")
    assert "newest: 2 patches apply exactly and export unchanged" in output


def test_patch_that_has_to_differ_stands_twice(two_series: Project, newest: Path) -> None:
    tree, folder = two_series.tree("newest"), two_series.patch_folder("newest")
    git(tree, "reset", "-q", "--hard", "HEAD~1")
    loop = tree / "trainer/loop.py"
    loop.write_text(loop.read_text().replace("hook()", "hook(4)"))
    git(tree, "commit", "-q", "-a", "--amend", "--no-edit")
    output = two_series.ok("export", "--only", "newest")
    assert names(folder) == {"series", "0001-loop-hook.patch"}
    assert f"0001-loop-hook.patch, {OWN}" not in output
    assert f"{OWN} (removed)" in output
    assert (folder / "series").read_text() == "../trainer/series\n"
    two_series.ok("apply", "--only", "newest")
    assert "hook(4)" in (tree / "trainer/loop.py").read_text()
    two_series.ok("apply", "--check", "--only", "newest")


def test_copy_of_a_shared_patch_is_refused(two_series: Project, newest: Path) -> None:
    shared = two_series.patch_folder("trainer") / "0001-loop-hook.patch"
    shutil.copy(shared, two_series.patch_folder("newest"))
    output = two_series.fails("apply", "--check")
    assert "patches/newest/0001-loop-hook.patch says the same as patches/trainer/0001" in output


def test_change_of_a_shared_patch_reaches_both(two_series: Project, newest: Path) -> None:
    two_series.commit("trainer/loop.py", "hook()", "hook(1)", "loop: pass one", "trainer")
    output = two_series.ok("export")
    assert "newest: patches unchanged" in output
    assert "trainer: 0002-loop-pass-one.patch, series" in output
    assert "newest: build/newest is old" in two_series.ok("export")
    # The old tree's own changes cannot be exported: the old shared patches would return.
    two_series.commit("trainer/second.py", "hook()", "hook(2)", "second: pass two", "newest")
    output = two_series.fails("export")
    assert "the patches of ../trainer/series have changed since build/newest was made" in output
    two_series.ok("apply", "--only", "newest", "--force")
    assert "hook(1)" in (two_series.tree("newest") / "trainer/loop.py").read_text()
    assert "hook()" in (two_series.tree("newest") / "trainer/second.py").read_text()
    assert names(two_series.patch_folder("newest")) == {"series", OWN}
    two_series.ok("apply", "--check", "--only", "newest")


def test_shared_patches_stay_in_order(two_series: Project, newest: Path) -> None:
    git(two_series.tree("newest"), "commit", "-q", "--allow-empty", "--amend", "-m", "loop: hook")
    git(two_series.tree("newest"), "rebase", "-q", "--onto", "overlay", "HEAD~1")
    two_series.git("commit", "-q", "--amend", "-m", "second: alone", name="newest")
    assert "the first 1 commits of build/newest must be" in two_series.fails(
        "export", "--only", "newest"
    )


# ----------------------------------------------------------------- without its upstream


def test_form_is_checked_without_the_upstream(two_series: Project, newest: Path) -> None:
    shutil.rmtree(newest)
    shutil.rmtree(two_series.cache / "checkouts")
    output = two_series.ok("apply", "--check")
    assert "newest: 2 patches have the form of exported ones" in output
    patch = two_series.patch_folder("newest") / OWN
    patch.write_text(patch.read_text().replace("From: Megatron-BytePS", "From: Somebody"))
    output = two_series.fails("apply", "--check")
    assert f"patches/newest/{OWN} is not what export writes" in output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("second: hook too", "second: hook three", "would be exported as 0101-second-hook-three"),
        ("second: hook too", "Second hook too", "the subject must read"),
        ("\n---\n", "\nPart: gpu\n---\n", "says Part: gpu"),
        ("@@ -1,2 +1,2 @@", "@@ -1,2 +1,3 @@", "has more or fewer lines than its header says"),
        ("b/trainer/second.py", "b/trainer/extra/hook.py", "is an overlay file"),
    ],
)
def test_patch_that_export_cannot_have_written(
    two_series: Project, old: str, new: str, message: str
) -> None:
    upstream = load_lock(two_series.root)[-1]
    patch = two_series.patch_folder("newest") / OWN
    check_form(upstream)
    text = patch.read_text()
    assert old in text
    patch.write_text(text.replace(old, new))
    with pytest.raises(PatchError, match=re.escape(message)):
        check_form(upstream)


def test_number_of_an_own_patch(two_series: Project, newest: Path) -> None:
    folder = two_series.patch_folder("newest")
    (folder / OWN).rename(folder / OWN.replace("0101", "0002"))
    (folder / "series").write_text(f"../trainer/series\n{OWN.replace('0101', '0002')}\n")
    assert "would be exported as 0101-" in two_series.fails("apply", "--check")


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("../nothing/series\n", "refers to ../nothing/series, which is not there"),
        ("../trainer/series\n", f"{OWN} is not named in patches/newest/series"),
        (f"../trainer/series\n{OWN}\n{OWN}\n", f"names {OWN} twice"),
    ],
)
def test_series_that_is_no_good(
    two_series: Project, newest: Path, series: str, message: str
) -> None:
    (two_series.patch_folder("newest") / "series").write_text(series)
    assert message in two_series.fails("apply", "--check")


# ----------------------------------------------------------------- sources of the commit


def test_commit_is_fetched_once(two_series: Project, newest: Path) -> None:
    # The repository in the lock is gone: the commit comes from the cache.
    shutil.rmtree(newest)
    two_series.ok("apply", "--check", "--only", "newest")
    shutil.rmtree(two_series.cache / "checkouts")
    output = two_series.fails("apply", "--check", "--only", "newest")
    assert "cannot fetch commit" in output
    assert "NEWEST=/path/to/Megatron-LM" in output


def test_checkout_that_is_named(two_series: Project, newest: Path, tmp_path: Path) -> None:
    shutil.rmtree(two_series.cache / "checkouts")
    arguments = ["apply", "--check", "--only", "newest"]
    (newest / "trainer/loop.py").write_text("edited\n")  # only committed files count
    before = contents(newest)
    other = newest.rename(tmp_path / "other")
    result = two_series.run(*arguments, env={"NEWEST": str(other)})
    assert result.status == 0, result.output
    assert contents(other) == before
    assert not (two_series.cache / "checkouts").exists()
    output = two_series.fails(*arguments, env={"NEWEST": str(two_series.tree("engine"))})
    assert "has no commit" in output
    output = two_series.fails(*arguments, env={"NEWEST": str(tmp_path / "none")})
    assert "there is no such folder" in output


# ----------------------------------------------------------------- the real series


def test_hooks_that_patches_call_are_there() -> None:
    package = REPOSITORY / "Megatron-LM/megatron/core/distributed/dpu_reduce/__init__.py"
    (names_of_package,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(package.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    called = {
        (patch.name, name)
        for patch in (REPOSITORY / "patches").glob("megatron-*/*/*.patch")
        for name in re.findall(r"^\+.*\bdpu_reduce\.(\w+)", patch.read_text(), re.M)
    }
    assert len({patch for patch, _ in called}) >= 4
    assert [each for each in sorted(called) if each[1] not in names_of_package] == []


# ----------------------------------------------------------------- Megatron's other versions


MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
LIMIT_S = 500.0


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=each.name, marks=pytest.mark.requires(each.name))
        for each in load_lock(REPOSITORY)
        if each.commit
    ],
)
def other_version(request: pytest.FixtureRequest) -> Upstream:
    """An upstream of which no build is made: the main branch, or an older release."""
    return request.param


@pytest.mark.thorough
def test_series_applies_and_survives_the_round_trip(other_version: Upstream) -> None:
    result = run_script("apply", "--check", "--only", other_version.name)
    assert result.status == 0, result.output
    assert "patches apply exactly and export unchanged" in result.output


@pytest.fixture(scope="module")
def checkout(other_version: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as users have it, patched, with the part for CPUs."""
    folder = tmp_path_factory.mktemp("checkout") / "Megatron-LM"
    unpack(other_version, folder)
    before = contents(folder)
    target = ["apply", "--target", str(folder)]
    # Apply, undo, and apply again.
    for options in (["--cpu"], ["--reverse"], ["--cpu"]):
        result = run_script(*target, *options)
        assert result.status == 0, result.output
        assert "warning" not in result.output
        if options == ["--reverse"]:
            assert contents(folder) == before
    assert f"series for {other_version.label}: " in result.output
    return folder


@pytest.mark.thorough
def test_sums_are_the_same_to_the_last_bit(checkout: Path, run_dir: Path) -> None:
    output = _train(checkout, run_dir)
    assert "largest difference of the loss over 6 steps: 0.0; final parameters: the same" in output


@pytest.mark.thorough
def test_servers_that_keep_the_optimizer_update_alike(checkout: Path, run_dir: Path) -> None:
    """scripts/train.py compares the losses with the distributed optimizer's."""
    output = _train(checkout, run_dir, "--optimizer", "servers")
    assert "the mean of the last ten differs by 0.00%" in output


def _train(checkout: Path, folder: Path, *options: str) -> str:
    """Train two ranks, through servers and without; return the comparison that scripts/train.py
    prints."""
    source = folder / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    command = [sys.executable, "-m", "scripts.train", "--tree", str(checkout), "--compare"]
    command += ["--steps", "6", "--out", str(folder / "out"), "--data", str(source)]
    command += ["--data-cache", str(folder / "data"), *options, "--", *MODEL]
    modules = os.pathsep.join([str(checkout), str(REPOSITORY)])
    # A git checkout compiles a module for its data sets, with the python3 on PATH.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = captured(
        command,
        LIMIT_S,
        env={**os.environ, "PYTHONPATH": modules, "PATH": programs, "MEGATRON_CPU": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
