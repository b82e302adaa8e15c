"""A rank of the experiment with stragglers: ``python -m bench.stragglers.rank SPEC RESULT``.

SPEC is JSON: ``experiment``, ``rendezvous`` (the file by which the ranks find each other) and
``timeout_s``. Rank 0 writes RESULT, a list of steps. All run on one machine, so one clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.kit.pattern import Pattern
from bench.stragglers.delays import KINDS, WAYS, Load, loads

_SOON_S = 0.1
"""From when rank 0 names a step's beginning until it: the other ranks hear of it meanwhile."""


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
