"""The engine as Python sees it: torch tensors in, handles and sums out.

One BytePS worker per process.  `byteps.torch` re-exports what users need from here.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from byteps import logs
from byteps.launcher import embedded
from byteps.torch import c_lib, departure, memory

logger = logging.getLogger(__name__)

BytePSError = c_lib.BytePSError
"""Raised by everything here that fails: a lost peer, a timeout, workers that disagree, a bad
setting.  The text names what and who.  Bad arguments raise a subclass that is a ValueError too."""

Group = Sequence[int] | torch.distributed.ProcessGroup | None

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""The element types that servers can add."""


@dataclass(frozen=True, kw_only=True)
class _Launch:
    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """The tensors of an operation under way, alive until the engine is done with their memory."""

    sent: torch.Tensor
    """What the engine reads: the caller's tensor, or a copy in the type of the wire."""
    received: torch.Tensor
    """What the engine writes: the caller's output, or that copy."""
    output: torch.Tensor
    """The caller's."""
    elements: tuple[int, int]
    """First and last plus one of the flattened elements that are wanted."""
    name: str
    stream: int
    """As current_stream gives it, when it was started."""

    def finish(self) -> torch.Tensor:
        """The caller's output, with the sums in its own type: on a GPU, for the current stream."""
        if self.received is not self.output:
            part = slice(*self.elements)
            self.output.view(-1)[part].copy_(self.received.view(-1)[part])
            self._give_back()
        return self.output

    def _give_back(self) -> None:
        """The copy in the type of the wire is free for its next use."""
        if self.received.is_cuda:
            now = torch.cuda.current_stream(self.received.device)
            # Or else torch would hand the memory out again to the other stream.
            if now.cuda_stream != self.stream:
                self.received.record_stream(now)
        elif _registers_memory:
            _wire_buffers[self.name] = self.received


_joined_by = -1
"""The process that is the worker."""
_launch: _Launch | None = None
_sessions = 0
_handled_at_init = 0
"""The id of the exception that is handled around all of this, if one is."""
# Whether the transport registers what it sends.
_registers_memory = False
_lock = threading.Lock()
# By handle.
_in_flight: dict[int, _InFlight] = {}
# Failed operations: the transport may read their tensors until it is shut down.
_orphans: list[_InFlight] = []
# Of updates under way, by handle: what the engine reads and writes, alive as long.
_moving: dict[int, tuple[torch.Tensor, ...]] = {}
# Of updates that failed: likewise.
_kept: list[tuple[torch.Tensor, ...]] = []
# By name: copies in the type of the wire that nobody uses, kept where the transport registers what
# it sends, so that it does so once.
_wire_buffers: dict[str, torch.Tensor] = {}


def _after_fork_in_child() -> None:
    """What a forked process has of the job belongs to its parent: c_lib has closed its copies of
    the connections, and refuses all calls."""
    global _lock, _registers_memory
    _lock = threading.Lock()  # another thread may have held it
    if not c_lib.is_forked_copy():
        return
    atexit.unregister(_at_exit)
    _registers_memory = False
    _forget_tensors()


os.register_at_fork(after_in_child=_after_fork_in_child)


def init(lazy: bool = True) -> None:
    """Join the cluster as one worker; return when all workers and servers have.

    Rank and size are the launcher's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), the
    scheduler's address is DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT.  Without an address a scheduler
    and servers are started beside the ranks and end with them (embedded mode).  Does nothing when
    initialised.

    Args:
        lazy: accepted for compatibility; joining is never put off.

    A process that is forked from a worker, as torch's DataLoader does, is none itself: there
    `is_initialized` is False, `rank` and `size` still tell the parent's, `shutdown` does nothing
    and all else raises BytePSError.

    Raises:
        BytePSError: the scheduler does not answer or refuses, nodes stay away, a bad setting; or
            this process was forked from a worker.
    """
    del lazy
    global _handled_at_init, _joined_by, _launch, _registers_memory, _sessions
    with _lock:
        _demand_no_copy()
        if c_lib.is_initialized():
            return
        _launch = _Launch(
            **dict(zip(("rank", "size", "local_rank", "local_size"), c_lib.launch(), strict=True))
        )
        logs.install(_launch.rank)
        for warning in c_lib.unknown_variables():
            logger.warning("%s", warning)
        embedded.start_if_needed()
        try:
            c_lib.init(num_servers=0)
        except BaseException:
            embedded.stop(graceful=False)
            raise
        _registers_memory = c_lib.registers_memory()
        _joined_by = os.getpid()
        _sessions += 1
        _handled_at_init = id(sys.exception())
        atexit.register(_at_exit)


