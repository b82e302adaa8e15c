"""All-reduces of one group of ranks through the servers: joining the job, choosing the all-reduces
that go through the servers, and starting them.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from byteps import logs
from byteps.launcher import meeting
from byteps.torch import c_lib, nodes, operations, session, wire
from byteps.torch.c10d.identity import Identity
from byteps.torch.c10d.work import Line, ServerWork, StreamedWork, Work
from byteps.torch.figures import setting
from byteps.torch.names import Names
from byteps.torch.routes import COLLECTIVE, FLAT, Decision, Sum, decide
from byteps.torch.wire import WireType, flat_view, is_dense
from byteps.torch.world import Job, RankFacts, meet
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(kw_only=True)
class _Joined:
    """State that all ranks of a default group of torch.distributed have exchanged."""

    session: int
    """Number of this process's job: see `session.number`."""
    job: Job
    nonce: str
    """Random text, different for each default group."""
    world: weakref.ref[dist.ProcessGroup] | None = None
    """The default group; None if it was still being made."""


_joined: _Joined | None = None
_joining = threading.RLock()


def join(store: Any, rank: int, size: int, timeout: timedelta | None = None) -> Job:
    """Join the job, and learn the hosts of all its workers; all ranks call this.

    Args:
        store: store of torch.distributed, without a prefix.
        rank: rank of this process in torch.distributed, which is also its rank as a worker.
        size: number of ranks in torch.distributed.
        timeout: timeout of the default group. It limits the time of a sum if BYTEPS_OP_TIMEOUT_S is
            not set.

    Raises:
        BytePSError: the scheduler or a server cannot be reached, or the launcher's rank and size
            differ from these.
    """
    global _joined, _limit_s
    with _joining:
        if timeout is not None:
            # Servers that know this limit can report in time which ranks have not pushed.
            _limit_s = min(max(timeout.total_seconds(), 0.1), 604800.0)
        session.init(of_torch=(rank, size), store=store, op_timeout_s=_limit_s)
        if (session.rank(), session.size()) != (rank, size):
            raise session.BytePSError(
                f"BytePS is worker {session.rank()} of {session.size()}, torch.distributed is rank "
                f"{rank} of {size}: check RANK and WORLD_SIZE against DMLC_WORKER_ID and "
                "DMLC_NUM_WORKER"
            )
        deadline = time.monotonic() + setting("BYTEPS_START_TIMEOUT_S", float)
        nonce = secrets.token_hex(8)

        def exchange(own: RankFacts) -> Sequence[RankFacts]:
            nonlocal nonce
            if size == 1:
                return [own]
            all_facts, nonce = _exchange(store, rank, size, own, deadline)
            return all_facts

        _joined = _Joined(session=session.number(), job=meet(exchange), nonce=nonce)
        return _joined.job


_limit_s: float | None = None
"""Timeout of torch's default group, cut to the range of BYTEPS_OP_TIMEOUT_S, in seconds."""


def joined() -> Job:
    """Return the result of `join`. The first call joins the job, so all ranks of torch.distributed
    must make it.

    Raises:
        BytePSError: see `join`.
    """
    return _join_once().job


def _join_once() -> _Joined:
    world = dist.group.WORLD
    with _joining:
        if (
            _joined is None
            or not session.is_initialized()
            or _joined.session != session.number()
            or (_joined.world is not None and _joined.world() is not world)
        ):
            store = dist.distributed_c10d._get_default_store()
            join(store, dist.get_rank(), dist.get_world_size())
        assert _joined is not None
        if world is not None:
            _joined.world = weakref.ref(world)
        return _joined


def _exchange(
    store: Any, rank: int, size: int, own: RankFacts, deadline: float
) -> tuple[Sequence[RankFacts], str]:
    """Exchange messages: return those of all ranks, in the order of ranks, and a nonce.

    Rank 0 reads all messages and writes them as one value, so that a rank of a large job reads only
    two values.
    """
    try:
        if rank == 0:
            prefix, others = meeting.gather(store, "c10d", size, deadline)
            store.set(f"{prefix}/all", json.dumps([own, *map(json.loads, others)]))
        else:
            prefix = meeting.tell(store, "c10d", rank, json.dumps(own), deadline)
    except meeting.AbsentError as error:
        raise session.BytePSError(
            f"ranks {error.members} did not report their hosts in time (BYTEPS_START_TIMEOUT_S)"
        ) from None
    everything = f"{prefix}/all"
    if not meeting.wait_for(store, [everything], deadline):
        raise session.BytePSError(
            "rank 0 did not send the list of hosts in time (BYTEPS_START_TIMEOUT_S)"
        )
    # The prefix ends with the nonce of this exchange, which rank 0 drew.
    return [RankFacts(*facts) for facts in json.loads(store.get(everything))], prefix.rpartition(
        "/"
    )[2]


