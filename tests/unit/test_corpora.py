"""What fuzzers begin with."""

from __future__ import annotations

from pathlib import Path

from scripts import corpora
from scripts.fuzz import TARGETS


def test_each_target_has_a_corpus() -> None:
    assert {folder.name for folder in corpora.unpack().iterdir()} == set(TARGETS)


def test_packing_what_was_unpacked_changes_nothing(tmp_path: Path) -> None:
    again = tmp_path / "corpora.tar.xz"
    corpora.pack(corpora.unpack(below=tmp_path / "unpacked"), again)
    assert again.read_bytes() == corpora.ARCHIVE.read_bytes()


def test_what_was_added_is_unpacked(tmp_path: Path) -> None:
    archive, below = tmp_path / "corpora.tar.xz", tmp_path / "unpacked"
    (tmp_path / "first/meta").mkdir(parents=True)
    (tmp_path / "first/meta/old").write_bytes(b"old")
    corpora.pack(tmp_path / "first", archive)

    def add_another(folder: Path) -> None:
        (folder / "meta/new").write_bytes(b"new")

    corpora.change(add_another, archive, below)

    unpacked = corpora.unpack(archive, below)
    found = {file.name: file.read_bytes() for file in unpacked.glob("meta/*")}
    assert found == {"old": b"old", "new": b"new"}
