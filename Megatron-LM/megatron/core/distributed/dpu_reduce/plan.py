# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""One plan made when DDP is built: what is summed by which route, under which name, and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .bytepslib import byteps, nodes
from .naming import bucket_name, bucket_priority, named, partition_count
from .refusals import WIRE_DTYPES, validate_ddp_config
from .routes import COLLECTIVE, FLAT, NODE_FIRST, Decision, Network, Sum, decide, per_host

if TYPE_CHECKING:
    from byteps.torch.nodes import NodeSum

    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )

logger = logging.getLogger(__name__)

_GBPS = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class BucketOp:
    """How one bucket is summed; fixed when DDP is built.

    It holds no data pointer: gradient buffers may be freed and allocated again between steps.
    """

    name: str
    """Key of the operation: the same on every rank of the group, unique in the job."""
    group: tuple[int, ...]
    """Global ranks that sum, in the order of the process group: the whole data-parallel group."""
    owners: tuple[int, ...]
    """Global ranks among which the distributed optimizer cuts the bucket into equal shards, in
    this order: the members of this rank's optimizer instance, which is all of the group where
    there is one instance."""
    priority: int
    """Higher goes first. 0 for what the next forward pass needs first, negative after that."""
    placement: int
    """Place of the bucket's first partition in the round robin over the servers."""
    wire_dtype: torch.dtype
    """Type in which the gradients travel; that of the bucket, unless another was asked for."""
    route: str
    """``collective``, ``flat`` or ``node-first``; the same for all buckets of a bucket group."""
    node_whole: NodeSum | None = None
    """Node first: the sum of which every rank gets all."""
    node_shards: NodeSum | None = None
    """Node first, with the distributed optimizer: the sum of which each rank gets its shard."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all ranks told each other when BytePS started."""

    hosts: tuple[int, ...]
    """Of each rank: a number for each host."""
    network: Network


_BY_SERVERS = Decision(route=FLAT, why="servers keep the optimizer", loads={}, seconds={})

_job: _Job | None = None
_told: set[str] = set()


def initialize() -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    global _job
    bps = byteps()
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
    """Let go of everything that was planned."""
    global _job
    _job = None
    _told.clear()
    named.clear()


