"""Commits to patches and back, exact and deterministic."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.patches.patch_project import Project, run_script, snapshot

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
    # Tester is the commit's author, but the exported patch names the project.
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
        # git would apply this patch three lines away from its line number, which a reader would not
        # expect.
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
