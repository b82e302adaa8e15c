#!/usr/bin/env python3
"""Builds a corpus of text and code from packages, split by document.

`packages.tsv` names Debian and Python packages with their versions and the checksums of their
files. Each text file in them is a document. The hash of its letters and digits decides whether it
is held out, or to which training pack it belongs. Duplicates are dropped. The same packages give
the same bytes.

  bench/learning/corpus.py                    download, and write build/learning/corpus
  bench/learning/corpus.py --update           take the newest versions, and write packages.tsv

Exit status: 0 success; 1 a package is not available, or its checksum differs; 2 bad usage.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("packages.tsv")
PACKS = 7
"""Number of training packs, each of at most 50 MiB: a machine without a network gets one at a
time."""
HELD_OUT = 100
"""Number of documents of which one is held out."""
SHORTEST, LONGEST = 300, 300_000
"""Limits of a document's length in bytes. Tables are longer, and stubs shorter."""
TEXT = re.compile(
    r"\.(c|cc|cpp|el|go|h|hpp|html?|java|js|md|ml|p[lm]|pod|pyi?|r[bs]|rst|s|scm|sh|tcl|texi|ts|txt"
    r"|ya?ml)$",
    re.IGNORECASE,
)
PIP = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp")
PLATFORMS = tuple(f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17))
PLATFORMS += ("--platform=manylinux2014_x86_64",)
END = b"\0"
"""Separator between documents."""


class CorpusError(Exception):
    """Error if a package cannot be used. The text has the reason."""


@dataclass(frozen=True)
class Package:
    """A line of `packages.tsv`, parsed."""

    kind: str
    """Kind of the package: debian or python."""
    name: str
    share: float
    """Fraction of the package's files to take, chosen by the hash of their names, so that no
    package dominates."""
    licence: str
    version: str = ""
    file: str = ""
    sha256: str = ""

    @property
    def line(self) -> str:
        fields = (self.kind, self.name, f"{self.share:g}", self.licence)
        return "\t".join((*fields, self.version, self.file, self.sha256))


def packages() -> list[Package]:
    """Return the packages of the list, in its order."""
    chosen = []
    for line in LIST.read_text(encoding="utf-8").splitlines()[1:]:
        kind, name, share, *rest = line.split("\t")
        chosen.append(Package(kind, name, float(share), *rest))
    return chosen


def fetch(package: Package, folder: Path) -> Package:
    """Download a package if it is missing, and check it. If the list has no version, take the
    newest.

    Raises:
        CorpusError: the package is not available, or its checksum differs.
    """
    if package.file and (folder / package.file).exists():
        return _checked(package, folder / package.file)
    if package.kind == "debian":
        wanted = package.name + (f"={package.version}" if package.version else "")
        command = ["apt-get", "download", wanted]
    else:
        wanted = package.name + (f"=={package.version}" if package.version else "")
        command = [sys.executable, "-m", "pip", "download", "--quiet", *PIP, *PLATFORMS, wanted]
    here = folder / ".arriving"
    here.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=600)
    arrived = sorted(here.iterdir())
    if result.returncode or len(arrived) != 1:
        raise CorpusError(
            f"{wanted} ({package.kind}) cannot be had: {result.stderr.strip()[-300:]}"
        )
    path = arrived[0].replace(folder / arrived[0].name)
    return _checked(package, path)


def _checked(package: Package, path: Path) -> Package:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if package.sha256 and package.sha256 != sha256:
        raise CorpusError(f"{path} is not the file of packages.tsv: remove it, or use --update")
    split = path.name.split("_") if package.kind == "debian" else path.name.split("-")
    version = split[1].replace("%3a", ":")
    return replace(package, version=version, file=path.name, sha256=sha256)


# Documents of a package.


