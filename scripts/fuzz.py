#!/usr/bin/env python3
"""Runs the fuzzers of byteps/tests/fuzz: one for each parser of bytes from the network.

Their corpora are an archive in the repository, unpacked in build/.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.progress import Progress
from tests import native

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = ROOT / "tests/fuzz/corpora.tar.xz"
UNPACKED = ROOT / "build/corpora"


def unpack(archive: Path = ARCHIVE, below: Path = UNPACKED) -> Path:
    """Unpack the archive, unless that was already done.

    Several processes may do so at the same time. The folder must not be changed: see `change`.

    Returns:
        a folder with a subfolder for each fuzzer.
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
                if not folder.exists():  # if it exists, another process was faster
                    raise
    return folder


def pack(folder: Path, archive: Path = ARCHIVE) -> None:
    """Make the archive of a folder with a subfolder for each fuzzer."""

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
    """Unpack the archive, call ``edit`` to change the folder, and pack it again."""
    unpacked = unpack(archive, below)
    with tempfile.TemporaryDirectory(dir=below) as scratch:
        copy = Path(scratch) / "corpora"
        shutil.copytree(unpacked, copy)
        edit(copy)
        pack(copy, archive)


def add(target: str, inputs: Iterable[Path]) -> None:
    """Add inputs, for example of a crash, to the corpus of a fuzzer."""
    files = list(inputs)

    def copy_into(folder: Path) -> None:
        (folder / target).mkdir(exist_ok=True)  # a new fuzzer has no folder yet
        for file in files:
            data = file.read_bytes()
            # Name that libFuzzer would use.
            (folder / target / hashlib.sha1(data).hexdigest()).write_bytes(data)

    change(copy_into)


SCRATCH = ROOT / "build/fuzz"
TARGETS = {
    "backup": "a server that has a copy of another one's state, and broken neighbors",
    "declarations": "the list of tensors that a worker declares",
    "frame": "frames on a TCP connection, and their metas",
    "hello": "the greeting of a TCP connection",
    "http": "a request over HTTP",
    "membership": "a scheduler among broken members, and a node with a broken scheduler",
    "meta": "the meta of a message",
    "rdma": "private data, frames and targets of RDMA connections",
    "server": "a server whose workers are members, and broken",
}
MAX_BYTES = 4096
LIMIT_S = 3600


class Found(Exception):
    """Error of a fuzzer that found a failure. The text has the fuzzer's last output, and the path
    of the input."""


def fuzz(folder: Path, target: str, runs: int, seed: int) -> dict[str, float]:
    """Run a fuzzer. New inputs go to build/fuzz, not to the corpus.

    Args:
        folder: folder of the programs.
        target: a key of TARGETS.
        runs: number of executions, in addition to those of the corpus.
        seed: seed of the mutations; 0: a random seed.

    Returns:
        executions, seconds, and coverage in edges.

    Raises:
        Found: the fuzzer found a failure.
    """
    learnt, corpus = SCRATCH / target, unpack() / target
    shutil.rmtree(learnt, ignore_errors=True)
    learnt.mkdir(parents=True)
    begin = time.monotonic()
    ended = subprocess.run(
        [
            str(folder / f"{target}_fuzzer"),
            *(str(learnt), str(corpus)),
            *(f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_BYTES}", "-timeout=60"),
            *("-close_fd_mask=3", "-print_final_stats=1", "-rss_limit_mb=2048"),
            f"-artifact_prefix={SCRATCH}/{target}-",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode != 0:
        raise Found(f"{target}: exit status {ended.returncode}\n{ended.stderr[-6000:]}")
    executions = re.search(r"number_of_executed_units:\s*(\d+)", ended.stderr)
    edges = re.findall(r"cov: (\d+)", ended.stderr)
    return {
        "executions": int(executions[1]) if executions else 0,
        "seconds": time.monotonic() - begin,
        "edges": int(edges[-1]) if edges else 0,
    }


def keep(folder: Path, target: str) -> int:
    """Add inputs that increase coverage to the corpus. Return the corpus's number of files."""
    command: list[str | Path] = [folder / f"{target}_fuzzer", "-merge=1", "-close_fd_mask=3"]

    def merge(unpacked: Path) -> None:
        paths = [unpacked / target, SCRATCH / target]
        subprocess.run([*command, *paths], check=True, capture_output=True, timeout=LIMIT_S)

    change(merge)
    return len(list((unpack() / target).iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=20_000, help="of each (default 20000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the mutations; 0: another each time"
    )
    parser.add_argument("--keep", action="store_true", help="pack what was learnt into the corpus")
    parser.add_argument(
        "--add",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: pack these inputs into the corpus of the one TARGET",
    )
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    if not set(targets) <= set(TARGETS):
        parser.error(f"targets are {', '.join(TARGETS)}")
    if options.add:
        if len(targets) != 1:
            parser.error("--add needs one TARGET")
        add(targets[0], options.add)
        return 0
    status = 0
    try:
        folder = native.build("fuzzers", sanitize="address")
    except native.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'target':14}{'executions':>12}{'seconds':>10}{'a second':>10}{'edges':>8}")
    for number, target in enumerate(targets):
        try:
            with Progress("fuzz", total=len(targets), unit="targets") as shown:
                shown.update(target, done=number)
                seen = fuzz(folder, target, options.runs, options.seed)
        except Found as fault:
            print(f"{target:14}FOUND\n{fault}\nits input is in {SCRATCH.relative_to(ROOT)}")
            status = 1
            continue
        rate = seen["executions"] / max(seen["seconds"], 0.001)
        print(
            f"{target:14}{seen['executions']:12,.0f}{seen['seconds']:10.1f}{rate:10,.0f}"
            f"{seen['edges']:8.0f}",
            flush=True,
        )
        if options.keep:
            print(f"{'':14}{keep(folder, target)} files in the corpus")
    return status


if __name__ == "__main__":
    sys.exit(main())
