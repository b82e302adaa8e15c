"""Training state in the memory of machines. It outlives the ranks to which it belongs.

Megatron's local checkpoints (``--non-persistent-ckpt-type local``, of nvidia-resiliency-ext) are
files, here in /dev/shm: one of the rank itself, and a copy in the folder of a rank on another
machine. Ranks of the next generation start from the newest step of which all files exist, and send
each other the files that a machine lacks. This module chooses folders and pairs of ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megatron-byteps"


class Memory:
    """Megatron's arguments for local checkpoints, generation by generation."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._job = secrets.token_hex(8)
        self._attempt = 0
        self._ranks = 0
        self._jump = 0

    def start_anew(self) -> None:
        """Make the next generation start from the last checkpoint, by giving it empty folders."""
        self._attempt += 1

    def arguments(self, nodes: Sequence[str]) -> list[list[str]]:
        """Return the arguments of each rank of the next generation.

        Args:
            nodes: machine of each rank.
        """
        if len(nodes) != self._ranks:
            # Files of another number of ranks do not fit. Pairs stay, so that ranks find their
            # copies.
            self._ranks, self._jump = len(nodes), jump_of(nodes)
            self.start_anew()
        copies = ["--replication", "--replication-jump", str(self._jump)] if self._jump else []
        return [
            [
                *("--non-persistent-ckpt-type", "local"),
                *("--non-persistent-save-interval", str(self._interval)),
                *("--non-persistent-local-ckpt-dir", str(self._folder(node))),
                *copies,
            ]
            for node in nodes
        ]

    def _folder(self, node: str) -> Path:
        of_job = SHARED_MEMORY / f"{_PREFIX}-{os.getuid()}-{self._job}"
        return of_job / node / str(self._attempt)


def jump_of(nodes: Sequence[str]) -> int:
    """Return the distance of two ranks that keep copies of each other's state: the shortest one
    that puts all copies on other machines, otherwise the shortest. 0: ranks cannot be paired."""
    count = len(nodes)
    fitting = [jump for jump in range(1, count // 2 + 1) if count % (2 * jump) == 0]
    for jump in fitting:
        pairs = [(rank, rank + jump) for rank in range(count) if rank // jump % 2 == 0]
        if all(nodes[rank] != nodes[other] for rank, other in pairs):
            return jump
    return fitting[0] if fitting else 0


def folder_of(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `Memory.arguments` has put into a rank's arguments; None without
    one."""
    for argument in arguments:
        folder = Path(argument)
        if folder.parent.parent.parent == SHARED_MEMORY and argument.count(_PREFIX):
            return folder
    return None


def prepare(arguments: Sequence[str], rank: int) -> None:
    """Remove files that no generation will use. A rank calls this before it starts."""
    folder = folder_of(arguments)
    if folder is None:
        return
    folder.parents[1].mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    # The rank was killed while it wrote this file. It would now refuse to write the file again.
    for file in (folder / str(rank)).glob("*.dirty*"):
        file.unlink()


def clear(folder: Path) -> None:
    """Remove all of a job's files on this machine."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Other nodes have folders here only if they share this machine.
        folder.parent.parent.rmdir()
