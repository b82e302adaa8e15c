"""What a seed decides of a job: its sizes, and what breaks when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "stop", "cut", "reset", "slow", "lossy", "descriptors", "disk")
FROM_THE_START = ("descriptors", "disk")
PLAIN_SEEDS = 1000
"""Seeds up to this one are of jobs that are neither kept nor encrypted."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    """One of KINDS; those of FROM_THE_START take neither time below."""
    node: str
    """``scheduler``, ``server 0``, ``worker 1``, ..."""
    at_s: float
    """After the last process was started."""
    seconds: float
    """How long it lasts, where it ends."""
    limit: int = 0
    """Of open files."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that a seed decides."""

    seed: int
    workers: int
    servers: int
    rounds: int
    tensors: int
    size: int
    faults: tuple[Fault, ...]
    keep: bool = False
    """Scheduler and servers take the next incarnation of the job."""
    tls: bool = False

    @property
    def nodes(self) -> list[str]:
        return [
            "scheduler",
            *(f"server {i}" for i in range(self.servers)),
            *(f"worker {i}" for i in range(self.workers)),
        ]


def make_script(seed: int, kinds: Sequence[str] = KINDS) -> Script:
    draw = random.Random(seed)
    workers, servers = draw.randint(2, 3), draw.randint(1, 2)
    script = Script(
        seed=seed,
        workers=workers,
        servers=servers,
        rounds=draw.choice([60, 200, 500]),
        tensors=draw.randint(1, 5),
        size=draw.choice([4_000, 40_000, 200_000]),
        faults=(),
    )
    # A job that no worker joins waits for one: the last worker is left alone.
    victims = script.nodes[:-1]
    faults = [
        Fault(
            kind=draw.choice(list(kinds)),
            node=draw.choice(victims),
            at_s=round(draw.choice([0.3, 1.0, 3.0]) * draw.random(), 3),
            seconds=draw.choice([0.2, 1.0, 9.0]),
            limit=draw.randint(10, 40),
        )
        for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    kept = seed > PLAIN_SEEDS and draw.random() < 0.7
    encrypted = seed > PLAIN_SEEDS and draw.random() < 0.4
    chosen = {"faults": tuple(faults), "keep": kept, "tls": encrypted}
    return Script(**{**vars(script), **chosen})