def shutdown() -> None:
    """Finish what is under way, leave the job, close all connections.

    The cluster ends when all workers have left.  Others that wait for a push of this worker get an
    error.  Does nothing when not initialised, nor in a process that was forked from the worker:
    what it has of the job belongs to its parent.

    After a failure `init` may be called again, with another RANK and WORLD_SIZE too, where there is
    a scheduler to join: one with ``--keep`` takes the next incarnation of the job, and in embedded
    mode new ones are started.  To such a scheduler a worker in which a sum failed has failed.
    Tensors are declared anew and handles of the last job are none any more.

    Called while an exception is handled, as in ``finally``, it tells the others that this worker
    failed, and by what: then the job has failed for all of them.
    """
    error = sys.exception()
    if id(error) == _handled_at_init:  # all of the job is done in some handler
        error = None
    _leave(departure.reason(error or departure.last_error()))


def _leave(failure: str) -> None:
    """Shut down; `failure`: why this process ends, if not because its work is done."""
    if os.getpid() != _joined_by:
        return
    # After a failure servers and scheduler end by themselves or not at all.
    graceful = not c_lib.has_failed()
    _stop(suspend=False, failure=failure)
    embedded.stop(graceful=graceful)


def _at_exit() -> None:
    """Leave at the end of the process: with the exception that ends it, where there is one, or
    later, with the exit status, which only the C library learns."""
    failure = departure.reason(departure.last_error())
    if os.getpid() != _joined_by or failure or c_lib.has_failed() or embedded.has_children():
        return _leave(failure)
    with _lock:
        kept = [*_in_flight.values(), *_orphans, *_moving.values(), *_kept]
        c_lib.shutdown_at_exit(kept)
        departure.on_abrupt_exit(c_lib.shutdown)


def suspend() -> None:
    """Leave the job for a while: scheduler and servers wait for the workers to `resume`.

    To be called by all workers.

    Raises:
        BytePSError: this process was forked from a worker.
    """
    _demand_no_copy()
    _stop(suspend=True)


def _stop(*, suspend: bool, failure: str = "") -> None:
    global _launch
    with _lock:
        if not c_lib.is_initialized():
            return
        atexit.unregister(_at_exit)
        c_lib.shutdown(suspend, failure)
        _forget_tensors()
        _launch = None


def _forget_tensors() -> None:
    """Nothing reads or writes them any more."""
    for tensors in (_in_flight, _orphans, _moving, _kept, _wire_buffers):
        tensors.clear()


def _demand_no_copy() -> None:
    if c_lib.is_forked_copy():
        c_lib.has_failed()  # raises, and says what to do


def resume(num_workers: int, num_servers: int, global_rank: int) -> None:
    """Join again after `suspend`, possibly with another number of workers.

    Args:
        num_workers: workers that the job has now.
        num_servers: servers that the job has now.
        global_rank: this worker's rank, 0 <= global_rank < num_workers.
    """
    _demand_no_copy()
    if c_lib.is_initialized():
        raise BytePSError("resume() needs a suspend() before it")
    # Whichever of the two the launcher set must not contradict the new numbers.
    for launcher, ours, value in (
        ("WORLD_SIZE", "DMLC_NUM_WORKER", num_workers),
        ("RANK", "DMLC_WORKER_ID", global_rank),
    ):
        for name in (launcher, ours):
            if name in os.environ:
                os.environ[name] = str(value)
        os.environ.setdefault(ours, str(value))
    os.environ["DMLC_NUM_SERVER"] = str(num_servers)
    init()


def is_initialized() -> bool:
    """Whether this process is in a job. A process that was forked from a worker is not."""
    return c_lib.is_initialized()


def session() -> int:
    """How many jobs this process has joined. Names and handles are those of one job."""
    return _sessions


def _launched() -> _Launch:
    if _launch is None:
        raise BytePSError("byteps is not initialized; call bps.init() first")
    return _launch


def rank() -> int:
    """This worker's rank, 0 <= rank < size()."""
    return _launched().rank


def size() -> int:
    """Workers in the job."""
    return _launched().size


