"""Commits to patches and back, exact and deterministic; and the series on a user's own checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.patches.patch_project import (
    REPOSITORY,
    UPSTREAM_FILES,
    Project,
    contents,
    git,
    run_script,
    snapshot,
)

SEVEN, NINE = "0001-queue-spell-seven.patch", "0002-queue-spell-nine.patch"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_real_series_survive_the_round_trip() -> None:
    result = run_script("apply", "--check")
    assert result.status == 0, result.output
    for name in ("byteps", "megatron-core"):
        assert f"{name}: " in result.output
    assert result.output.count("apply exactly and export unchanged") == 2
    assert "megatron-main: 11 patches have the form of exported ones" in result.output


def test_exported_files(patched: Project) -> None:
    exported = files(patched.patch_folder())
    assert set(exported) == {
        "series",
        "0001-queue-spell-seven.patch",
        "0002-queue-spell-nine.patch",
    }
    assert exported["series"] == b"0001-queue-spell-seven.patch\n0002-queue-spell-nine.patch\n"
    text = exported["0002-queue-spell-nine.patch"].decode()
    # The commit's author is Tester.
    author = "Megatron-BytePS <patches@megatron-byteps.invalid>"
    assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: {author}\nDate: ")
    assert "\nSubject: [PATCH] queue: spell nine\n\nBecause.\n---\n" in text
    assert "-line 9\n+line nine\n" in text
    patched.ok("apply", "--check")


def test_name_of_a_long_subject_is_whole(patched: Project) -> None:
    words = "spell the tenth line of the queue as a word, not as a numeral"
    subject = f"queue: {words} too"
    assert len(subject) == 72
    patched.commit("src/queue.txt", "line 10\n", "line ten\n", subject)
    patched.ok("export")
    name = f"0003-queue-{words.replace(',', '').replace(' ', '-')}-too.patch"
    assert name in files(patched.patch_folder())
    patched.ok("apply", "--check")


def test_dropped_and_reordered_commits(patched: Project) -> None:
    patched.git("reset", "-q", "--hard", "overlay")
    patched.commit("src/queue.txt", "line 9\n", "line nine\n", "queue: spell nine")
    patched.ok("export")
    assert set(files(patched.patch_folder())) == {"series", "0001-queue-spell-nine.patch"}
    patched.ok("apply", "--check")


def test_carriage_returns_and_binary_files_survive(patched: Project) -> None:
    patched.commit("src/crlf.txt", "two\r\n", "zwei\r\n", "crlf: in German")
    (patched.tree() / "src/data.bin").write_bytes(bytes(range(256)))
    patched.git("add", "src/data.bin")
    patched.git("commit", "-q", "-m", "data: add bytes")
    patched.ok("export")
    patched.ok("apply", "--check")
    shutil.rmtree(patched.tree())
    patched.ok("apply")
    assert (patched.tree() / "src/crlf.txt").read_bytes() == b"one\r\nzwei\r\nthree\r\n"
    assert (patched.tree() / "src/data.bin").read_bytes() == bytes(range(256))


def test_result_does_not_depend_on_the_users_git_settings(
    patched: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(patched.patch_folder())
    settings = tmp_path / ".gitconfig"
    settings.write_text(
        "[diff]\nnoprefix = true\nrenames = copies\ncontext = 9\nalgorithm = patience\n"
        "[format]\nsignature = me\nnumbered = true\n[core]\nautocrlf = true\nabbrev = 5\n"
        "[commit]\ngpgsign = true\n[gpg]\nprogram = /no/such/program\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    patched.ok("export")
    assert files(patched.patch_folder()) == before
    patched.ok("apply", "--check")


def test_commit_to_an_overlay_file_is_refused(patched: Project) -> None:
    before = files(patched.patch_folder())
    patched.commit("src/added.txt", "added", "edited", "added: edit")
    output = patched.fails("export")
    assert "(added: edit) touches src/added.txt, an overlay file" in output
    assert "engine/src/added.txt" in output
    assert files(patched.patch_folder()) == before


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("Spell ten", "(Spell ten): the subject must read"),
        ("queue:spell ten", "the subject must read"),
        ("queue: ".ljust(73, "x"), "the subject has 73 characters, at most 72"),
    ],
)
def test_subject_that_is_refused(patched: Project, subject: str, message: str) -> None:
    patched.commit("src/queue.txt", "line 10\n", "line ten\n", subject)
    assert message in patched.fails("export")


def test_merge_is_refused(patched: Project) -> None:
    patched.git("checkout", "-q", "-b", "side", "HEAD~1")
    patched.commit("src/other.txt", "untouched", "side", "other: side")
    patched.git("checkout", "-q", "main")
    patched.git("merge", "-q", "--no-ff", "-m", "other: merge", "side")
    assert "is a merge" in patched.fails("export")


def test_export_warns_of_what_is_not_committed(patched: Project) -> None:
    (patched.tree() / "src/other.txt").write_text("work\n")
    output = patched.ok("export")
    assert "warning: build/engine: not exported, because not committed: src/other.txt" in output


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        # git applies this three lines away from where it says, which a reader would not expect.
        (SEVEN, "@@ -4,7 +4,7 @@", "@@ -7,7 +7,7 @@", f"patches/engine/{SEVEN} is not what export"),
        (NINE, "Because.", "Because. ", f"patches/engine/{NINE} is not what export writes (line"),
        (
            SEVEN,
            "From: Megatron-BytePS <",
            "From: A <",
            f"patches/engine/{SEVEN} is not what export",
        ),
        (SEVEN, "queue: spell seven", "queue: seven", f"{SEVEN} would be exported as 0001-queue-s"),
        ("series", f"{NINE}\n", "", f"{NINE} is not named in patches/engine/series"),
        ("series", SEVEN, "0001-other.patch", "names 0001-other.patch, which is not in the folder"),
    ],
)
def test_check_finds_what_export_does_not_write(
    patched: Project, name: str, old: str, new: str, message: str
) -> None:
    file = patched.patch_folder() / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert message in patched.fails("apply", "--check", "--only", "engine")


def test_check_leaves_the_tree_alone(patched: Project) -> None:
    patched.commit("src/other.txt", "untouched", "work", "other: work")
    before, head = snapshot(patched.tree()), patched.git("rev-parse", "HEAD")
    patched.ok("apply", "--check")
    assert snapshot(patched.tree()) == before
    assert patched.git("rev-parse", "HEAD") == head


# The series on a user's own checkout: all or nothing, and undone to the byte.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A user's own trainer: newer layout around the same files, with a file more."""
    folder = tmp_path / "mine"
    for path, text in (UPSTREAM_FILES["trainer"] | {"pretrain.py": "main()\n"}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def test_megatron_forward_and_back(tmp_path: Path) -> None:
    """The real series on the real upstream gives what the assembled tree holds, and goes away."""
    # A tree of its own: build/ may be in the middle of somebody's work.
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

    # By itself, nothing of what a CPU needs: a node whose driver is broken must fail.
    result = run_script("--root", str(root), "apply", "--target", str(tree))
    assert result.status == 0, result.output
    assert "(6 patches)" in result.output
    assert (tree / "megatron/core/distributed/dpu_reduce/__init__.py").exists()
    assert not (tree / "megatron/training/cpu_platform.py").exists()
    # Our own checker of arguments needs no GPU either, and uses it where it is.
    upstreams = {n: c for n, (c, _) in contents(tree).items() if "dpu_reduce/" not in n}
    assert not any(b"cpu_platform" in content for content in upstreams.values())
    result = run_script("--root", str(root), "apply", "--target", str(tree), "--cpu")
    assert result.status == 1
    assert "other parts" in result.output and "--reverse" in result.output
    result = run_script("--root", str(root), "apply", "--target", str(tree), "--reverse")
    assert result.status == 0, result.output
    assert contents(tree) == before

    result = run_script("--root", str(root), "apply", "--target", str(tree), "--cpu")
    assert result.status == 0, result.output
    after = contents(tree)
    assert {name for name in after if not name.startswith(".megatron-byteps")} == set(patched_files)
    for name, content in patched_files.items():
        assert after[name] == content, name

    result = run_script("--root", str(root), "apply", "--target", str(tree), "--reverse")
    assert result.status == 0, result.output
    assert contents(tree) == before


def test_forward_and_back(patched: Project, checkout: Path) -> None:
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "mine")
    before = contents(checkout)
    output = patched.ok("apply", "--target", str(checkout))
    assert "3.1.4, series for trainer 1.0: added 1 files, patched 1 (1 patches)" in output
    assert "warning" not in output
    assert (checkout / "trainer/extra/hook.py").read_text() == "HOOK = 1\n"
    assert "    hook()\n" in (checkout / "trainer/loop.py").read_text()
    status = git(checkout, "status", "--porcelain", "--untracked-files=all")
    assert status.split("\n") == [" M trainer/loop.py", "?? trainer/extra/hook.py", ""]
    # What an interpreter leaves next to our files goes with them.
    (checkout / "trainer/extra/__pycache__").mkdir()
    (checkout / "trainer/extra/__pycache__/hook.pyc").write_bytes(b"x")
    assert "undone" in patched.ok("apply", "--target", str(checkout), "--reverse")
    assert contents(checkout) == before
    assert git(checkout, "status", "--porcelain", "--ignored") == ""


