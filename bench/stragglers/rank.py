"""A step whose ranks need different times, what the links allow it, and a rank that measures it.

``python -m bench.stragglers.rank SPEC RESULT``: SPEC is JSON, with ``experiment``, ``rendezvous``
(the file by which the ranks find each other) and ``timeout_s``. Rank 0 writes RESULT, a list of
steps. All run on one machine, so one clock.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.kit.pattern import Pattern

_SOON_S = 0.1
"""From when rank 0 names a step's beginning until it: the other ranks hear of it meanwhile."""
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
        _drained(sorted(at for times in ready for at in times), seconds / k),  # their arrival
        _drained(last, seconds * share * max(1, n / k)),  # pulls
    )


def _drained(ready: Iterable[float], seconds: float) -> float:
    """When a link is done that takes so long for each message, in their order."""
    done = 0.0
    for at in ready:
        done = max(done, at) + seconds
    return done


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What every rank runs."""

    workers: int
    size: int
    """Bytes of fp32 that each rank has summed in a step."""
    buckets: int
    computing: Sequence[float]
    """Seconds that a balanced rank computes in a step: one case each."""
    steps: int
    """Of each case, kind and way; one more, before them, is not timed."""
    shards: bool
    """Each rank takes its share of each bucket's sum only."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """How one step went."""

    computing: float
    kind: str
    way: str
    number: int
    seconds: float
    """From the moment that all ranks began at until the last rank's last sum."""
    wrong: int
    """Elements of all ranks that were not the sum."""


class _Way(Protocol):
    """Sums buckets over all ranks, in place, each started when it is ready."""

    def start(self, index: int, bucket: torch.Tensor) -> Any: ...

    def finish(self, started: Any) -> None: ...

    def close(self) -> None: ...


class _Servers:
    """BytePS; buckets are dealt to the servers as Megatron's are, one after the other."""

    def __init__(self, *, shards: bool) -> None:
        import byteps.torch as bps

        self._bps, self._shards = bps, shards
        bps.init()

    def start(self, index: int, bucket: torch.Tensor) -> int:
        partitions = -(-bucket.nbytes // self._bps.partition_bytes(bucket.nbytes))
        handle = self._bps.push_pull_async_inplace(
            bucket,
            average=False,
            name=f"bucket.{index}",
            priority=-index,
            placement=index * partitions,
            pull=_share(bucket) if self._shards else None,
        )
        assert isinstance(handle, int)
        return handle

    def finish(self, started: int) -> None:
        self._bps.synchronize(started)

    def close(self) -> None:
        self._bps.shutdown()


class _Ring:
    """gloo's all-reduce, or its reduce-scatter."""

    def __init__(self, *, shards: bool) -> None:
        self._group, self._shards = dist.new_group(backend="gloo"), shards

    def start(self, index: int, bucket: torch.Tensor) -> Any:
        if not self._shards:
            return dist.all_reduce(bucket, group=self._group, async_op=True)
        begin, end = _share(bucket)
        return dist.reduce_scatter_tensor(
            bucket[begin:end], bucket, group=self._group, async_op=True
        )

    def finish(self, started: Any) -> None:
        started.wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _share(bucket: torch.Tensor) -> tuple[int, int]:
    """Begin and end of this rank's elements."""
    share = len(bucket) // dist.get_world_size()
    return dist.get_rank() * share, (dist.get_rank() + 1) * share


def _wait_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)


class _Rank:
    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._pattern = Pattern(
            rank=dist.get_rank(),
            ranks=experiment.workers,
            size=experiment.size,
            dtype="float32",
            device="cpu",
        )
        length = experiment.size // 4 // experiment.buckets
        self._buckets = [torch.empty(length) for _ in range(experiment.buckets)]
        self._ways: dict[str, _Way] = {
            "servers": _Servers(shards=experiment.shards),
            "ring": _Ring(shards=experiment.shards),
        }
        self._round = 0

    def run(self) -> list[Step]:
        """All steps, those of all cases, kinds and backends interleaved; empty on ranks but 0."""
        one, steps = self._experiment, []
        for number in range(-1, one.steps):
            for computing in one.computing:
                for kind in KINDS:
                    every = loads(kind, one.workers, computing, max(number, 0), seed=one.seed)
                    # Neither way is always the first.
                    for way in WAYS if number % 2 else reversed(WAYS):
                        seconds, wrong = self._step(way, every)
                        if number >= 0 and dist.get_rank() == 0:
                            steps.append(
                                Step(
                                    computing=computing,
                                    kind=kind,
                                    way=way,
                                    number=number,
                                    seconds=seconds,
                                    wrong=wrong,
                                )
                            )
        return steps

    def _step(self, way: str, every: Sequence[Load]) -> tuple[float, int]:
        """Seconds and wrong elements, of all ranks."""
        self._round += 1
        length = len(self._buckets[0])
        for index, bucket in enumerate(self._buckets):
            self._pattern.fill(bucket, self._round, index * length)
        dist.barrier()
        begin = [time.monotonic() + _SOON_S]
        dist.broadcast_object_list(begin)
        sums = self._ways[way]
        ready = every[dist.get_rank()].ready(len(self._buckets))
        started = []
        for index, (bucket, moment) in enumerate(zip(self._buckets, ready, strict=True)):
            _wait_until(begin[0] + moment)
            started.append(sums.start(index, bucket))
        for one in started:
            sums.finish(one)
        end = time.monotonic()
        wrong = sum(self._wrong(index, bucket) for index, bucket in enumerate(self._buckets))
        seen = torch.tensor([end - begin[0], wrong], dtype=torch.float64)
        dist.all_reduce(seen[:1], dist.ReduceOp.MAX)
        dist.all_reduce(seen[1:], dist.ReduceOp.SUM)
        return float(seen[0]), int(seen[1])

    def _wrong(self, index: int, bucket: torch.Tensor) -> int:
        begin, end = _share(bucket) if self._experiment.shards else (0, len(bucket))
        offset = index * len(bucket) + begin
        return self._pattern.count_wrong(bucket[begin:end], self._round, offset)

    def close(self) -> None:
        for way in self._ways.values():
            way.close()


def main(arguments: list[str]) -> int:
    spec_file, result_file = map(Path, arguments)
    spec = json.loads(spec_file.read_text())
    experiment = Experiment(**spec["experiment"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=int(os.environ["RANK"]),
        world_size=experiment.workers,
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    rank = _Rank(experiment)
    steps = rank.run()
    rank.close()
    if dist.get_rank() == 0:
        part = result_file.with_suffix(".part")
        part.write_text(json.dumps([asdict(step) for step in steps]))
        part.rename(result_file)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