def local_rank() -> int:
    """This worker's rank among those of its host."""
    return _launched().local_rank


def local_size() -> int:
    """Workers on this host."""
    return _launched().local_size


def ranks_of(group: Group) -> list[int]:
    """Its ranks, ascending; empty for all workers. Raises ValueError when it is no group."""
    if group is None:
        return []
    # What new_group() gives the ranks outside.
    outside: object = torch.distributed.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError(f"rank {_launched().rank} is no member of the group")
    if isinstance(group, torch.distributed.ProcessGroup):
        return sorted(torch.distributed.get_process_group_ranks(group))
    ranks = sorted(int(r) for r in group)
    if not ranks:
        raise ValueError("the group has no ranks")
    if len(set(ranks)) != len(ranks) or ranks[0] < 0:
        raise ValueError(f"the group must be distinct ranks, not {list(group)}")
    return ranks


class _Groups:
    """The ranks of groups that cannot change, as the engine wants them: a push of a large group
    would otherwise take longest for these."""

    MOST = 256
    """Groups that are kept: those that were used first go first."""

    def __init__(self) -> None:
        self._all = c_lib.Ranks([])
        self._known: dict[int, tuple[Callable[[], object], c_lib.Ranks]] = {}
        """By the object's id; what returns the object for as long as it lives, and its ranks."""

    def ranks(self, group: Group) -> c_lib.Ranks:
        """Raises ValueError when it is no group."""
        if group is None:
            return self._all
        known = self._known.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        ranks = c_lib.Ranks(ranks_of(group))
        if isinstance(group, tuple):
            self._keep(group, lambda: group, ranks)
        elif isinstance(group, torch.distributed.ProcessGroup):
            # Not kept alive: the program ends it.
            self._keep(group, weakref.ref(group), ranks)
        return ranks

    def _keep(self, group: object, get: Callable[[], object], ranks: c_lib.Ranks) -> None:
        self._known.pop(id(group), None)
        if len(self._known) >= self.MOST:
            del self._known[next(iter(self._known))]
        self._known[id(group)] = get, ranks


_groups = _Groups()


def _number_of(device: torch.device) -> int:
    """The GPU's number; -1 for the CPU."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(device: torch.device) -> int:
    """The address of the device's current CUDA stream; 0 for the CPU.

    torch.cuda.current_stream makes an object for it, which takes 15 us in a thread that has slept.
    """
    number = _number_of(device)
    return 0 if number < 0 else torch._C._cuda_getCurrentRawStream(number)


def _check(tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        known = ", ".join(sorted(DTYPES.values()))
        raise ValueError(f"{what} is {tensor.dtype}; what can be summed is {known}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous; call .contiguous() first")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} is on {tensor.device}; only CPU and CUDA tensors can be summed")
    _check_memory(tensor, what)


def _check_memory(tensor: torch.Tensor, what: str) -> None:
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if (there := tensor.untyped_storage().nbytes()) < end:
        raise ValueError(
            f"{what} ends at byte {end:,} of a storage of {there:,} bytes: its memory was freed, "
            "as when buffers are offloaded; bring it back first"
        )


def _check_wire(dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    if wire_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"wire_dtype is {wire_dtype}; it can be torch.bfloat16 or torch.float16")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a tensor of {dtype} cannot be sent as {wire_dtype}")


def _wire_copy(tensor: torch.Tensor, wire_dtype: torch.dtype, name: str) -> torch.Tensor:
    """The tensor in the type of the wire; on a GPU it is made in the current stream."""
    _check_wire(tensor.dtype, wire_dtype)
    if tensor.is_cuda or not _registers_memory:
        return tensor.to(wire_dtype)
    buffer = _wire_buffers.pop(name, None)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != wire_dtype:
        buffer = torch.empty_like(tensor, dtype=wire_dtype)
    return buffer.copy_(tensor)


@dataclass(frozen=True, kw_only=True)
class TensorDeclaration:
    """What the members of a group agree on before they sum a tensor: see `declare`."""

    name: str
    """As push_pull has it."""
    dtype: torch.dtype
    """Of the tensor."""
    numel: int
    """Its elements."""
    average: bool = True
    group: Group = None
    """The ranks that sum, or their ProcessGroup; None for all workers."""
    placement: int | None = None
    wire_dtype: torch.dtype | None = None
    """As push_pull has it."""
    device: torch.device | str = "cpu"
    """Where the tensor is; for one on a GPU, pinned memory is reserved now."""
    piece_of: int = 0
    """Elements of the tensor that this one is a piece of, the same on all members: it is cut into
    partitions as long as that one's. 0: it is no piece."""


