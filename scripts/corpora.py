"""The corpora of the fuzzers: one archive in the repository, unpacked in build/ for use.

The archive has a folder for each fuzzer. The same files always give the same bytes, so that the
archive changes only where a corpus does.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = ROOT / "tests/fuzz/corpora.tar.xz"
UNPACKED = ROOT / "build/corpora"


def unpack(archive: Path = ARCHIVE, below: Path = UNPACKED) -> Path:
    """Unpack the archive, unless that was done before.

    Several processes may do so at once. The folder must not be changed: see `change`.

    Returns:
        a folder that has one folder for each fuzzer.
    """
    folder = below / hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    if not folder.exists():
        below.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=below) as scratch:
            made = Path(scratch) / "corpora"
            with tarfile.open(archive) as packed:
                packed.extractall(made, filter="data")
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
    return folder


def pack(folder: Path, archive: Path = ARCHIVE) -> None:
    """Make the archive of a folder that has one folder for each fuzzer."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o644
        return member

    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:xz", format=tarfile.USTAR_FORMAT, preset=9) as packed:
        for file in sorted(folder.glob("*/*")):
            packed.add(file, file.relative_to(folder).as_posix(), filter=plain)
    part.replace(archive)


def change(edit: Callable[[Path], None], archive: Path = ARCHIVE, below: Path = UNPACKED) -> None:
    """Unpack the archive, have ``edit`` change the folder, and pack it again."""
    kept = unpack(archive, below)
    with tempfile.TemporaryDirectory(dir=below) as scratch:
        copy = Path(scratch) / "corpora"
        shutil.copytree(kept, copy)
        edit(copy)
        pack(copy, archive)


def add(target: str, inputs: Iterable[Path]) -> None:
    """Add inputs, such as one at which a fuzzer ended, to the corpus of a fuzzer."""
    files = list(inputs)

    def copy_into(folder: Path) -> None:
        (folder / target).mkdir(exist_ok=True)  # a new fuzzer has none
        for file in files:
            data = file.read_bytes()
            # The name that libFuzzer would give it.
            (folder / target / hashlib.sha1(data).hexdigest()).write_bytes(data)

    change(copy_into)
