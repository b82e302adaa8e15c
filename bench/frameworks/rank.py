"""A rank that trains a model of linear layers: ``python -m bench.frameworks.rank SPEC RESULT``.

SPEC is JSON: ``experiment``, ``rendezvous`` (the file by which the ranks find each other) and
``timeout_s``. Rank 0 writes RESULT, the milliseconds of every step by way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byteps import c10d_plugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WAYS = ("ddp", "ddp-backend", "ddp-hook", "hsdp", "hsdp-backend")
"""Those without a suffix reduce by gloo, or NCCL, alone."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What every rank runs."""

    ways: Sequence[str]
    layers: int
    width: int
    """Parameters of a layer: its square."""
    batch: int
    steps: int
    """Of each way; two more, before them, are not timed."""
    shards: int
    """Ranks of a host that share a replica, with hsdp."""
    reduce_dtype: str | None
    """In which HSDP reduces gradients; None: their own."""
    device: str
    profile: str | None = None
    """Where rank 0 writes torch.profiler's trace of one more step, of the last way."""


class Trained:
    """A model and its optimizer, trained in one way."""

    def __init__(self, way: str, experiment: Experiment, rank: int, size: int) -> None:
        torch.manual_seed(7)
        device = torch.device(experiment.device)
        layers = [
            nn.Linear(experiment.width, experiment.width, bias=False)
            for _ in range(experiment.layers)
        ]
        self._model: nn.Module = nn.Sequential(*layers).to(device)
        kind, _, through = way.partition("-")
        with _native() if through != "backend" else contextlib.nullcontext():
            if kind == "ddp":
                group = dist.new_group(list(range(size)))
                self._model = DistributedDataParallel(
                    self._model, process_group=group, gradient_as_bucket_view=True
                )
                if through == "hook":
                    from byteps.torch.c10d.hooks import ddp_comm_hook

                    self._model.register_comm_hook(group, ddp_comm_hook)
            else:
                mesh = _mesh(experiment, rank, size)
                reduced = torch.bfloat16 if experiment.reduce_dtype == "bf16" else None
                policy = MixedPrecisionPolicy(reduce_dtype=reduced)
                for layer in layers:
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01)
        self._device = device
        torch.manual_seed(100 + rank)
        self._given = torch.randn(experiment.batch, experiment.width).to(device)

    def step(self) -> float:
        """Milliseconds of a step of the slowest rank."""
        self._optimizer.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        self._model(self._given).square().mean().backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took) * 1e3

    def check_sum(self) -> float:
        """Of the parameters of this rank: alike in ways that learn the same."""
        return sum(
            float(getattr(p, "to_local", lambda p=p: p)().double().sum())
            for p in self._model.parameters()
        )


def _profile(model: Trained, path: Path, rank: int) -> None:
    """Every rank makes a step; rank 0 records it."""
    if rank != 0:
        model.step()
        return
    with torch.profiler.profile() as profiler:
        model.step()
    profiler.export_chrome_trace(str(path))


def _mesh(experiment: Experiment, rank: int, size: int) -> DeviceMesh:
    """Replicas, each of the ranks of a host.

    Of groups made here: by itself torch takes the default group for a dimension that has all ranks.
    """
    rows = torch.arange(size).view(-1, experiment.shards)
    mine = []
    for lines in (rows.T, rows):
        groups = {tuple(line): dist.new_group(line) for line in lines.tolist()}
        mine += [group for ranks, group in groups.items() if rank in ranks]
    return DeviceMesh.from_group(
        mine, experiment.device.partition(":")[0], rows, mesh_dim_names=("replicate", "shard")
    )


@contextlib.contextmanager
def _native() -> Iterator[None]:
    """Groups that are made meanwhile are not carried by BytePS."""
    inside: Any = dist.distributed_c10d
    carrying = inside._new_process_group_helper
    inside._new_process_group_helper = carrying.__wrapped__
    try:
        yield
    finally:
        inside._new_process_group_helper = carrying


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    experiment = Experiment(**spec["experiment"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if experiment.device != "cpu":  # ranks share GPUs where there are fewer
        torch.cuda.set_device(rank % torch.cuda.device_count())
    c10d_plugin.install()
    dist.init_process_group(
        "gloo" if experiment.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    models = {way: Trained(way, experiment, rank, size) for way in experiment.ways}
    steps: dict[str, list[float]] = {way: [] for way in models}
    for number in range(experiment.steps + 2):
        for way, model in models.items():
            took = model.step()
            if number >= 2:
                steps[way].append(took)
    if experiment.profile:
        _profile(list(models.values())[-1], Path(experiment.profile), rank)
    sums = {way: model.check_sum() for way, model in models.items()}
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"steps": steps, "sums": sums}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
