"""Reduce-scatters of one group of ranks through the servers.

Each rank pushes its gradients shard by shard, and pulls the sum of its own shard. The servers on
the host of a shard's owner sum the shard, so that the sum passes no NIC. With the node-first route,
the ranks of a host sum among themselves before they push.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from byteps.routing import FLAT, Decision, Sum, decide
from byteps.torch import c_lib, engine, nodes, operations, session, wire
from byteps.torch.c10d import identity
from byteps.torch.c10d.reductions import (
    REFERENCE_BYTES,
    Reduction,
    Reductions,
    Settings,
    are_streamed,
    joined,
    tell,
)
from byteps.torch.c10d.work import ServerWork, StreamedWork, Work
from byteps.torch.names import Names
from byteps.torch.node_groups import NodeGroup, Piece
from byteps.torch.wire import WireType
from byteps.torch.world import HostLayout, Job


class ReduceScatters(Reductions):
    """Reduce-scatters of a group. Every member makes such an object, and all members start the same
    reduce-scatters in the same order."""

    def __init__(self, of: identity.Identity, settings: Settings, backend: str) -> None:
        """Create the object; a group has one object per settings and native backend.

        Args:
            of: identity of the group.
            settings: settings, the same on all members.
            backend: torch's name of the backend that reduces what does not go through the servers.
        """
        super().__init__(of, f"scatter-{settings.wire_dtype}-{backend}", settings)
        self._is_gloo = backend == "gloo"

    def begin_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        average: bool,
        factor: float,
        owner: object,
    ) -> Work | None:
        """Start a reduce-scatter; return None if it does not go through the servers (see `takes`).

        Args:
            output: receives this rank's shard; one dimension, contiguous, of the type of `source`.
            source: all shards, one after the other. Its values are undefined afterwards.
            average: divide the sum by the number of ranks.
            factor: values are multiplied by this factor first.
            owner: see `begin`.

        Raises:
            BytePSError: the job failed, or members disagree about the tensor.
        """
        if not self.takes(source) or not (source.is_contiguous() and output.is_contiguous()):
            return None
        form = self._settings.wire_of(source.dtype)
        number = self._number(owner, source)
        key = source.dtype, source.numel(), average, source.device, number
        if key not in self._sums:
            self._sums[key] = self._prepare_scatter(source.view(-1), average, form, number)
        scatter = self._sums[key]
        assert isinstance(scatter, _Scatter)
        if factor != 1:
            source.mul_(factor)
        return scatter.begin(output.view(-1), source.view(-1))

    def _decide(self, job: Job, dtype: torch.dtype) -> Decision:
        hosts = tuple(job.hosts[rank] for rank in self._ranks)
        what = Sum(
            hosts=hosts,
            gradient_bytes=REFERENCE_BYTES,
            wire_bytes=self._settings.wire_of(dtype).nbytes(REFERENCE_BYTES // dtype.itemsize),
            sharded=True,
            placed=bool(job.servers_on),
            by_all_reduce=self._is_gloo,
        )
        decision = decide(what, job.network, self._settings.backend)
        tell("reduce-scatters", self._ranks, hosts, dtype, decision, self._settings)
        return decision

    def _prepare_scatter(
        self, source: torch.Tensor, average: bool, form: WireType, number: int
    ) -> _Scatter:
        name = self._name(source, average, number)
        job, rank = joined(), session.rank()
        host_names = [str(job.hosts[member]) for member in self._ranks]
        layout = HostLayout.of(self._ranks, host_names)
        numel = source.numel() // len(self._ranks)
        if self._route(source.dtype) == FLAT:
            node, group = None, self._ranks
            owners: list[tuple[int, ...]] = [(member,) for member in self._ranks]
        else:
            ranks = layout.on_host_of(rank)
            node = nodes.groups.get(ranks, source.device, purpose=self._key)
            group, owners = layout.across(rank), list(layout.hosts)
            name += f"/part{layout.local_index(rank)}"
        parts = []
        for number, members in enumerate(owners):
            places = [self._ranks.index(member) for member in members]
            ranges = tuple((shard * numel, (shard + 1) * numel) for shard in places)
            servers = _servers_of(job, layout, members[layout.local_index(rank) if node else 0])
            part = _Part(
                piece=Piece(scatters=(ranges,), wanted=None, gather=False),
                is_own=rank in members,
                pushes=tuple(_cut(f"{name}/shard{number}", numel, servers)),
            )
            parts.append(part)
        first = next(index for index, part in enumerate(parts) if part.is_own) + 1
        scatter = _Scatter(
            # Each rank begins with the shards of another host. Otherwise all ranks would send to
            # the same host at once.
            parts=(*parts[first:], *parts[:first]),
            node=node,
            local=layout.local_index(rank),
            group=group,
            average=average,
            wire=form,
        )
        names = [push.name for part in parts for push in part.pushes]
        self._names.append(Names(*names, group=group))
        scatter.declare(source)
        return scatter


def _servers_of(job: Job, layout: HostLayout, owner: int) -> Sequence[int]:
    """Return the servers that sum the shard of rank `owner`: those on its host or, if the servers'
    hosts are unknown, an equal part of all servers. Empty: all servers sum the shard."""
    host, count = job.hosts[owner], len(engine.server_hosts())
    hosts = max(job.hosts) + 1
    if job.servers_on:
        servers = job.servers_on[host]
    elif count % hosts == 0:
        each = count // hosts
        servers = tuple(range(host * each, host * each + each))
    else:
        return ()
    local, ranks = layout.local_index(owner), len(layout.on_host_of(owner))
    if ranks >= len(servers):
        return (servers[local % len(servers)],)
    return servers[local::ranks]


@dataclass(frozen=True, kw_only=True)
class _Push:
    """A part of a shard. One server sums it, or all servers do."""

    name: str
    begin: int
    end: int
    placement: int | None


def _cut(name: str, numel: int, servers: Sequence[int]) -> list[_Push]:
    """Cut a shard into one part per server. With an empty list of servers, the shard stays
    whole."""
    if not servers:
        return [_Push(name=name, begin=0, end=numel, placement=None)]
    blocks = -(-numel // wire.BLOCK)
    edges = [min(numel, blocks * i // len(servers) * wire.BLOCK) for i in range(len(servers) + 1)]
    return [
        _Push(name=f"{name}/{i}", begin=begin, end=end, placement=c_lib.ON_ONE_SERVER | server)
        for i, (server, (begin, end)) in enumerate(
            zip(servers, itertools.pairwise(edges), strict=True)
        )
        if end > begin
    ]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Pushes of this rank for the shards of one owner, or of the ranks of one host."""

    piece: Piece
    is_own: bool
    """Whether this rank pulls the sum."""
    pushes: Sequence[_Push]


