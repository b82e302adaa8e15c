"""A training step whose ranks need different times, and what the links allow it.

A rank's backward pass makes bucket after bucket ready, in the same order on all ranks; a bucket's
sum starts on a rank as soon as it is ready there. All ranks' steps begin at the same moment and end
when the last rank has its last sum. Everything here is arithmetic and needs no other module.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WAYS = ("servers", "ring")
KINDS = ("balanced", "starts late", "longer", "skewed")
FORWARD = 1 / 3
"""Of a rank's computing: no bucket is ready before the backward pass."""
SEQUENCES = 8
"""Of a rank in a skewed step."""
SIGMA = 1.0
"""Of their lengths' logarithms."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a rank computes in one step."""

    seconds: float
    """Forward and backward."""
    start: float = 0.0
    """When it begins, in seconds."""

    @property
    def end(self) -> float:
        """When it has computed all."""
        return self.start + self.seconds

    def ready(self, buckets: int) -> list[float]:
        """When each bucket is: at even distances over the backward pass."""
        backward = self.seconds * (1 - FORWARD)
        return [
            self.start + self.seconds * FORWARD + backward * (index + 1) / buckets
            for index in range(buckets)
        ]


@dataclass(frozen=True, kw_only=True)
class Links:
    """Who sums on what."""

    workers: int
    servers: int
    """On machines of their own."""
    rate: float
    """Bytes of payload a second, each way, of every link."""
    shards: bool = False
    """Each rank wants its share of the sums only, as a sharded optimizer does."""


def loads(kind: str, ranks: int, seconds: float, step: int, *, seed: int = 1) -> list[Load]:
    """What every rank computes in a step; the mean rank ``seconds``, or one of them more.

    - ``balanced``: all the same.
    - ``starts late``: one rank begins ``seconds`` later than the others; another one each step.
    - ``longer``: one rank computes twice as long; another one each step.
    - ``skewed``: each rank has eight sequences, of lengths from a log-normal distribution with
      sigma 1, and computes in proportion to their sum. All ranks' sum is that of ``balanced``.

    Raises:
        ValueError: the kind is not known.
    """
    late = step % ranks
    if kind == "balanced":
        return [Load(seconds=seconds)] * ranks
    if kind == "starts late":
        return [Load(seconds=seconds, start=seconds * (rank == late)) for rank in range(ranks)]
    if kind == "longer":
        return [Load(seconds=seconds * (1 + (rank == late))) for rank in range(ranks)]
    if kind == "skewed":
        draw = random.Random(f"{seed} {step}")
        tokens = [
            sum(draw.lognormvariate(0, SIGMA) for _ in range(SEQUENCES)) for _ in range(ranks)
        ]
        mean = sum(tokens) / ranks
        return [Load(seconds=seconds * one / mean) for one in tokens]
    raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")


def delay(late: Sequence[Load], balanced: Sequence[Load]) -> float:
    """Seconds by which the last rank computes longer than it does where all are balanced."""
    return max(load.end for load in late) - max(load.end for load in balanced)


def least_seconds(way: str, links: Links, size: int, buckets: int, ranks: Sequence[Load]) -> float:
    """The least time that the links allow a step, with ``size`` bytes in equal buckets.

    From each moment on, a link must carry all that is not ready before:

    - a ring begins a bucket when its last rank is ready, and sends 2(n-1)/n of it over each link,
      (n-1)/n where a rank wants its share only;
    - a worker sends a bucket to the servers as soon as it is ready on this worker, whatever the
      others do. Servers receive what is ready, n/k of it over each server's link, and send the sum
      of a bucket when its last rank is ready.

    Raises:
        ValueError: the way is not known.
    """
    ready = [load.ready(buckets) for load in ranks]
    last = [max(times) for times in zip(*ready, strict=True)]
    seconds = size / buckets / links.rate  # of a bucket on a link
    n, k = links.workers, links.servers
    if way == "ring":
        return _drained(last, seconds * (1 if links.shards else 2) * (n - 1) / n)
    if way != "servers":
        raise ValueError(f"way {way!r} is none of {', '.join(WAYS)}")
    share = 1 / n if links.shards else 1.0
    return max(
        *(_drained(times, seconds) for times in ready),  # each worker's pushes
        _drained(sorted(time for times in ready for time in times), seconds / k),  # their arrival
        _drained(last, seconds * share * max(1, n / k)),  # pulls
    )


def _drained(ready: Iterable[float], seconds: float) -> float:
    """When a link is done that takes so long for each message, in their order."""
    done = 0.0
    for time in ready:
        done = max(done, time) + seconds
    return done
