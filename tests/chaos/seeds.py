"""Turns seeds into jobs: their sizes, and their faults with times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

KINDS = ("kill", "stop", "cut", "reset", "slow", "lossy", "descriptors", "disk")
FROM_THE_START = ("descriptors", "disk")
PLAIN_SEEDS = 1000
"""Largest seed of a job that is neither kept nor encrypted."""
ENDING_SEEDS = 2000
"""Largest seed of a job that ends when a server is lost."""
LASTING_SEEDS = 3000
"""Largest seed of a job that ends when the scheduler is lost."""
RETURNING_SEEDS = 4000
"""Largest seed of a job whose servers keep no optimizer state."""
COPYING_SEEDS = 5000
"""Largest seed of a job that loses only servers, or only the scheduler."""
LONG_S = 9.0
"""Seconds that a node stays stopped or cut off beyond the job's timeouts, so that it is lost."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    """Kind of the fault: a kind from KINDS, or ``term`` (SIGTERM). Kinds in FROM_THE_START ignore
    the two times below."""
    node: str
    """``scheduler``, ``server 0``, ``worker 1``, ..."""
    at_s: float
    """Seconds after the start of the last process."""
    seconds: float
    """Seconds until the fault ends, for faults that end."""
    limit: int = 0
    """Limit of open files."""

    @property
    def loses(self) -> bool:
        """Whether the job may lose the node."""
        lasts = self.kind in ("stop", "cut") and self.seconds >= LONG_S
        return lasts or self.kind in ("kill", "term")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything that a seed determines."""

    seed: int
    workers: int
    servers: int
    rounds: int
    tensors: int
    size: int
    faults: tuple[Fault, ...]
    keep: bool = False
    """Whether the scheduler and servers serve the next generation of the job."""
    tls: bool = False
    spares: int = 0
    """Number of servers that wait for the places of lost servers. With spares, the loss of a server
    does not end the job."""
    returns: bool = False
    """Whether the scheduler is restarted each time it is killed."""
    replicas: bool = False
    """Whether each worker is a replica. The job continues without a lost replica, and the replica
    returns."""
    copies: bool = False
    """Whether servers keep optimizer state. Each server then also has a copy of another server's
    state."""

    @property
    def forks(self) -> bool:
        """Whether workers are Python programs."""
        return self.replicas or self.copies

    @property
    def server_nodes(self) -> list[str]:
        servers = [f"server {i}" for i in range(self.servers)]
        return servers + [f"spare {i}" for i in range(self.spares)]

    @property
    def nodes(self) -> list[str]:
        return [
            "scheduler",
            *self.server_nodes,
            *(f"worker {i}" for i in range(self.workers)),
        ]


