"""Rank that trains a model of linear layers, or that times all-reduces.

``python -m bench.frameworks.rank SPEC RESULT``: SPEC is JSON, with ``rendezvous`` (the file through
which ranks meet), ``timeout_s``, and either ``experiment`` or ``bytes``, ``calls`` and ``device``.
Rank 0 writes RESULT, as JSON: for an experiment the milliseconds of each step, by backend;
otherwise the microseconds of each call, by the form of the call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.torch import c_lib, fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from bench.kit import fp8

ROUNDS = 5
"""Number of untimed calls before the timed calls."""
WAYS = ("ddp", "ddp-backend", "ddp-hook", "hsdp", "hsdp-backend")
"""Ways to train. Without a suffix, only gloo or NCCL reduces."""
SHARDED = {
    "fsdp": ("none", "none"),
    "fsdp-fp8": ("fp8", "none"),
    "fsdp-bf16": ("bf16", "none"),
    "fsdp-int8": ("int8", "none"),
    "fsdp-int8-gathers": ("int8", "int8"),
    "fsdp-int4-gathers": ("int4", "int8"),
}
"""Ways to train with FSDP2 over all ranks, with the wire types of gradients and of parameters.
"none": the collectives move them, in bf16. "fp8": gradients go through an all-to-all of the
collectives."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Experiment that every rank runs."""

    ways: Sequence[str]
    layers: int
    width: int
    """Number of inputs and outputs of a layer, which so has `width` squared parameters."""
    batch: int
    steps: int
    """Number of timed steps per way. Two untimed steps come first."""
    shards: int
    """With hsdp: number of ranks of a host that share a replica."""
    reduce_dtype: str | None
    """Type in which HSDP reduces gradients; None: the gradients' own."""
    device: str
    profile: str | None = None
    """File for torch.profiler's trace of one more step of the last way. Rank 0 writes it."""


class Fp8ReduceScatter(DefaultReduceScatter):
    """Reduce-scatter in blocks of fp8: an all-to-all gives each rank the blocks of its shard, and
    the rank averages them in fp32."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert op == dist.ReduceOp.AVG, "the benchmark's gradients are averaged"
        ranks = group.size()
        blocks = fp8.encode(input_tensor.float())
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        output_tensor.copy_(fp8.decode(received).view(ranks, -1).mean(0).view_as(output_tensor))


class Trained:
    """Model and its optimizer, trained in a given way."""

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
                if kind == "fsdp":
                    everybody = dist.new_group(list(range(size)))
                    mesh = DeviceMesh.from_group(everybody, experiment.device.partition(":")[0])
                    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
                else:
                    mesh = _mesh(experiment, rank, size)
                    reduced = torch.bfloat16 if experiment.reduce_dtype == "bf16" else None
                    policy = MixedPrecisionPolicy(reduce_dtype=reduced)
                for layer in layers:
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(self._model, mesh=mesh, mp_policy=policy)
                if way == "fsdp-fp8":
                    for module in self._model.modules():
                        if isinstance(module, FSDPModule):
                            module.set_custom_reduce_scatter(Fp8ReduceScatter())
                elif way in SHARDED and way != kind:
                    wire_dtype, gather_dtype = SHARDED[way]
                    fsdp.apply(self._model, wire_dtype=wire_dtype, gather_dtype=gather_dtype)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01)
        self._device = device
        torch.manual_seed(100 + rank)
        self._given = torch.randn(experiment.batch, experiment.width).to(device)

    def step(self) -> float:
        """Make a step. Return the milliseconds of the slowest rank."""
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
        """Return a checksum of this rank's parameters. It is equal for ways that learn the same."""
        return sum(
            float(getattr(p, "to_local", lambda p=p: p)().double().sum())
            for p in self._model.parameters()
        )


def _profile(model: Trained, path: Path, rank: int) -> None:
    """Make a step on every rank. Rank 0 profiles it."""
    if rank != 0:
        model.step()
        return
    with torch.profiler.profile() as profiler:
        model.step()
    profiler.export_chrome_trace(str(path))


def _mesh(experiment: Experiment, rank: int, size: int) -> DeviceMesh:
    """Return the mesh in which each replica consists of the ranks of a host.

    The groups are created here, because torch would use the default group for a dimension with all
    ranks.
    """
    rows = torch.arange(size).view(-1, experiment.shards)
    own = []
    for lines in (rows.T, rows):
        groups = {tuple(line): dist.new_group(line) for line in lines.tolist()}
        own += [group for ranks, group in groups.items() if rank in ranks]
    return DeviceMesh.from_group(
        own, experiment.device.partition(":")[0], rows, mesh_dim_names=("replicate", "shard")
    )