def _meet() -> _Job:
    """Learn every rank's host and link; all ranks call this."""
    bps, node = byteps(), nodes()
    mine = (
        node.host_name(),
        float(node.setting("BYTEPS_LINK_GBPS")) or _card_gbps(node.setting("DMLC_INTERFACE")),
        float(node.setting("BYTEPS_SERVER_LINK_GBPS")),
        -1 if _embedded() else int(node.setting("BYTEPS_LOCAL_SERVERS")),
        int(node.setting("BYTEPS_SERVERS_PER_MACHINE")),
    )
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    names, rates, server_rates, local, per_machine = zip(*told, strict=True)
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
    # One plan for all ranks: the slowest card decides, and a rate that a rank does not know is not
    # known.
    host, server = min(rates), min(server_rates)
    return _Job(
        hosts=tuple(numbers[name] for name in names),
        network=Network(
            servers=servers,
            host_rate=host * _GBPS or None,
            server_rate=server * _GBPS or None,
        ),
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


def _card_gbps(interface: str, root: Path = Path("/sys/class/net")) -> float:
    """Rate of the named network card, or of the slowest that is up; 0 where none tells.

    Only devices are asked: what a virtual interface says of its speed is made up.
    """
    rates = []
    for entry in [root / interface] if interface else sorted(root.glob("*")):
        try:
            speed = int((entry / "speed").read_text())
            up = (entry / "operstate").read_text().strip() == "up"
        except (OSError, ValueError):
            continue
        if up and speed > 0 and (entry / "device").exists():
            rates.append(speed / 1e3)
    return min(rates, default=0.0)


# --------------------------------------------------------------------------- a model's plan


def register(ddp: DistributedDataParallel) -> None:
    """Give each bucket of a newly built DDP its :class:`BucketOp`.

    Starts BytePS too where ``megatron.training`` did not.

    Raises:
        ValueError: the config is not supported; the text says why.
    """
    validate_ddp_config(ddp.ddp_config)
    chunk = _chunk_index(ddp.module)
    initialize()
    decisions: dict[int, Decision] = {}
    for kind, group, groups, _ in _kinds(ddp):
        if ddp.ddp_config.dpu_optimizer:
            decisions |= {id(bucket): _BY_SERVERS for g in groups for bucket in g.buckets}
        elif groups:
            decisions |= _decide(ddp.ddp_config, kind, group, groups)

    for kind, group, _, buffers in _kinds(ddp):
        if not buffers:
            continue
        model = named.next_model(kind, _ranks(group), chunk)
        for buffer in buffers:
            _register_buffer(buffer, decisions, kind=kind, group=group, model=model, chunk=chunk)

    buckets = [bucket for *_, buffers in _kinds(ddp) for b in buffers for bucket in b.buckets]
    names = [bucket.dpu_reduce_op.name for bucket in buckets]
    if len(set(names)) != len(names):
        raise RuntimeError(f"two gradient buckets share a BytePS name: {sorted(names)}")
    if not ddp.ddp_config.dpu_optimizer:  # else the optimizer does, with what servers do
        _declare(buckets, ddp.ddp_config)
    through = [bucket for bucket in buckets if bucket.dpu_reduce_op.route != COLLECTIVE]
    spread = _spread(through)
    logger.info(
        "gradient sums: %d of %d buckets go through BytePS, chunk %d, %.1f MB from this rank; the "
        "%d servers get %.1f to %.1f MB each",
        *(len(through), len(names), chunk, sum(spread) / 1e6),
        *(len(spread), min(spread) / 1e6, max(spread) / 1e6),
    )


def _declare(buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig) -> None:
    """Tell the servers of all sums by one message to each, so that no first step waits for them."""
    bps, rank, declarations = byteps(), torch.distributed.get_rank(), []
    average = config.average_in_collective
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        grads = bucket.grad_data
        if op.route == COLLECTIVE or len(op.group) == 1 or grads.numel() == 0:
            continue
        # Only these are summed at every step. The whole of a bucket that the optimizer shards is
        # summed when somebody asks for it, and declares itself then.
        sums = op.node_shards or op.node_whole
        if sums is not None:
            declarations += sums.declarations(rank, grads.dtype, grads.device)
            continue
        declarations.append(
            bps.TensorDeclaration(
                name=op.name,
                dtype=grads.dtype,
                numel=grads.numel(),
                average=average,
                group=op.group,
                placement=op.placement,
                wire_dtype=op.wire_dtype,
                device=grads.device,
            )
        )
    if declarations:
        bps.declare(declarations)


_Group = torch.distributed.ProcessGroup


def _kinds(
    ddp: DistributedDataParallel,
) -> Iterable[
    tuple[str, _Group, Sequence[_ParamAndGradBucketGroup], Sequence[_ParamAndGradBuffer]]
]:
    yield "dense", ddp.dp_cp_group, ddp.bucket_groups, ddp.buffers
    yield (
        "expert",
        ddp.expt_dp_group,
        ddp.expert_parallel_bucket_groups,
        ddp.expert_parallel_buffers,
    )


def _decide(
    config: DistributedDataParallelConfig,
    kind: str,
    group: _Group,
    groups: Sequence[_ParamAndGradBucketGroup],
) -> dict[int, Decision]:
    """The decision for each bucket, by its id; tell on rank 0 how it came about."""
    assert _job is not None
    hosts = tuple(_job.hosts[rank] for rank in _ranks(group))
    asked = config.dpu_reduce_route or "auto"
    decisions, table = {}, []
    for bucket_group in groups:
        sent = sum(_sent_bytes(bucket, config) for bucket in bucket_group.buckets)
        what = Sum(
            hosts=hosts,
            gradient_bytes=sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets),
            wire_bytes=sent,
            sharded=config.use_distributed_optimizer,
            instances=config.num_distributed_optimizer_instances,
        )
        decision = decide(what, _job.network, asked)
        table.append((what, decision))
        decisions |= {id(bucket): decision for bucket in bucket_group.buckets}
    if torch.distributed.get_rank() == 0:
        text = describe(kind, table, _job.network)
        if text not in _told:
            _told.add(text)
            print(_as_lines(text), flush=True)
    return decisions


def _as_lines(text: str) -> str:
    """The table as it is, or where lines of the log are JSON as one of them."""
    if os.environ.get("BYTEPS_LOG_FORMAT") != "json":
        return text
    from byteps import logs

    return logs.render(logging.INFO, text)