def make_script(seed: int, kinds: Sequence[str] = KINDS) -> Script:
    """Make the script of a seed; ``kinds`` limits the faults of seeds up to ENDING_SEEDS."""
    draw = random.Random(seed)
    if seed > COPYING_SEEDS:
        return _make_losing_both(seed, draw)
    if seed > RETURNING_SEEDS:
        return _make_copying(seed, draw)
    if seed > LASTING_SEEDS:
        return _make_returning(seed, draw)
    if seed > ENDING_SEEDS:
        return _make_lasting(seed, draw)
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
    # A job without any worker waits forever, so the last worker has no faults.
    victims = script.nodes[:-1]
    faults = [
        Fault(
            kind=draw.choice(list(kinds)),
            node=draw.choice(victims),
            at_s=round(draw.choice([0.3, 1.0, 3.0]) * draw.random(), 3),
            seconds=draw.choice([0.2, 1.0, LONG_S]),
            limit=draw.randint(10, 40),
        )
        for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    keeps = seed > PLAIN_SEEDS and draw.random() < 0.7
    encrypted = seed > PLAIN_SEEDS and draw.random() < 0.4
    chosen = {"faults": tuple(faults), "keep": keeps, "tls": encrypted}
    return Script(**{**vars(script), **chosen})


def _make_returning(seed: int, draw: random.Random) -> Script:
    """Make a job whose scheduler dies once or twice while links break."""
    script = Script(
        seed=seed,
        workers=draw.randint(2, 3),
        servers=draw.randint(1, 2),
        rounds=draw.choice([200, 300, 400]),
        tensors=draw.randint(1, 5),
        size=draw.choice([4_000, 40_000, 200_000]),
        faults=(),
        tls=draw.random() < 0.3,
        returns=True,
    )
    begin = 0.5
    faults = []
    for _ in range(draw.choice([1, 2])):
        at_s, away_s = begin + 1.5 * draw.random(), draw.choice([0.1, 1.0, 5.0])
        at_s = round(at_s, 3)
        faults.append(Fault(kind="kill", node="scheduler", at_s=at_s, seconds=away_s))
        begin = at_s + away_s
    for _ in range(draw.choice([0, 1, 2, 3])):
        faults.append(
            Fault(
                kind=draw.choice(["cut", "reset", "slow", "lossy"]),
                node=draw.choice(script.nodes),
                at_s=round(3.0 * draw.random(), 3),
                seconds=draw.choice([0.2, 1.0]),
            )
        )
    return replace(script, faults=tuple(faults))


def _make_copying(seed: int, draw: random.Random) -> Script:
    """Make a job that loses servers in sequence while links break."""
    script = Script(
        seed=seed,
        workers=2,
        servers=draw.randint(2, 3),
        rounds=draw.choice([100, 150, 200]),
        tensors=0,
        size=0,
        faults=(),
        tls=draw.random() < 0.3,
        spares=1,
        copies=True,
    )
    lost = [
        Fault(
            kind=draw.choice(["kill", "kill", "stop", "cut", "term"]),
            node=draw.choice(script.server_nodes[: script.servers] * 2 + ["spare 0"]),
            at_s=round(3.0 * draw.random(), 3),
            seconds=LONG_S,
        )
        for _ in range(draw.choice([1, 2, 3]))
    ]
    others = [
        Fault(
            kind=draw.choice(["cut", "reset", "slow", "lossy"]),
            node=draw.choice(script.nodes),
            at_s=round(6.0 * draw.random(), 3),
            seconds=draw.choice([0.2, 1.0]),
        )
        for _ in range(draw.choice([0, 1, 2]))
    ]
    return replace(script, faults=(*lost, *others))


def _make_losing_both(seed: int, draw: random.Random) -> Script:
    """Make a job that loses servers, the scheduler and any replicas."""
    script = _make_lasting(seed, draw)
    deaths = []
    begin = 0.3
    for _ in range(draw.choice([1, 1, 2])):
        at_s, away_s = round(begin + 2.0 * draw.random(), 3), draw.choice([0.1, 1.0, 5.0])
        deaths.append(Fault(kind="kill", node="scheduler", at_s=at_s, seconds=away_s))
        begin = at_s + away_s + 0.5
    return replace(script, returns=True, faults=(*script.faults, *deaths))


def _make_lasting(seed: int, draw: random.Random) -> Script:
    """Make a job that survives all its faults: lost servers and, in half of the jobs, lost
    replicas."""
    replicas = draw.random() < 0.5
    script = Script(
        seed=seed,
        workers=draw.randint(2, 3),
        servers=draw.randint(1, 2),
        rounds=draw.choice([20, 40, 80] if replicas else [200, 500, 1000]),
        tensors=draw.randint(1, 5),
        size=draw.choice([4_000, 40_000, 200_000]),
        faults=(),
        tls=draw.random() < 0.3,
        spares=draw.randint(1, 2),
        replicas=replicas,
    )

    def fault(kinds: str, nodes: Sequence[str], seconds: Sequence[float]) -> Fault:
        return Fault(
            kind=draw.choice(kinds.split()),
            node=draw.choice(nodes),
            at_s=round(draw.choice([0.3, 2.0, 6.0]) * draw.random(), 3),
            seconds=draw.choice(seconds),
        )

    often = [*script.server_nodes, *script.server_nodes[: script.servers]]
    faults = [
        fault("kill kill stop cut term", often, (0.2, LONG_S, LONG_S))
        for _ in range(draw.choice([1, 2, 2, 3, 4]))
    ]
    workers = script.nodes[-script.workers :]
    for lost in list(faults):
        if draw.random() < 0.6:
            # This worker is then without answers that the other workers have.
            before = round(max(0.0, lost.at_s - 0.5 * draw.random()), 3)
            faults.append(Fault(kind="cut", node=draw.choice(workers), at_s=before, seconds=1.0))
    for _ in range(draw.choice([0, 1, 2])):
        if replicas and draw.random() < 0.7:
            # The last replica is never lost, so one replica continues.
            faults.append(fault("kill kill stop cut", workers[:-1], (0.2, 1.0, LONG_S)))
        else:
            faults.append(fault("cut reset slow lossy", script.nodes, (0.2, 1.0)))
    return replace(script, faults=tuple(faults))
