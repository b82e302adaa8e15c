"""scripts/prepare_data.py: text in, the same bytes out of Megatron's reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import prepare_data
from scripts.prepare_data import END_OF_DOCUMENT, DataError, Dataset, prepare

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1 << 20


def _documents(dataset: Dataset) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stored = IndexedDataset(str(dataset.prefix))
    assert list(stored.document_indices) == list(range(len(stored) + 1))
    return [stored[i].tolist() for i in range(len(stored))]


def _text_folder(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"second\n")
    (folder / "a.txt").write_text("first: é and 日本\n")
    (folder / "sub" / "c.txt").write_bytes(b"third")
    return folder


def test_round_trip(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "in")
    dataset = prepare([folder], tmp_path / "out", LIMIT)
    texts = [(folder / name).read_bytes() for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert _documents(dataset) == [[*text, END_OF_DOCUMENT] for text in texts]
    assert dataset.documents == 3
    assert dataset.tokens == sum(map(len, texts)) + 3
    assert not dataset.found


def test_every_byte_of_utf8_survives(tmp_path: Path) -> None:
    text = "".join(map(chr, range(1, 0x800))) + "\U0010ffff"
    source = tmp_path / "all.txt"
    source.write_bytes(text.encode())
    (document,) = _documents(prepare([source], tmp_path, LIMIT))
    assert bytes(document[:-1]).decode() == text


def test_the_same_content_is_found_again(tmp_path: Path) -> None:
    first = prepare([_text_folder(tmp_path / "in")], tmp_path / "out", LIMIT)
    before = first.prefix.with_name(first.prefix.name + ".bin").stat().st_mtime_ns
    again = prepare([_text_folder(tmp_path / "copy")], tmp_path / "out", LIMIT)
    assert again.found
    assert again.prefix == first.prefix
    assert first.prefix.with_name(first.prefix.name + ".bin").stat().st_mtime_ns == before


def test_other_content_is_another_dataset(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("ab")
    other.write_text("a")
    third = tmp_path / "third.txt"
    third.write_text("b")
    prefixes = {
        prepare(paths, tmp_path / "out", LIMIT).prefix
        for paths in ([one], [other, third], [third, other], [other])
    }
    assert len(prefixes) == 4


def test_a_half_written_dataset_is_made_again(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("whole")
    dataset = prepare([source], tmp_path / "out", LIMIT)
    binary = dataset.prefix.with_name(dataset.prefix.name + ".bin")
    binary.write_bytes(binary.read_bytes()[:3])
    again = prepare([source], tmp_path / "out", LIMIT)
    assert not again.found
    assert _documents(again) == [[*b"whole", END_OF_DOCUMENT]]


def test_max_bytes_cuts_the_last_document(tmp_path: Path) -> None:
    dataset = prepare([_text_folder(tmp_path / "in") / "b.txt"], tmp_path / "out", 3)
    assert _documents(dataset) == [[*b"sec", END_OF_DOCUMENT]]


def test_a_folder_is_read_by_name_and_without_what_is_no_text(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "in")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("hidden")
    (folder / "tests").mkdir()
    (folder / "tests" / "t.txt").write_text("test")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    assert prepare([folder], tmp_path / "out", LIMIT).documents == 3


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    dataset = prepare([], tmp_path / "out", 50_000)
    documents = _documents(dataset)
    first = (prepare_data.standard_library() / "__future__.py").read_bytes()
    assert bytes(documents[0][:-1]) == first
    assert dataset.tokens == 50_000 + dataset.documents


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"\xff\xfe", "not text"),
        (b"a\0b", "not text"),
        (b"", "no text in 1 files: all empty"),
    ],
    ids=["missing", "no-utf8", "zeros", "empty"],
)
def test_errors_of_a_named_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    source = tmp_path / "source.txt"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare([source], tmp_path / "out", LIMIT)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        prepare([tmp_path], tmp_path / "out", LIMIT)


def test_command_line(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "scripts" / "prepare_data.py")
        return subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=240
        )

    source = tmp_path / "text.txt"
    source.write_text("text")
    prefix = prepare([source], tmp_path / "out", LIMIT).prefix
    found = call(str(source), "--out", str(tmp_path / "out"))
    assert (found.returncode, found.stdout) == (0, f"{prefix}\n")
    assert found.stderr == "found: 1 documents, 5 tokens\n"

    missing = call(str(tmp_path / "nothing"))
    assert missing.returncode == 1
    assert missing.stderr == f"error: {tmp_path / 'nothing'}: no such file or folder\n"
    assert call("--max-bytes", "0").returncode == 1
    assert call("--unknown").returncode == 2
