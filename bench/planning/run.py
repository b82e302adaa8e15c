#!/usr/bin/env python3
"""Times what Python costs in a job of thousands of ranks: the plan at start-up, and each push.

One process takes itself for a rank of a job that does not exist: nothing is sent, and
what is timed is this rank's own work alone. The plan is that of
megatron.core.distributed.dpu_reduce for a model of --groups bucket groups, routes, names, places
and declarations included. A push is byteps.torch's, up to the engine, over a group of --members. Of
several runs the fastest counts: whatever else a machine does only adds to it.

Exit status: 0 all is well; 1 a time above a threshold; 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import byteps.torch as bps
import torch
from byteps.cost_model import Servers
from byteps.torch import c_lib, engine, in_flight, nodes, session
from byteps.torch.routes import Network
from byteps.torch.world import Job
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.dpu_reduce import job, plan

from scripts.progress import aligned

PARTITION = 4 << 20
RATE = 12.5e9


class Model(SimpleNamespace):
    """A DistributedDataParallel, to which there may be weak references."""


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """Of a job: all of its ranks are one data-parallel group."""

    ranks: int
    per_host: int
    groups: int
    """Bucket groups, of one bucket each."""
    elements: int
    """Of a bucket: a multiple of `ranks`."""
    instances: int = 0
    """Of the distributed optimizer; 0: there is none."""
    rank: int = 0

    def model(self) -> Any:
        """What `register` looks at of a DistributedDataParallel."""
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.instances > 0,
            num_distributed_optimizer_instances=max(1, self.instances),
            overlap_grad_reduce=True,
            use_dpu_reduce=True,
        )
        owners = self.ranks // max(1, self.instances)
        first = self.rank // owners * owners
        parameter = torch.nn.Parameter(torch.empty(1))
        grads = torch.empty(self.elements, device="meta")
        buckets = [
            SimpleNamespace(bucket_id=index, grad_data=grads, params_list=[parameter])
            for index in range(self.groups)
        ]
        everybody = _Group(range(self.ranks))
        buffer = SimpleNamespace(
            buckets=buckets,
            data_parallel_group=_Group(range(first, first + owners)),
            param_dtype=torch.float32,
            grad_dtype=torch.float32,
            ddp_config=config,
        )
        return Model(
            ddp_config=config,
            config=SimpleNamespace(deterministic_mode=False),
            module=SimpleNamespace(vp_stage=0),
            dp_cp_group=everybody,
            expt_dp_group=everybody,
            bucket_groups=[
                SimpleNamespace(buckets=[bucket], previous_grad_reduce_bucket_group=None)
                for bucket in buckets
            ],
            buffers=[buffer],
            expert_parallel_bucket_groups=[],
            expert_parallel_buffers=[],
        )

    @contextlib.contextmanager
    def joined(self) -> Iterator[list[Any]]:
        """Inside, this process takes itself for one of the ranks. Gives what it declares."""
        hosts = self.ranks // self.per_host
        servers = Servers(hosts=hosts, extra=hosts)
        told = Job(
            hosts=tuple(rank // self.per_host for rank in range(self.ranks)),
            network=Network(servers=servers, host_rate=RATE, server_rate=None),
            measures=False,
        )
        launch = session.Launch(rank=self.rank, size=self.ranks, local_rank=0, local_size=1)
        declared: list[Any] = []
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (torch.distributed, "get_rank", lambda: self.rank),
                (torch.distributed, "get_process_group_ranks", lambda group: list(group.ranks)),
                (job, "initialize", lambda: None),
                (job, "_job", told),
                (nodes, "groups", SimpleNamespace(get=lambda ranks, *_: _node_of(ranks))),
                (session, "_launch", launch),
                (engine, "partition_bytes", lambda nbytes, **_: min(nbytes, PARTITION)),
                (bps, "partition_count", lambda nbytes, **_: -(-nbytes // PARTITION)),
                (engine, "bytes_per_server", lambda nbytes, **_: [nbytes] * servers.count),
                (bps, "bytes_per_server", lambda nbytes, **_: [nbytes] * servers.count),
                (c_lib, "declare", declared.extend),
                (c_lib.KnownTensor, "push_pull", lambda *_: 1),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            try:
                yield declared
            finally:
                plan.forget()
                in_flight.forget()


class _Group:
    """Stands in for a ProcessGroup."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks


def _node_of(ranks: Sequence[int]) -> nodes.NodeGroup:
    return nodes.NodeGroup(None, len(ranks))


RUNS = 3
PUSHES = 2000
ELEMENTS = 1 << 20
OPTIMIZERS = {"whole": 0, "sharded": 1, "sharded in each host": -1}
"""Instances of the distributed optimizer; -1: one on each host."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8192, help="of the job (default: 8192)")
    parser.add_argument("--per-host", type=int, default=8, help="of these (default: 8)")
    parser.add_argument("--groups", type=int, default=50, help="bucket groups (default: 50)")
    parser.add_argument("--members", type=int, default=4096, help="of a push (default: 4096)")
    parser.add_argument("--max-plan", type=float, metavar="S", help="seconds of a plan")
    parser.add_argument("--max-push", type=float, metavar="US", help="microseconds of a push")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    options = parser.parse_args(arguments)
    if options.per_host < 1 or options.ranks < 1 or options.ranks % options.per_host:
        parser.error("--ranks must be a multiple of --per-host")
    if options.members < 1 or options.groups < 1:
        parser.error("--members and --groups must be positive")
    return options


def plan_seconds(made_up: MadeUp) -> float:
    """Of the fastest of several."""
    times = []
    for _ in range(RUNS):
        model = made_up.model()
        with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
            begin = time.perf_counter()
            plan.register(model)
            times.append(time.perf_counter() - begin)
    return min(times)


def push_seconds(members: int, group: Callable[[], engine.Group]) -> float:
    """Of the fastest tenth of many, after the first."""
    tensor, own = torch.zeros(1024), group()
    times = []
    with MadeUp(ranks=members, per_host=1, groups=1, elements=members).joined():
        for _ in range(PUSHES):
            begin = time.perf_counter()
            engine.start(
                tensor,
                tensor,
                average=False,
                name="bucket",
                priority=0,
                group=own,
                placement=0,
            )
            times.append(time.perf_counter() - begin)
    return sorted(times[1:])[PUSHES // 10]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    elements = -(-ELEMENTS // options.ranks) * options.ranks
    common = {"ranks": options.ranks, "per_host": options.per_host, "groups": options.groups}
    rows: list[tuple[str, str, float, float | None]] = []
    for name, instances in OPTIMIZERS.items():
        count = options.ranks // options.per_host if instances < 0 else instances
        made_up = MadeUp(**common, elements=elements, instances=count)
        rows.append((f"plan, gradients {name}", "s", plan_seconds(made_up), options.max_plan))
    push = push_seconds(options.members, lambda: tuple(range(options.members)))
    rows.append((f"push, {options.members} members", "us", push * 1e6, options.max_push))
    print(f"# {options.ranks} ranks, {options.per_host} per host, {options.groups} bucket groups")
    table = [("what", "unit", "time", "at most", "gate")]
    for what, unit, value, most in rows:
        gate = "-" if most is None else "ok" if value <= most else "MISS"
        table.append((what, unit, f"{value:.3f}", "-" if most is None else f"{most:g}", gate))
    print(aligned(table))
    if options.json:
        results = [{"what": w, "unit": u, "time": t, "most": m} for w, u, t, m in rows]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"schema": 1, **common, "results": results}) + "\n")
    return int(any(most is not None and value > most for _, _, value, most in rows))


if __name__ == "__main__":
    sys.exit(main())
