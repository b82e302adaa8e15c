#!/usr/bin/env python3
"""Converts text files into Megatron-LM's indexed dataset, one token per byte.

Each file is a document: its bytes are the tokens 0 to 255, and 256 ends it. Without paths it uses
the sources of Python's standard library, which every machine has. A dataset is reused if the hash
of its content matches. Prints the prefix of the two files, for Megatron's --data-path. With
--tokenizer the tokens are those of a Hugging Face model instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

END_OF_DOCUMENT = 256
VOCABULARY = 257
DEFAULT_MAX_BYTES = 8_000_000
FORMAT = b"bytes-uint16-eod256-v1"
ROOT = Path(__file__).resolve().parent.parent

# Folders that are skipped, because they are large and not written by people.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "node_modules", "site-packages", "test", "tests"}
)


class DataError(Exception):
    """Error if the input cannot be made into a dataset. The text has the reason."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Conversion of documents into tokens."""

    identity: bytes
    """Bytes that differ between different conversions."""
    encode: Callable[[bytes], Sequence[int]]
    end: int
    """Token that ends each document."""


BYTES = Tokens(identity=FORMAT, encode=bytearray, end=END_OF_DOCUMENT)


def tokens_of(model: Path) -> Tokens:
    """Return the conversion of a Hugging Face model, from its tokenizer.json and config.json.

    Raises:
        DataError: a file, or the package ``tokenizers``, is missing.
    """
    files = [model / "tokenizer.json", model / "config.json"]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: no such file, so that {model} has no tokenizer to read")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError("the package tokenizers is not installed: use build/venv-hf") from error
    tokenizer = Tokenizer.from_file(str(files[0]))
    config = json.loads(files[1].read_text(encoding="utf-8"))
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end

    def encode(document: bytes) -> Sequence[int]:
        # A limit on the bytes may have cut the last character.
        text = document.decode("utf-8", errors="ignore")
        return tokenizer.encode(text, add_special_tokens=False).ids

    return Tokens(
        identity=b"hf-v1" + hashlib.sha256(files[0].read_bytes()).digest(),
        encode=encode,
        end=config["vocab_size"] - 1 if end is None else end,
    )


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An indexed dataset on disk."""

    prefix: Path
    """Path of the .bin and .idx files without their suffix."""
    documents: int
    tokens: int
    """Number of tokens of the text, plus an end-of-document token for each document."""
    reused: bool
    """Whether the dataset already existed."""


def standard_library() -> Path:
    """Return the folder of Python's own library."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield text files to read, in an order that depends only on names.

    Each file comes with a flag that says whether the user named it. Files found in a folder may be
    skipped if they are not text. Hidden files, and folders of tests, caches and packages, are left
    out.

    Raises:
        DataError: a path does not exist.
    """
    for path in paths:
        if path.is_file():
            yield path, True
        elif path.is_dir():
            yield from ((file, False) for file in _walk(path, "*"))
        else:
            raise DataError(f"{path}: no such file or folder")


def _walk(folder: Path, pattern: str) -> Iterator[Path]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir():
            if entry.name not in SKIPPED_FOLDERS:
                yield from _walk(entry, pattern)
        elif entry.is_file() and entry.match(pattern):
            yield entry


def read_documents(files: Iterable[tuple[Path, bool]], max_bytes: int) -> list[bytes]:
    """Return the bytes of the text files, one document each, up to ``max_bytes`` in total.

    The document that would exceed the limit is cut. Empty files are skipped.

    Raises:
        DataError: a named file is not UTF-8 text, or there is nothing to read.
    """
    documents: list[bytes] = []
    left = max_bytes
    seen = 0
    for file, named in files:
        if left <= 0:
            break
        seen += 1
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        if not _is_text(content):
            if named:
                raise DataError(f"{file}: not text: it holds bytes that are no UTF-8, or zeros")
            continue
        if content:
            documents.append(content[:left])
            left -= len(documents[-1])
    if not documents:
        raise DataError(
            "no files: the folder holds none" if not seen else f"no text in {seen} files: all empty"
        )
    return documents


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def fingerprint(documents: Iterable[bytes], tokens: Tokens = BYTES) -> str:
    """Return a hash of the documents, their boundaries and the format."""
    digest = hashlib.sha256(tokens.identity)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return digest.hexdigest()


def write_dataset(
    documents: Sequence[bytes], folder: Path, name: str = "text", tokens: Tokens = BYTES
) -> Dataset:
    """Write the documents as ``folder/<name>-<hash>.bin`` and ``.idx``, unless these exist.

    The files appear complete or not at all, so concurrent or interrupted writers do no harm.
    """
    encoded = [tokens.encode(document) for document in documents]
    count = sum(map(len, encoded)) + len(encoded)
    prefix = folder / f"{name}-{fingerprint(documents, tokens)[:16]}"
    final = [prefix.with_name(f"{prefix.name}{ending}") for ending in (".bin", ".idx")]
    sizes = [width * count for width in (2, 4)]
    reused = all(file.is_file() for file in final) and final[0].stat().st_size in sizes
    if not reused:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = [Path(scratch) / file.name for file in final]
            _build(encoded, tokens.end, *made)
            for source, target in zip(made, final, strict=True):
                os.replace(source, target)
    return Dataset(prefix=prefix, documents=len(documents), tokens=count, reused=reused)


def _build(documents: Sequence[Sequence[int]], end: int, bin_file: Path, idx_file: Path) -> None:
    # The import is here, because importing Megatron takes seconds, and an existing dataset does not
    # need it.
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    largest = max(end, max((max(document, default=0) for document in documents), default=0))
    dtype = numpy.uint16 if largest < 1 << 16 else numpy.int32
    builder = IndexedDatasetBuilder(str(bin_file), dtype=dtype)
    for document in documents:
        tokens = numpy.append(numpy.array(document, dtype=numpy.int32), numpy.int32(end))
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(str(idx_file))


def read_text(paths: Sequence[Path], max_bytes: int) -> list[bytes]:
    """Return the documents of these paths; without paths, of the standard library.

    Raises:
        DataError: a path does not exist, is not text, or there is nothing to read.
    """
    if max_bytes <= 0:
        raise DataError(f"--max-bytes {max_bytes}: must be positive")
    if paths:
        return read_documents(list_files(paths), max_bytes)
    sources = ((file, False) for file in _walk(standard_library(), "*.py"))
    return read_documents(sources, max_bytes)


def prepare(paths: Sequence[Path], folder: Path, max_bytes: int, tokens: Tokens = BYTES) -> Dataset:
    """Return the dataset of these paths (without paths: of the standard library), made if
    necessary.

    Raises:
        DataError: a path does not exist, is not text, or there is nothing to read.
    """
    documents = read_text(paths, max_bytes)
    return write_dataset(documents, folder, "text" if paths else "python", tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="text files, and folders of them")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "data", help="folder (default: build/data)"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help=f"stop after this much text (default: {DEFAULT_MAX_BYTES})",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a Hugging Face model's")
    options = parser.parse_args(arguments)
    try:
        tokens = BYTES if options.tokenizer is None else tokens_of(options.tokenizer)
        dataset = prepare(options.paths, options.out, options.max_bytes, tokens)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    state = "found" if dataset.reused else "made"
    print(f"{state}: {dataset.documents} documents, {dataset.tokens} tokens", file=sys.stderr)
    print(dataset.prefix)
    return 0


if __name__ == "__main__":
    sys.exit(main())