@pytest.mark.parametrize("gone", ["trainer/loop.py", "trainer/extra/hook.py"])
def test_a_patch_that_git_took_back_is_missed(patched: Project, checkout: Path, gone: str) -> None:
    """As after `git checkout .`, or `git clean`: it is not said to be applied."""
    before = contents(checkout)
    original = (checkout / gone).read_bytes() if gone in before else None
    patched.ok("apply", "--target", str(checkout))
    if original is None:
        (checkout / gone).unlink()
    else:
        (checkout / gone).write_bytes(original)
    said = patched.fails("apply", "--target", str(checkout))
    assert "1 of 2 files are as they were before" in said and gone in said
    patched.ok("apply", "--target", str(checkout), "--reverse")
    assert contents(checkout) == before
    assert "patched 1" in patched.ok("apply", "--target", str(checkout))


def test_second_apply_and_second_reverse_say_so(patched: Project, checkout: Path) -> None:
    patched.ok("apply", "--target", str(checkout))
    after = contents(checkout)
    assert "applied already" in patched.ok("apply", "--target", str(checkout))
    assert contents(checkout) == after
    patched.ok("apply", "--target", str(checkout), "--reverse")
    assert "nothing to undo" in patched.ok("apply", "--target", str(checkout), "--reverse")


@pytest.mark.parametrize("path", ["trainer/loop.py", "trainer/extra/hook.py"])
def test_reverse_refuses_after_a_change(patched: Project, checkout: Path, path: str) -> None:
    patched.ok("apply", "--target", str(checkout))
    (checkout / path).write_text("edited\n")
    after = contents(checkout)
    assert path in patched.fails("apply", "--target", str(checkout), "--reverse")
    assert contents(checkout) == after


