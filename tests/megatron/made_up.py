"""A simulated job of thousands of ranks, in which this process plays one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

PARTITION = 4 << 20
RATE = 12.5e9


class Model(SimpleNamespace):
    """A stand-in for DistributedDataParallel that allows weak references."""


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """Ranks of the job, all in one data-parallel group."""

    ranks: int
    per_host: int
    groups: int
    """Number of bucket groups, of one bucket each."""
    elements: int
    """Number of elements of a bucket, a multiple of `ranks`."""
    instances: int = 0
    """Number of instances of the distributed optimizer; 0: none."""
    rank: int = 0

    def model(self) -> Any:
        """Return the parts of a DistributedDataParallel that `register` uses."""
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
        """Context in which this process acts as one of the ranks. Yields its declarations."""
        hosts = self.ranks // self.per_host
        servers = Servers(hosts=hosts, extra=hosts)
        made = Job(
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
                (job, "_job", made),
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
    """A stand-in for ProcessGroup."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks


def _node_of(ranks: Sequence[int]) -> nodes.NodeGroup:
    return nodes.NodeGroup(None, len(ranks))