def files(package: Package, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each text file, even of those in archives inside the package."""
    if package.kind == "python":
        yield from _of_zip(path, package)
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from _of_tar(process.stdout, package, "")


def _of_tar(stream: IO[bytes], package: Package, prefix: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue
            name = prefix + member.name
            if re.search(r"\.tar\.(xz|gz|bz2)$|/src\.zip$", name):
                content = archive.extractfile(member)
                assert content is not None
                if name.endswith(".zip"):
                    yield from _of_zip(io.BytesIO(content.read()), package)
                else:
                    yield from _of_tar(content, package, name + "/")
            elif _is_taken(name, member.size, package):
                content = archive.extractfile(member)
                assert content is not None
                yield name, content.read()


def _of_zip(source: Path | IO[bytes], package: Package) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            if _is_taken(member.filename, member.file_size, package):
                yield member.filename, archive.read(member)


def _is_taken(name: str, size: int, package: Package) -> bool:
    if not TEXT.search(name) or not SHORTEST <= size <= 4 * LONGEST:
        return False
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
    return number < package.share * 2**32


_HIDDEN = re.compile(r"<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", re.S | re.I)
_TAG = re.compile(r"<[^>]{1,2000}>")
_BLANK = re.compile(r"[ \t]*\n(\s*\n)+")
_NO_LETTER = re.compile(rb"[^a-z0-9]+")


def text_of(name: str, content: bytes) -> str | None:
    """Return the text of a file. None if no human has written it."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if name.lower().endswith((".html", ".htm")):
        text = html.unescape(_TAG.sub("", _HIDDEN.sub("", text)))
        text = _BLANK.sub("\n\n", text).strip() + "\n"
    if not SHORTEST <= len(text) <= LONGEST or "\0" in text:
        return None
    letters = sum(map(str.isalpha, text[:4000]))
    is_dense = len(text) > 200 * (text.count("\n") + 1)
    return None if is_dense or letters < 0.4 * len(text[:4000]) else text


@dataclass(frozen=True)
class Document:
    """A document, with its path in the file of its package."""

    digest: str
    package: str
    begin: int
    size: int

    @property
    def pack(self) -> int:
        """Index of the training pack; -1: held out."""
        number = int(self.digest[:8], 16)
        return -1 if number % HELD_OUT == 0 else number // HELD_OUT % PACKS


def extract(package: Package, downloads: Path, folder: Path) -> list[Document]:
    """Write all documents of a package into a file, in the order of their names. Does nothing if
    that was done."""
    index = folder / f"{package.sha256[:16]}-{package.share:g}.json"
    if index.exists():
        return [Document(*fields) for fields in json.loads(index.read_text(encoding="utf-8"))]
    texts = []
    for name, content in files(package, downloads / package.file):
        text = text_of(name, content)
        if text is not None:
            texts.append((name, text.encode()))
    texts.sort()
    documents, at = [], 0
    with (folder / package.name).open("wb") as file:
        for _, encoded in texts:
            letters = _NO_LETTER.sub(b"", encoded.lower())
            digest = hashlib.blake2b(letters, digest_size=16).hexdigest()
            file.write(encoded)
            documents.append(Document(digest, package.name, at, len(encoded)))
            at += len(encoded)
    index.write_text(json.dumps([astuple(document) for document in documents]), encoding="utf-8")
    return documents


def write_pack(documents: Sequence[Document], folder: Path, path: Path) -> int:
    """Write documents one after the other, compressed. Return the number of bytes of text."""
    total = 0
    with path.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as out:
        for document in documents:
            with (folder / document.package).open("rb") as texts:
                texts.seek(document.begin)
                out.write(texts.read(document.size) + END)
            total += document.size
    return total


def read_pack(path: Path) -> list[str]:
    """Return the documents of a pack."""
    with gzip.open(path) as file:
        return file.read().decode().split(END.decode())[:-1]


def make(options: argparse.Namespace) -> None:
    """Download, extract, split and write."""
    downloads, folder = options.out / "packages", options.out / "documents"
    corpus = options.out / "corpus"
    for path in (downloads, folder, corpus):
        path.mkdir(parents=True, exist_ok=True)
    listed = []
    for package in packages():
        print(f"{package.name}", flush=True)
        if options.update:
            package = replace(package, version="", file="", sha256="")
        listed.append(fetch(package, downloads))
    if listed != packages():
        head = LIST.read_text(encoding="utf-8").splitlines()[0]
        LIST.write_text("\n".join([head, *(p.line for p in listed)]) + "\n", encoding="utf-8")
    seen: set[str] = set()
    packs: dict[int, list[Document]] = {number: [] for number in range(-1, PACKS)}
    of_package: dict[str, int] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        count = len(listed)
        each = pool.map(extract, listed, [downloads] * count, [folder] * count)
        for package, documents in zip(listed, each, strict=True):
            new = [d for d in documents if d.digest not in seen and not seen.add(d.digest)]  # type: ignore[func-returns-value]
            for document in new:
                packs[document.pack].append(document)
            of_package[package.name] = sum(d.size for d in new)
            print(f"{package.name}: {len(new)} documents, {of_package[package.name]:,} bytes")
        total = sum(of_package.values())
        print(f"{len(seen)} documents, {total:,} bytes", flush=True)
        names = ["held-out.gz" if n < 0 else f"train-{n}.gz" for n in packs]
        made = pool.map(
            write_pack, packs.values(), [folder] * len(packs), [corpus / name for name in names]
        )
        sizes = {}
        for name, size in zip(names, made, strict=True):
            sizes[name] = size
            print(f"{name}: {size:,} bytes of text, {(corpus / name).stat().st_size:,}", flush=True)
    manifest = {"bytes": total, "documents": len(seen), "packs": sizes, "packages": of_package}
    (corpus / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build/learning", help="default: build/learning")
    add("--update", action="store_true", help="take the newest versions, and list them")
    add("--jobs", type=int, default=2, help="processes (default: 2)")
    try:
        make(parser.parse_args(arguments))
    except CorpusError as error:
        print(f"bench/learning/corpus.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