@dataclass(frozen=True, kw_only=True)
class _Scatter(Reduction):
    """Route of reduce-scatters of one length and dtype."""

    parts: Sequence[_Part]
    """Parts, in the order in which this rank pushes them."""
    node: NodeGroup | None
    """Ranks of this host that sum first; None: each rank pushes by itself."""
    local: int
    group: tuple[int, ...]
    average: bool
    wire: WireType

    def declare(self, source: torch.Tensor) -> None:
        """Declare all parts to the servers at once."""
        tensors = [
            engine.TensorDeclaration(
                name=push.name,
                dtype=source.dtype,
                numel=push.end - push.begin,
                average=self.average,
                group=self.group,
                placement=push.placement,
                wire_dtype=self.wire,
                device=source.device,
                piece_of=self._pushed,
            )
            for part in self.parts
            for push in part.pushes
        ]
        engine.declare(tensors)

    @property
    def _pushed(self) -> int:
        """Return the number of elements that this rank pushes."""
        return sum(push.end - push.begin for part in self.parts for push in part.pushes)

    def begin(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        """Start a reduce-scatter like `ReduceScatters.begin_scatter`, of tensors with one
        dimension."""
        handles: list[int] = []
        with torch.no_grad():
            if self.node is not None and self.average:
                source.div_(self.node.size)
            for part in self.parts:
                handles += self._push(part, output, source)
        receive = partial(_receive, handles)
        if are_streamed(output, handles):
            return StreamedWork([output], partial(operations.land_by, receive), [source])
        return ServerWork([output], handles, receive)

    def _push(self, part: _Part, output: torch.Tensor, source: torch.Tensor) -> list[int]:
        if self.node is None:
            ((own,),) = part.piece.scatters
            values = source[own[0] : own[1]]
        else:
            values = nodes.scatter(source, part.piece, self.node, self.local)
        handles = []
        for push in part.pushes:
            pushed = values[push.begin : push.end]
            handle = operations.start(
                pushed,
                output[push.begin : push.end] if part.is_own else pushed,
                average=self.average,
                name=push.name,
                priority=0,
                group=self.group,
                placement=push.placement,
                pull=None if part.is_own else (0, 0),
                wire_dtype=self.wire,
                piece_of=self._pushed,
                checked=True,
                streamed=source.is_cuda,
            )
            handles.append(handle)
        return handles


def _receive(handles: Sequence[int]) -> None:
    for handle in handles:
        operations.synchronize(handle)


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Settings, str], ReduceScatters]] = (
    weakref.WeakKeyDictionary()
)


def of_group(group: dist.ProcessGroup, settings: Settings, device: torch.device) -> ReduceScatters:
    """Return the reduce-scatters of a group for tensors on `device`. All members make the first
    call at the same point of the program."""
    known = _known.setdefault(group, {})
    key = settings, group._get_backend(device).name()
    if key not in known:
        scatters = known[key] = ReduceScatters(identity.of_group(group), *key)
        weakref.finalize(group, scatters.close)
    return known[key]


def spans_hosts(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of a group are on several hosts."""
    hosts = joined().hosts
    return len({hosts[rank] for rank in dist.get_process_group_ranks(group)}) > 1