_Spec = tuple[str, str, int, int, bool, c_lib.Ranks, int | None, int]


def spec_of(tensor: TensorDeclaration) -> _Spec:
    """The arguments of c_lib.declare."""
    dtype = tensor.wire_dtype or tensor.dtype
    if not tensor.name:
        raise ValueError("a tensor needs a name, the same on all workers")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.name!r} is {tensor.dtype}, which cannot be summed")
    if dtype != tensor.dtype:
        _check_wire(tensor.dtype, dtype)
    if tensor.numel < 1:
        raise ValueError(f"{tensor.name!r} has {tensor.numel} elements: nothing to sum")
    if tensor.placement is not None and tensor.placement < 0:
        raise ValueError(f"placement of {tensor.name!r} must not be negative")
    return (
        tensor.name,
        DTYPES[dtype],
        tensor.numel * dtype.itemsize,
        tensor.piece_of * dtype.itemsize,
        bool(tensor.average),
        _groups.ranks(tensor.group),
        tensor.placement,
        _number_of(torch.device(tensor.device)),
    )


def declare(tensors: Sequence[TensorDeclaration]) -> None:
    """Tell the servers of many tensors by one message to each; return when all have answered.

    A name that is not declared declares itself at its first push_pull, which then waits for the
    servers. All members of a group may declare its tensors, in any order and in lists of their own.

    Raises:
        BytePSError: a server does not answer, or members disagree about a tensor.
        ValueError: a tensor cannot be summed so, or its name was declared otherwise.
    """
    _launched()
    c_lib.declare([spec_of(tensor) for tensor in tensors])