@contextlib.contextmanager
def _native() -> Iterator[None]:
    """Return a context in which new groups do not use BytePS."""
    inside: Any = dist.distributed_c10d
    carrying = inside._new_process_group_helper
    inside._new_process_group_helper = carrying.__wrapped__
    try:
        yield
    finally:
        inside._new_process_group_helper = carrying


def train(experiment: Experiment, rank: int, size: int) -> dict[str, Any]:
    """Return the milliseconds of the steps of each way, and checksums of the trained parameters."""
    models = {way: Trained(way, experiment, rank, size) for way in experiment.ways}
    steps: dict[str, list[float]] = {way: [] for way in models}
    for number in range(experiment.steps + 2):
        for way, model in models.items():
            took = model.step()
            if number >= 2:
                steps[way].append(took)
    if experiment.profile:
        _profile(list(models.values())[-1], Path(experiment.profile), rank)
    return {"steps": steps, "sums": {way: model.check_sum() for way, model in models.items()}}


def on_cpu(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return the microseconds of calls of both forms, with an engine that does nothing.

    Before, both forms make a checked sum through the servers.
    """
    (nbytes,) = spec["bytes"]
    tensor = torch.zeros(nbytes // 4)
    forms: dict[str, Callable[[], object]] = {
        "push_pull_inplace": lambda: bps.push_pull_inplace(tensor, average=False, name="tensor"),
        "all_reduce": lambda: dist.all_reduce(tensor),
    }
    for call in forms.values():
        for _ in range(ROUNDS):
            call()
    done = bps.get_metrics()["byteps_worker_operations_total"]
    if done != len(forms) * ROUNDS:
        raise SystemExit(f"{done:g} of {len(forms) * ROUNDS} all-reduces went through the server")
    took: dict[str, list[float]] = {form: [] for form in forms}
    handles = itertools.count(1 << 40)
    with (
        mock.patch.object(c_lib.KnownTensor, "push_pull", lambda *arguments: next(handles)),
        mock.patch.object(c_lib, "wait", lambda *arguments: None),
    ):
        for _ in range(spec["calls"]):
            for form, call in forms.items():
                begin = time.perf_counter_ns()
                call()
                took[form].append((time.perf_counter_ns() - begin) / 1e3)
    return took


def on_gpu(spec: dict[str, Any], rank: int) -> dict[str, list[float]]:
    """Return the microseconds of host time to start an all-reduce of each size.

    Raises SystemExit if a sum is wrong or did not go through the servers.
    """
    took: dict[str, list[float]] = {}
    started = 0
    for nbytes in spec["bytes"]:
        tensor = torch.empty(nbytes // 4, device="cuda")
        calls = took[f"all_reduce of {nbytes / 2**20:g} MiB"] = []
        for number in range(ROUNDS + spec["calls"]):
            tensor.fill_(rank + number)
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter_ns()
            work = dist.all_reduce(tensor, async_op=True)
            spent = (time.perf_counter_ns() - begin) / 1e3
            work.wait()
            if not bool((tensor == 2 * number + 1).all()):
                raise SystemExit(f"all-reduce {number} of {nbytes} bytes is wrong")
            if number >= ROUNDS:
                calls.append(spent)
        started += ROUNDS + spec["calls"]
    dist.barrier()
    done = bps.get_metrics()["byteps_worker_operations_total"]
    if done < started - 1:  # the last sum may be counted only after its values arrive
        raise SystemExit(f"{done:g} of {started} all-reduces went through the servers")
    return took


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    experiment = Experiment(**spec["experiment"]) if "experiment" in spec else None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_host = (experiment.device if experiment else spec["device"]) == "cpu"
    torch.set_num_threads(1)
    if not on_host:  # if there are fewer GPUs than ranks, ranks share them
        torch.cuda.set_device(rank % torch.cuda.device_count())
    c10d_plugin.install()
    dist.init_process_group(
        "gloo" if on_host else "cpu:gloo,cuda:nccl",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    if experiment:
        result = train(experiment, rank, size)
    else:
        result = on_cpu(spec) if on_host else on_gpu(spec, rank)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
