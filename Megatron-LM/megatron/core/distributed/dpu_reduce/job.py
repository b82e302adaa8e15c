# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The job that ranks have joined: its hosts, their links, and its servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import bytepslib
from .routes import Network

_GBPS = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks told each other when BytePS started."""

    hosts: tuple[int, ...]
    """Of each rank: a number for each host."""
    network: Network
    measures: bool
    """Whether rates are found by trying, before anything is decided."""


_job: Job | None = None


def initialize() -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    global _job
    bps = bytepslib.byteps
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    if not bps.is_initialized():
        bps.init()
        _job = None
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (bps.rank(), bps.size()) != (rank, size):
        raise RuntimeError(
            f"BytePS is worker {bps.rank()} of {bps.size()}, torch.distributed is rank {rank} of "
            f"{size}: check RANK and WORLD_SIZE against DMLC_WORKER_ID and DMLC_NUM_WORKER"
        )
    if _job is None:
        _job = _meet()


def forget() -> None:
    """Ask all ranks anew when BytePS starts again."""
    global _job
    _job = None


def joined() -> Job:
    """What was told. Only after :func:`initialize`."""
    assert _job is not None
    return _job


def ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group, in its order."""
    return tuple(torch.distributed.get_process_group_ranks(group))


def _meet() -> Job:
    """Learn every rank's host and link; all ranks call this."""
    bps, setting = bytepslib.byteps, bytepslib.figures.setting
    mine = (
        bytepslib.hosts.host_name(),
        float(setting("BYTEPS_SERVER_LINK_GBPS")),
        -1 if _embedded() else int(setting("BYTEPS_LOCAL_SERVERS")),
        int(setting("BYTEPS_SERVERS_PER_MACHINE")),
        setting("BYTEPS_MEASURE_LINKS") == "1" and not float(setting("BYTEPS_LINK_GBPS")),
    )
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    names, server_rates, local, per_machine, measures = zip(*told, strict=True)
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    for variable, values in (
        ("BYTEPS_LOCAL_SERVERS", local),
        ("BYTEPS_SERVERS_PER_MACHINE", per_machine),
    ):
        if len(set(values)) > 1:
            raise RuntimeError(
                f"--use-dpu-reduce: ranks disagree on {variable}: {sorted(set(values))}"
            )
    count = len(bps.bytes_per_server(1, name="count"))
    servers = _servers(len(numbers), count, local[0], per_machine[0])
    # One plan for all ranks: the slowest NIC decides, and a rate that a rank does not know is not
    # known.
    host, server = bytepslib.engine.link_gbps(), min(server_rates)
    return Job(
        hosts=tuple(numbers[name] for name in names),
        network=Network(
            servers=servers,
            host_rate=host * _GBPS or None,
            server_rate=server * _GBPS or None,
        ),
        measures=all(measures),
    )


def _servers(hosts: int, count: int, local: int, per_machine: int) -> Any:
    """``local`` servers on each host, out of ``count``; -1: all of them are."""
    from byteps import cost_model

    if local < 0:
        each = max(1, count // hosts)
        return cost_model.Servers(hosts=hosts, extra=0, local=each)
    if local * hosts > count:
        raise RuntimeError(
            f"--use-dpu-reduce: BYTEPS_LOCAL_SERVERS={local} on {hosts} hosts are more than the "
            f"job's {count} servers"
        )
    extra = count - local * hosts
    if extra % per_machine:
        raise RuntimeError(
            f"--use-dpu-reduce: {extra} servers on machines of their own are no whole number of "
            f"machines with BYTEPS_SERVERS_PER_MACHINE={per_machine}"
        )
    return cost_model.Servers(
        hosts=hosts, extra=extra // per_machine, local=local, per_machine=per_machine
    )


def _embedded() -> bool:
    from byteps.launcher import embedded

    return bool(embedded.is_running())