def start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    *,
    average: bool,
    name: str | None,
    priority: int,
    group: Group,
    placement: int | None,
    pull: tuple[int, int] | None = None,
    wire_dtype: torch.dtype | None = None,
    piece_of: int = 0,
) -> int:
    """Start summing `tensor` over `group` into `output`; return a handle for `synchronize`.

    Args:
        tensor: any shape, contiguous, an element type of `DTYPES`; not to be changed until
            synchronised.  CUDA tensors are read after the current stream's work so far.
        output: same shape, type and device; may be `tensor` itself.
        average: divide the sum by the size of the group; integers are rounded down.
        name: identifies the sum; the same on all members, another one for each tensor. A name
            keeps its size, type, average and group until the worker shuts down, and groups with
            the same lowest rank need different names.
        priority: higher goes first.
        group: the ranks that sum, or their ProcessGroup; None for all workers.
        placement: server of the first partition, modulo the number of servers; the others follow
            round robin.  None: from the name.
        pull: first and last plus one of the elements, of the flattened tensor, whose sums are
            wanted; the rest of `output` is left alone.  Each member may want another part, as a
            sharded optimizer does.  None: all of them.
        wire_dtype: torch.bfloat16 or torch.float16 sends an fp32 or fp64 tensor as that: half or a
            quarter of the bytes, each value rounded before it is sent, added in fp32 by the
            server, and the sum rounded once. The same on all members.  None: the tensor's own.
        piece_of: elements of the tensor that `tensor` is a piece of: see `TensorDeclaration`.

    Raises:
        BytePSError: the job failed, or members disagree about the tensor.
        ValueError, TypeError: the arguments cannot be used.
    """
    _launched()
    _check(tensor, "the tensor")
    if output is not tensor:
        _check(output, "the output")
    if name is None or not name:
        raise ValueError("a push_pull needs a name, the same on all workers")
    if placement is not None and placement < 0:
        raise ValueError(f"placement must not be negative, got {placement}")
    elements = (0, tensor.numel()) if pull is None else pull
    if not 0 <= elements[0] <= elements[1] <= tensor.numel():
        raise ValueError(f"pull={pull} is no range of {tensor.numel()} elements")
    received = output
    if wire_dtype is not None and wire_dtype != tensor.dtype:
        tensor = received = _wire_copy(tensor, wire_dtype, name)
    stream = current_stream(tensor.device)
    if _registers_memory and not tensor.is_cuda:
        memory.will_be_sent(tensor)
        memory.will_be_sent(received)
    size = tensor.element_size()
    # By position: pybind11 takes longer to match names.
    handle = c_lib.push_pull(
        name,
        DTYPES[tensor.dtype],
        tensor.data_ptr(),
        received.data_ptr(),
        tensor.numel() * size,
        piece_of * size,
        bool(average),
        int(priority),
        _groups.ranks(group),
        placement,
        None if pull is None else (elements[0] * size, elements[1] * size),
        _number_of(tensor.device),
        stream,
    )
    _in_flight[handle] = _InFlight(
        sent=tensor,
        received=received,
        output=output,
        elements=elements,
        name=name,
        stream=stream,
    )
    return handle


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return, or raise, at once."""
    return c_lib.poll(handle)


def synchronize(handle: int) -> torch.Tensor:
    """Block until the sum is there; return the output tensor and forget the handle.

    The host waits for the servers' answers only. Of a CUDA tensor the sums are there for what the
    current stream is given from now on, as after `wait` of torch.distributed.

    An exception of a signal handler, such as KeyboardInterrupt, is raised at once; the sum goes on,
    and the handle may be synchronised again.

    Raises:
        BytePSError: the sum failed; the text says why. Nothing writes into the output any more.
        ValueError: there is no such handle, or it was synchronised already.
    """
    operation = _in_flight.get(handle)
    stream = 0
    if operation is not None:
        stream = current_stream(operation.received.device)
    try:
        c_lib.wait(handle, stream)
    except BytePSError:
        operation = _in_flight.pop(handle, None)
        if operation is not None:
            _orphans.append(operation)
        raise
    return _in_flight.pop(handle).finish()


def move(
    start: Callable[[], int], *tensors: torch.Tensor, numbers: torch.Tensor | None = None
) -> int:
    """Start an operation of a c_lib.UpdatedTensor; return a handle for `wait`.

    Args:
        start: starts it, and returns its handle.
        tensors: whose memory it reads or writes; they live until it has ended.
        numbers: likewise, a few on the CPU that come with an answer.

    Raises:
        BytePSError: the job failed.
        ValueError: the memory of a tensor was freed; nothing was started.
    """
    for tensor in tensors:
        _check_memory(tensor, "a tensor")
        if _registers_memory and not tensor.is_cuda:
            memory.will_be_sent(tensor)
    handle = start()
    _moving[handle] = tensors if numbers is None else (*tensors, numbers)
    return handle


def wait(handle: int) -> None:
    """Block until what `move` has started has ended.

    Of tensors on a GPU, what comes is there for the current stream's work from now on. An exception
    of a signal handler is raised at once, and the handle may be waited for again.

    Raises:
        BytePSError: it failed; the text says why.
    """
    tensors = _moving.get(handle, ())
    device = next((t.device for t in tensors if t.is_cuda), None)
    stream = 0 if device is None else current_stream(device)
    try:
        c_lib.wait(handle, stream)
    except BytePSError:
        _kept.append(_moving.pop(handle, ()))
        raise
    del _moving[handle]


def link_gbps() -> float:
    """Gbit/s each way of the slowest worker's network card; 0 where one of them is not known."""
    _launched()
    return c_lib.link_gbps()


def partition_bytes(nbytes: int, *, piece_of: int = 0) -> int:
    """Bytes of the partitions (the last may have fewer) of a tensor of `nbytes` bytes, which may be
    a piece of one of `piece_of` bytes."""
    _launched()
    return c_lib.partition_bytes(nbytes, piece_of)


def partition_count(nbytes: int, *, piece_of: int = 0) -> int:
    """How many partitions such a tensor has."""
    return -(-nbytes // partition_bytes(nbytes, piece_of=piece_of))


def bytes_per_server(
    nbytes: int,
    *,
    name: str,
    group: Group = None,
    placement: int | None = None,
    piece_of: int = 0,
) -> list[int]:
    """Bytes that each server, in the order of their ranks, gets of a tensor of `nbytes` bytes.

    The other arguments are those that it is summed with, but for `piece_of`, which is in bytes.

    Raises:
        BytePSError: byteps is not initialised.
        ValueError: the arguments cannot be used.
    """
    _launched()
    return c_lib.bytes_per_server(
        name=name,
        bytes=nbytes,
        piece_of=piece_of,
        group=_groups.ranks(group),
        placement=placement,
    )
