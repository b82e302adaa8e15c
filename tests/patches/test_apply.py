"""Assembling the trees: what they hold, what is refused, and that no file is touched needlessly."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from tests.patches.patch_project import UPSTREAM_FILES, Project, make_project, make_sdist, snapshot


def test_tree_is_upstream_overlay_and_one_commit_per_patch(patched: Project) -> None:
    subjects = patched.git("log", "--reverse", "--format=%s").splitlines()
    assert subjects == [
        "engine 1.0",
        "Overlay of Megatron-BytePS",
        "queue: spell seven",
        "queue: spell nine",
    ]
    assert patched.git("status", "--porcelain", "--ignored") == ""
    for path, text in UPSTREAM_FILES["engine"].items():
        expected = text.replace("line 7\n", "line seven\n").replace("line 9\n", "line nine\n")
        assert (patched.tree() / path).read_bytes() == expected.encode(), path
    assert os.access(patched.tree() / "tool.sh", os.X_OK)
    assert (patched.tree() / "src/added.txt").read_text() == "added\n"


def test_commit_hashes_are_reproducible(patched: Project, tmp_path: Path) -> None:
    other = make_project(tmp_path / "elsewhere")
    for name in ("engine", "trainer", "patches"):
        (other.root / name).symlink_to(patched.root / name)
    other.ok("apply")
    # The commits of the first tree were made by hand. Commits that are made from patches are the
    # same everywhere.
    (patched.root / "build/engine").rename(patched.root / "old")
    patched.ok("apply")
    assert other.git("rev-parse", "HEAD") == patched.git("rev-parse", "HEAD")
    dates = [
        line.split() for line in other.git("log", "--reverse", "--format=%at %ct").splitlines()
    ]
    assert dates[:2] == [["946684800", "946684800"]] * 2
    assert all(author == committer for author, committer in dates)


def test_second_apply_touches_nothing(patched: Project) -> None:
    before, head = snapshot(patched.tree()), patched.git("rev-parse", "HEAD")
    output = patched.ok("apply")
    assert output.splitlines() == ["engine: up to date", "trainer: up to date"]
    assert snapshot(patched.tree()) == before
    assert patched.git("rev-parse", "HEAD") == head


def test_change_touches_only_what_differs(patched: Project) -> None:
    for file in patched.tree().rglob("*.txt"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    patched.write_overlay("src/added.txt", "added again\n")
    patched.ok("apply")
    assert (patched.tree() / "src/added.txt").read_text() == "added again\n"
    assert (patched.tree() / "src/added.txt").stat().st_mtime > 1_000_000_000
    for name in ("queue.txt", "other.txt", "crlf.txt"):
        assert (patched.tree() / "src" / name).stat().st_mtime == 1_000_000_000, name


def test_removed_overlay_file_and_patch_leave_the_tree(patched: Project) -> None:
    (patched.root / "engine/src/added.txt").unlink()
    (patched.patch_folder() / "0002-queue-spell-nine.patch").unlink()
    (patched.patch_folder() / "series").write_text("0001-queue-spell-seven.patch\n")
    patched.ok("apply")
    assert not (patched.tree() / "src/added.txt").exists()
    assert "line 9\n" in (patched.tree() / "src/queue.txt").read_text()


def test_junk_in_the_overlay_is_left_out(patched: Project) -> None:
    patched.write_overlay("src/__pycache__/added.pyc", "junk")
    patched.write_overlay("src/.added.txt.swp", "junk")
    assert "engine: up to date" in patched.ok("apply")


def test_wrong_hash_in_the_cache_is_refused(project: Project) -> None:
    (archive,) = (project.cache / "sdists").glob("*/engine-1.0.tar.gz")
    archive.write_bytes(archive.read_bytes() + b"x")
    output = project.fails("apply")
    assert str(archive) in output
    assert archive.parent.name in output
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in output
    assert not project.tree().exists()


def test_wrong_hash_of_a_download_is_refused(project: Project, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    archive = make_sdist(store, "engine")
    actual = hashlib.sha256(archive.read_bytes()).hexdigest()
    lock = project.root / "upstream.lock"
    lock.write_text(lock.read_text().replace(actual, "0" * 64))
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(store), "PIP_CONFIG_FILE": os.devnull}
    output = project.fails("apply", env=env)
    assert "engine-1.0.tar.gz" in output
    assert actual in output
    assert "0" * 64 in output
    assert not list((project.cache / "sdists").glob("000*"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" line 5\n", " line five\n"),  # a tool with fuzz would accept it
        (" line 5\n", " line  5\n"),  # a tool that ignores white space would accept it
        ("-line 7\n", "-line 77\n"),
    ],
    ids=["context", "whitespace", "removed-line"],
)
def test_patch_that_does_not_apply_is_named(patched: Project, old: str, new: str) -> None:
    patch = patched.patch_folder() / "0001-queue-spell-seven.patch"
    patch.write_text(patch.read_text().replace(old, new, 1))
    before, head = snapshot(patched.tree()), patched.git("rev-parse", "HEAD")
    output = patched.fails("apply")
    assert "patches/engine/0001-queue-spell-seven.patch does not apply" in output
    assert "patch failed: src/queue.txt:4" in output
    assert snapshot(patched.tree()) == before
    assert patched.git("rev-parse", "HEAD") == head
    assert patched.git("worktree", "list").count("\n") == 1


@pytest.mark.parametrize("path", ["src/other.txt", "src/other.txt/below.txt", "src"])
def test_overlay_over_an_upstream_file_is_refused(project: Project, path: str) -> None:
    project.write_overlay(path, "mine\n")
    output = project.fails("apply")
    assert f"overlay file engine/{path} would overwrite src" in output


def test_uncommitted_work_is_refused(patched: Project) -> None:
    (patched.tree() / "src/other.txt").write_text("work\n")
    (patched.tree() / "src/new.txt").write_text("work\n")
    assert "up to date" in patched.ok("apply")  # nothing to do, so nothing to lose
    patched.write_overlay("src/added.txt", "changed\n")
    output = patched.fails("apply")
    assert "uncommitted changes in build/engine" in output
    assert "src/other.txt" in output
    assert "src/new.txt" in output
    assert "export_patches.sh" in output
    assert "--force" in output
    assert (patched.tree() / "src/other.txt").read_text() == "work\n"
    assert "uncommitted" in patched.fails("guard")
    patched.ok("apply", "--force")
    assert (patched.tree() / "src/other.txt").read_text() == "untouched\n"


def test_unexported_commits_are_refused(patched: Project) -> None:
    patched.commit("src/other.txt", "untouched", "work", "other: work")
    head = patched.git("rev-parse", "HEAD")
    assert "not exported" in patched.ok("apply")
    patched.write_overlay("src/added.txt", "changed\n")
    assert "were not exported" in patched.fails("apply")
    assert "were not exported" in patched.fails("guard")
    assert patched.git("rev-parse", "HEAD") == head
    patched.ok("export")
    patched.ok("apply")
    assert (patched.tree() / "src/other.txt").read_text() == "work\n"
    assert (patched.tree() / "src/added.txt").read_text() == "changed\n"


def test_forced_commits_can_be_found_again(patched: Project) -> None:
    patched.commit("src/other.txt", "untouched", "work", "other: work")
    head = patched.git("rev-parse", "HEAD")
    patched.ok("apply", "--force")
    assert (patched.tree() / "src/other.txt").read_text() == "untouched\n"
    assert patched.git("rev-parse", "refs/patchset/discarded") == head


def test_build_products_are_no_work(patched: Project) -> None:
    (patched.tree() / "src/compiled.so").write_bytes(b"\x7fELF")
    (patched.tree() / "engine.egg-info/SOURCES.txt").write_text("rewritten by an installation\n")
    patched.write_overlay("src/added.txt", "changed\n")
    patched.ok("apply")
    assert (patched.tree() / "src/compiled.so").exists()


def test_new_upstream_replaces_the_tree(patched: Project) -> None:
    archive = next((patched.cache / "sdists").glob("*/engine-1.0.tar.gz"))
    content = archive.read_bytes() + b"\0" * 512  # trailing zeros: another file, the same content
    digest = hashlib.sha256(content).hexdigest()
    (patched.cache / "sdists" / digest).mkdir()
    (patched.cache / "sdists" / digest / archive.name).write_bytes(content)
    lock = patched.root / "upstream.lock"
    lock.write_text(lock.read_text().replace(archive.parent.name, digest))
    patched.ok("apply")
    assert digest in patched.git("log", "-1", "--format=%B", "upstream")


def test_overlay_only_copies_and_keeps_times(patched: Project) -> None:
    patched.write_overlay("src/second.txt", "second\n")
    patched.write_overlay("src/added.txt", "quick\n")
    before, head = snapshot(patched.tree()), patched.git("rev-parse", "HEAD")
    patched.ok("apply", "--overlay-only")
    after = snapshot(patched.tree())
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"src/added.txt", "src/second.txt"}
    assert patched.git("rev-parse", "HEAD") == head
    # The overlay file is edited again, and then committed. Neither counts as work in the tree, and
    # an equal file is not rewritten.
    patched.write_overlay("src/added.txt", "quicker\n")
    patched.ok("apply")
    committed = snapshot(patched.tree())
    assert committed["src/added.txt"][0] == b"quicker\n"
    assert committed["src/second.txt"] == after["src/second.txt"]
    assert patched.git("status", "--porcelain") == ""


def test_overlay_only_follows_a_removal(patched: Project) -> None:
    second = patched.write_overlay("src/second.txt", "second\n")
    patched.ok("apply", "--overlay-only")
    second.unlink()
    (patched.root / "engine/src/added.txt").unlink()
    patched.ok("apply", "--overlay-only")
    assert not (patched.tree() / "src/second.txt").exists()
    assert not (patched.tree() / "src/added.txt").exists()
    patched.ok("apply")
    assert patched.git("status", "--porcelain") == ""


def test_tree_key_follows_the_content(patched: Project) -> None:
    key = patched.ok("tree-key", "engine")
    assert re.fullmatch(r"[0-9a-f]{64}\n", key)
    (patched.tree() / "src/compiled.so").write_bytes(b"\x7fELF")
    assert patched.ok("tree-key", "engine") == key
    patched.write_overlay("src/added.txt", "changed\n")
    patched.ok("apply", "--overlay-only")
    synced = patched.ok("tree-key", "engine")
    assert synced != key


@pytest.mark.parametrize(
    "arguments",
    [
        ["apply", "--reverse"],
        ["apply", "--check", "--force"],
        ["apply", "--target", ".", "--only", "engine"],
        ["apply", "--only", "unknown"],
        ["apply", "--unknown"],
        [],
    ],
    ids=" ".join,
)
def test_bad_use_exits_with_2(project: Project, arguments: list[str]) -> None:
    assert project.run(*arguments).status == 2
    assert not project.tree().exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sha256 =", "sha255 =", "an entry lacks 'sha256'"),
        ('sha256 = "', 'sha256 = "g', "is not 64 hexadecimal digits"),
        ("[[upstream]]", "[[upstream", "upstream.lock:"),
    ],
)
def test_malformed_lock_is_refused(project: Project, old: str, new: str, message: str) -> None:
    lock = project.root / "upstream.lock"
    lock.write_text(lock.read_text().replace(old, new, 1))
    assert message in project.fails("apply")