def _sent_bytes(bucket: _ParamAndGradBucket, config: DistributedDataParallelConfig) -> int:
    return bucket.grad_data.numel() * _wire_dtype(bucket.grad_data.dtype, config).itemsize


def describe(kind: str, sums: Sequence[tuple[Sum, Decision]], network: Network) -> str:
    """The table of a model chunk's sums: bytes over the cards and time by each route, and which
    was chosen and why."""
    first = sums[0][0]
    members, servers = sorted(per_host(first.hosts).values()), network.servers
    each = str(members[0]) if members[0] == members[-1] else f"{members[0]} to {members[-1]}"
    rates = "link rates not known (BYTEPS_LINK_GBPS): bytes are compared"
    if network.host_rate:
        server = network.server_rate or network.host_rate
        rates = f"{network.host_rate / _GBPS:g} Gbit/s a host, {server / _GBPS:g} Gbit/s a server"
    lines = [
        f"dpu_reduce: {kind} gradients over {len(first.hosts)} ranks, {each} on each of "
        f"{len(set(first.hosts))} hosts; servers: {servers.per_machine if servers.extra else 0} on "
        f"each of {servers.extra} machines of their own, {servers.local} on each of "
        f"{servers.hosts} hosts; {rates}"
    ]
    rows = [("buckets", "MB", "way", "MB a host's card", "MB a server's card", "ms", "chosen")]
    by_plan: dict[tuple[str, str], list[tuple[Sum, Decision]]] = {}
    for what, decision in sums:
        by_plan.setdefault((decision.route, decision.why), []).append((what, decision))
    for (chosen, why), alike in by_plan.items():
        head = (str(len(alike)), f"{sum(what.gradient_bytes for what, _ in alike) / 1e6:.1f}")
        for route in alike[0][1].loads:
            host = sum(decision.loads[route].host for _, decision in alike) / 1e6
            server = sum(decision.loads[route].server for _, decision in alike) / 1e6
            seconds = sum(decision.seconds[route] for _, decision in alike)
            rows.append(
                (
                    *head,
                    _collective_name(first) if route == COLLECTIVE else f"BytePS {route}",
                    f"{host:.1f}",
                    "-" if route == COLLECTIVE else f"{server:.1f}",
                    f"{seconds * 1e3:.1f}" if network.host_rate else "-",
                    f"yes: {why}" if route == chosen else "",
                )
            )
            head = ("", "")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _collective_name(what: Sum) -> str:
    if not what.sharded:
        return "all-reduce"
    return "reduce-scatter" if what.instances == 1 else "reduce-scatter, all-reduce of shards"


def _spread(buckets: Sequence[_ParamAndGradBucket]) -> list[int]:
    """Bytes that this rank pushes to each server in one step, of these buckets."""
    bps, rank = byteps(), torch.distributed.get_rank()
    total = [0] * len(bps.bytes_per_server(1, name="count"))
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        sums = op.node_shards or op.node_whole
        if sums is None:
            nbytes = bucket.grad_data.numel() * op.wire_dtype.itemsize
            pushes = [(op.name, nbytes, op.group, op.placement)]
        else:
            size = bucket.grad_data.element_size()
            pushes = [(p.name, p.nbytes, p.group, p.placement) for p in sums.pushes(rank, size)]
        for name, nbytes, group, placement in pushes:
            part = bps.bytes_per_server(nbytes, name=name, group=group, placement=placement)
            total = [a + b for a, b in zip(total, part, strict=True)]
    return total


def _wire_dtype(grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig) -> torch.dtype:
    """The wire type that was asked for is for fp32: of a half type it would keep less."""
    if ddp_config.dpu_reduce_wire_dtype is None or grad_dtype != torch.float32:
        return grad_dtype
    return WIRE_DTYPES[ddp_config.dpu_reduce_wire_dtype]