# Decisions about a group's all-reduces: which of them go through the servers, and by which route.
# All members decide the same.


SUMMED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
"""Types of tensors that go through the servers, which are those of gradients. Integers stay with
NCCL or gloo."""

SAME = "same"
"""Value of a setting: each tensor travels in its own type."""

REFERENCE_BYTES = 64 << 20
"""Size of the tensor for which routes are compared. Each route's time grows in proportion to the
size, so one size decides for all."""

_reported: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of users: the values of the variables BYTEPS_C10D_*."""

    backend: str
    min_bytes: int
    wire_dtype: str
    """Type in which tensors travel: a name of `wire.NAMES`, or "same"."""

    @staticmethod
    def read() -> Settings:
        """Read the current values. Raises BytePSError for an invalid value."""
        return Settings(
            backend=setting("BYTEPS_C10D_BACKEND", str),
            min_bytes=setting("BYTEPS_C10D_MIN_BYTES", int),
            wire_dtype=setting("BYTEPS_C10D_WIRE_DTYPE", str),
        )

    def wire_of(self, dtype: torch.dtype) -> WireType:
        """Return the type in which a tensor of `dtype` travels: the requested type, if that is
        shorter and can hold the tensor; otherwise `dtype` itself."""
        wire_type = wire.NAMES.get(self.wire_dtype)
        return wire_type if wire_type is not None and wire_type.takes(dtype) else wire.of(dtype)


def decide_for(
    job: Job,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    settings: Settings,
) -> Decision:
    """Choose the route of all-reduces of one dtype over these ranks. The first rank logs the
    decision once.

    The result depends only on values that all members know, so all members choose the same.
    """
    hosts = tuple(job.hosts[rank] for rank in ranks)
    what = Sum(
        hosts=hosts,
        gradient_bytes=REFERENCE_BYTES,
        wire_bytes=settings.wire_of(dtype).nbytes(REFERENCE_BYTES // dtype.itemsize),
    )
    decision = decide(what, job.network, settings.backend)
    tell("all-reduces", ranks, hosts, dtype, decision, settings)
    return decision


def tell(
    operations: str,
    ranks: tuple[int, ...],
    hosts: tuple[int, ...],
    dtype: torch.dtype,
    decision: Decision,
    settings: Settings,
) -> None:
    """Log a decision about operations, such as all-reduces, once, on the lowest rank."""
    if session.rank() != min(ranks):
        return
    form = settings.wire_of(dtype)
    of_type = str(dtype).removeprefix("torch.")
    if form != wire.of(dtype):
        of_type += f", sent as {form}"
    backend = (
        "NCCL or gloo"
        if decision.route == COLLECTIVE
        else f"BytePS {decision.route}, from {settings.min_bytes} bytes"
    )
    text = (
        f"{operations} of {of_type} over {len(ranks)} ranks on {len(set(hosts))} host(s): "
        f"{backend} ({decision.why})"
    )
    if text not in _reported:
        _reported.add(text)
        # This message is written directly, because a logger drops it at its default level.
        sys.stderr.write(logs.render(logging.INFO, text) + "\n")


_logger = logging.getLogger(__name__)
_told_of_blocking: list[bool] = []

MOST_NAMES = 1024
"""Limit of names per group, that is, of different lengths, types and operations. Without this
limit, a program that uses ever new lengths would fill the servers' memory. Further tensors stay
with NCCL or gloo."""


class Reductions:
    """All-reduces of a group. Every member makes such an object, and all members start the same
    all-reduces in the same order.

    An all-reduce's name consists of the group, the type, the length and the operation. Several
    all-reduces of the same name may be in flight; servers match them by their order. With error
    feedback the name also has the number of the tensor's owner, because a rounding loss must be
    added to the next gradient of the same parameters.
    """

    def __init__(self, identity: Identity, kind: str, settings: Settings | None = None) -> None:
        """
        Args:
            identity: identity of the group.
            kind: name of this object within the group, the same on all members.
            settings: settings, the same on all members. None: the variables BYTEPS_C10D_*.
        """
        self._identity = identity
        self._ranks = identity.ranks
        self._kind = kind
        self._settings = settings or Settings.read()
        self._session = 0
        self._routes: dict[torch.dtype, str] = {}
        self._sums: dict[tuple[torch.dtype, int, bool, torch.device, int], Reduction] = {}
        self._names: list[Names] = []
        self._owners = WeakIdKeyDictionary()
        self._numbers = itertools.count(1)
        self._unowned: dict[int, int] = {}
        """Address of the last tensor without an owner, by length; used only with error feedback."""
        self._line = Line()

    @functools.cached_property
    def _key(self) -> str:
        return self._identity.key(self._kind, _join_once().nonce)

    def close(self, *, waits: bool = False) -> None:
        """Release this object's local state and its names. Servers free their state when all
        members have called this. No all-reduce may be started afterwards.

        Args:
            waits: whether to wait for all-reduces whose sums have arrived, so that their futures
                get their values.
        """
        self._line.stop(waits=waits)
        for names in self._names:
            names.release()
        self._names.clear()
        self._routes.clear()
        self._sums.clear()
        if "_key" in vars(self):
            nodes.groups.forget(self._key)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a sum or average of the tensor goes through the servers.

        The answer depends only on the tensor's type, length and layout, and on the tensors of
        earlier calls, so all members get the same. An all-reduce that a CUDA graph records does not
        go through the servers, because a replay runs nothing on the host.
        """
        if (
            # This check comes first, because a sparse tensor has no defined size.
            tensor.layout != torch.strided
            or tensor.dtype not in SUMMED
            or tensor.nbytes < self._settings.min_bytes
            or tensor.numel() == 0
            or len(self._ranks) == 1
            or tensor.device.type not in ("cpu", "cuda")
            or not is_dense(tensor)
            or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return False
        if self._route(tensor.dtype) == COLLECTIVE:
            return False
        return len(self._sums) < MOST_NAMES or any(
            key[:2] == (tensor.dtype, tensor.numel()) for key in self._sums
        )

    def begin(
        self,
        tensor: torch.Tensor,
        *,
        average: bool,
        priority: int = 0,
        owner: object | None = None,
    ) -> Work | None:
        """Start an all-reduce of any tensor. Return None if it does not go through the servers (see
        `takes`).

        Args:
            owner: object that lives as long as the tensor is reduced, the same on all members: a
                bucket's first parameter (DDP), an object per module (FSDP2), or the hook. With
                error feedback, each owner has rounding losses of its own.
        """
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        number = self._number(owner, tensor)
        known = self._sums.get((tensor.dtype, tensor.numel(), average, tensor.device, number))
        if (
            known is None
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or self._session != session.number()
            or not session.is_initialized()
        ):
            if not self.takes(tensor):
                return None
            return self.start(tensor, average=average, priority=priority, number=number)
        # Earlier answers of `takes` are reused, because a call must cost little.
        is_flat = tensor.dim() == 1 and not tensor.requires_grad
        return known.start(tensor, tensor if is_flat else tensor.detach().view(-1), priority)

    def _number(self, owner: object | None, tensor: torch.Tensor) -> int:
        """Return the owner's number, the same on all members. 0 without owner or feedback."""
        if tensor.dtype not in SUMMED or not self._settings.wire_of(tensor.dtype).feedback:
            return 0
        if owner is None:
            self._tell_of_shared_losses(tensor)
            return 0
        if owner not in self._owners:
            self._owners[owner] = next(self._numbers)
        number: int = self._owners[owner]
        return number

    def _tell_of_shared_losses(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        last = self._unowned.setdefault(tensor.numel(), tensor.data_ptr())
        text = (
            f"{self._settings.wire_dtype} all-reduces of several tensors of {tensor.numel()} "
            "elements share their rounding losses: use int8, or DistributedDataParallel, which "
            "keeps them bucket by bucket"
        )
        if last != tensor.data_ptr() and text not in _reported:
            _reported.add(text)
            _logger.warning(text)

    def start(
        self, tensor: torch.Tensor, *, average: bool, priority: int = 0, number: int = 0
    ) -> Work:
        """Start an all-reduce, in place, of a tensor for which `takes` has returned True.

        Args:
            tensor: dense, of any shape, on the CPU or a GPU.
            average: divide the sum by the number of ranks.
            priority: tensors of a higher priority are sent first.
            number: number of the tensor's owner (see `_number`); 0 without one.

        Raises:
            BytePSError: the job failed, or members disagree about the tensor.
        """
        flat = flat_view(tensor, "the tensor")
        key = tensor.dtype, tensor.numel(), average, tensor.device, number
        if key not in self._sums:
            self._sums[key] = self._prepare(flat, average, number)
        return self._sums[key].start(tensor, flat, priority)

    def _route(self, dtype: torch.dtype) -> str:
        job = joined()
        # In another job the tensor is declared anew, because that job may have other servers.
        if self._session != session.number():
            self._session = session.number()
            self._routes.clear()
            self._sums.clear()
            self._names.clear()
        if dtype not in self._routes:
            self._routes[dtype] = self._decide(job, dtype).route
        return self._routes[dtype]

    def _decide(self, job: Job, dtype: torch.dtype) -> Decision:
        return decide_for(job, self._ranks, dtype, self._settings)

    def _name(self, flat: torch.Tensor, average: bool, number: int) -> str:
        """Return the name under which servers know a tensor of the owner with this number."""
        of_type = str(flat.dtype).removeprefix("torch.")
        operation = "average" if average else "sum"
        return f"{self._key}/{of_type}/{flat.numel()}/{operation}/{number}"

    def _prepare(self, flat: torch.Tensor, average: bool, number: int) -> Reduction:
        dtype, wire = flat.dtype, self._settings.wire_of(flat.dtype)
        name = self._name(flat, average, number)
        if self._route(dtype) == FLAT:
            self._names.append(Names(name, group=self._ranks))
            return _Flat(name, self._ranks, average, wire)
        hosts = joined().hosts
        layout = nodes.HostLayout.of(self._ranks, [str(hosts[rank]) for rank in self._ranks])
        # The node group belongs to this process group alone: programs may use two process groups
        # of the same ranks in any order.
        node_sum = nodes.whole_sum(
            name, layout, flat, average=average, wire_dtype=wire, purpose=self._key
        )
        self._names.append(node_sum.take_names(session.rank(), dtype.itemsize))
        gatherer = None
        if flat.is_cuda:
            ranks = layout.on_host_of(session.rank())
            gatherer = nodes.groups.get(ranks, flat.device, purpose=self._key, role="gather")
        return _NodeFirst(node_sum, self._line, gatherer)


class Reduction:
    """The route of all-reduces of one length and dtype."""

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        raise NotImplementedError


class _Flat(Reduction):
    def __init__(self, name: str, ranks: tuple[int, ...], average: bool, wire: WireType) -> None:
        self._name = name
        self._ranks = ranks
        self._average = average
        self._wire = wire

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        handle = operations.start(
            flat,
            flat,
            average=self._average,
            name=self._name,
            priority=priority,
            group=self._ranks,
            placement=None,
            wire_dtype=self._wire,
            checked=True,
            streamed=tensor.is_cuda,
        )
        if are_streamed(tensor, [handle]):
            return StreamedWork([tensor], partial(operations.land, handle))
        return ServerWork([tensor], [handle], partial(operations.synchronize, handle))


class _NodeFirst(Reduction):
    def __init__(
        self, node_sum: nodes.NodeSum, line: Line, gatherer: nodes.NodeGroup | None
    ) -> None:
        self._sum = node_sum
        self._line = line
        self._gatherer = gatherer

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        node_sum = self._sum if priority == 0 else replace(self._sum, priority=priority)
        pending = node_sum.start(flat, streamed=self._gatherer is not None)
        if self._gatherer is not None and are_streamed(tensor, pending.handles):
            parts = [part for _, part, _ in pending.pending]
            receive = partial(pending.receive, self._gatherer)
            return StreamedWork([tensor], partial(operations.land_by, receive), parts)
        work = ServerWork([tensor], pending.handles, pending.wait, self._line)
        # Ranks of this host may need this rank's part, even if nobody waits for it here.
        work.complete_by_itself()
        return work


def are_streamed(tensor: torch.Tensor, handles: Sequence[int]) -> bool:
    """Return whether streams wait for these sums. If streams could wait but do not, log the reason
    once."""
    if not tensor.is_cuda:
        return False
    if all(map(c_lib.is_streamed, handles)):
        return True
    if not _told_of_blocking:
        _told_of_blocking.append(True)
        _logger.warning(
            "an all-reduce of %d bytes finds no room in pinned memory, and blocks the host when it "
            "is awaited: give this worker more than BYTEPS_STREAMED_BYTES=%s",
            *(tensor.nbytes, setting("BYTEPS_STREAMED_BYTES", int)),
        )
    return False