def test_other_state_of_the_series_must_be_undone_first(patched: Project, checkout: Path) -> None:
    before = contents(checkout)
    patched.ok("apply", "--target", str(checkout))
    patched.write_overlay("trainer/extra/hook.py", "HOOK = 2\n", "trainer")
    assert "undo it first" in patched.fails("apply", "--target", str(checkout))
    # Undoing needs only what was recorded, not the series as it was.
    patched.ok("apply", "--target", str(checkout), "--reverse")
    assert contents(checkout) == before


def test_checkout_needs_no_git_and_keeps_the_users_changes(
    patched: Project, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    loop = checkout / "trainer/loop.py"
    loop.write_text(loop.read_text() + "\n\n\n\n# mine\n")
    before = contents(checkout)
    patched.ok("apply", "--target", str(checkout))
    assert loop.read_text().endswith("# mine\n")
    patched.ok("apply", "--target", str(checkout), "--reverse")
    assert contents(checkout) == before


def test_file_in_an_overlay_files_place_is_refused(patched: Project, checkout: Path) -> None:
    (checkout / "trainer/extra").mkdir()
    (checkout / "trainer/extra/hook.py").write_text("mine\n")
    output = patched.fails("apply", "--target", str(checkout))
    assert "overlay file trainer/trainer/extra/hook.py would overwrite" in output


def test_folder_that_is_no_checkout_is_refused(patched: Project, tmp_path: Path) -> None:
    assert "no Megatron-LM checkout" in patched.fails("apply", "--target", str(tmp_path / "none"))
    assert "no Megatron-LM checkout" in patched.fails(
        "apply", "--target", str(tmp_path), "--reverse"
    )


def test_part_that_the_lock_does_not_know(patched: Project, checkout: Path) -> None:
    patch = next(patched.patch_folder("trainer").glob("*.patch"))
    patch.write_text(patch.read_text().replace("\n---\n", "\nPart: gpu\n---\n", 1))
    before = contents(checkout)
    assert "Part: gpu" in patched.fails("apply", "--target", str(checkout))
    assert contents(checkout) == before


def test_cpu_goes_with_target(patched: Project) -> None:
    assert "--cpu goes with --target" in patched.run("apply", "--cpu").output