def _ranks(group: _Group) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _register_buffer(
    buffer: _ParamAndGradBuffer,
    decisions: dict[int, Decision],
    *,
    kind: str,
    group: _Group,
    model: int,
    chunk: int,
) -> None:
    ranks, owners = _ranks(group), _ranks(buffer.data_parallel_group)
    instances = buffer.ddp_config.num_distributed_optimizer_instances
    if not set(owners) <= set(ranks) or len(owners) * instances != len(ranks):
        raise RuntimeError(
            f"--use-dpu-reduce: the {kind} data-parallel group {ranks} is not {instances} "
            f"optimizer instance(s) of ranks {owners}"
        )
    wire_dtype = _wire_dtype(buffer.grad_dtype, buffer.ddp_config)
    if buffer.ddp_config.dpu_optimizer and buffer.param_dtype == torch.float32:
        wire_dtype = torch.float32  # in which parameters come down
    for bucket in buffer.buckets:
        op = BucketOp(
            name=bucket_name(
                kind=kind,
                group=ranks,
                model=model,
                chunk=chunk,
                param_dtype=buffer.param_dtype,
                grad_dtype=buffer.grad_dtype,
                bucket_id=bucket.bucket_id,
            ),
            group=ranks,
            owners=owners,
            priority=bucket_priority(
                chunk=chunk, bucket_id=bucket.bucket_id, num_buckets=len(buffer.buckets)
            ),
            placement=0,
            wire_dtype=wire_dtype,
            route=decisions[id(bucket)].route,
        )
        bucket.dpu_reduce_op = _placed(op, bucket, buffer, group)


def _placed(
    op: BucketOp, bucket: _ParamAndGradBucket, buffer: _ParamAndGradBuffer, group: _Group
) -> BucketOp:
    """The operation with its place on the servers and, node first, its sums inside the host."""
    from dataclasses import replace

    bps, elements = byteps(), bucket.grad_data.numel()
    if op.route == COLLECTIVE or elements == 0:
        return op
    nbytes = elements * op.wire_dtype.itemsize
    if op.route == FLAT:
        partitions = partition_count(nbytes, bps.partition_bytes(nbytes))
        return replace(op, placement=named.next_placement(op.group, partitions))
    assert op.route == NODE_FIRST
    sums = _node_sums(op, bucket, buffer, group)
    pushes = sums[0].pushes(torch.distributed.get_rank(), bucket.grad_data.element_size())
    partitions = sum(
        partition_count(push.nbytes, bps.partition_bytes(push.nbytes)) for push in pushes
    )
    placement = named.next_placement(op.group, partitions)
    whole, shards = (replace(one, placement=placement) if one else None for one in sums)
    return replace(op, placement=placement, node_whole=whole, node_shards=shards)


def _node_sums(
    op: BucketOp, bucket: _ParamAndGradBucket, buffer: _ParamAndGradBuffer, group: _Group
) -> tuple[NodeSum, NodeSum | None]:
    assert _job is not None
    node, rank = nodes(), torch.distributed.get_rank()
    layout = node.HostLayout.of(op.group, [str(_job.hosts[r]) for r in op.group])
    beside, elements = layout.beside(rank), bucket.grad_data.numel()
    pieces = node.piece_count(elements * op.wire_dtype.itemsize // len(beside))
    common = {
        "layout": layout,
        "node": node.groups.get(
            beside, bucket.grad_data.device, (buffer.data_parallel_group, group)
        ),
        "average": buffer.ddp_config.average_in_collective,
        "priority": op.priority,
        "wire_dtype": op.wire_dtype,
    }
    whole = node.NodeSum(
        name=op.name,
        pieces=tuple(node.whole_pieces(elements, len(beside), pieces)),
        **common,
    )
    if not buffer.ddp_config.use_distributed_optimizer:
        return whole, None
    shards = len(op.owners)
    owned = [[op.group.index(r) % shards for r in members] for members in layout.hosts]
    mine = owned[layout.host_of(rank)][layout.local_index(rank)]
    if op.owners[mine] != rank:
        raise RuntimeError(
            f"--use-dpu-reduce: rank {rank} is not shard {mine} of the owners {op.owners} in the "
            f"data-parallel group {op.group}"
        )
    cut = node.shard_pieces(elements, owned, layout.host_of(rank), layout.local_index(rank), pieces)
    if cut is None:
        # Several instances on one host: its ranks own the same shards, and gather more than these.
        return whole, None
    return whole, node.NodeSum(name=f"{op.name}/shards", pieces=tuple(cut), **common)


def _chunk_index(module: torch.nn.Module) -> int:
    """Virtual pipeline stage of a model chunk, which mixed-precision wrappers may hide."""
    while True:
        stage = getattr(module, "vp_stage", None)
        if stage is not None:
            return int(stage)
        if not hasattr(module, "module"):
            return 0
        module = module.module
