"""Operations: sums of tensors over groups of ranks, and updates of parameters that servers keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from byteps.torch import c_lib, in_flight, session
from byteps.torch import wire as wires
from byteps.torch.in_flight import completions
from byteps.torch.spans import Span, Wait, note_unseen_waits
from byteps.torch.streams import stream_for
from byteps.torch.wire import (
    DTYPES,
    Spec,
    Wire,
    WireType,
    check,
    check_memory,
    current_stream,
    feedback,
    stream_of,
)

Group = Sequence[int] | torch.distributed.ProcessGroup | None
"""Distinct global ranks, or a ProcessGroup; None: all workers."""


def ranks_of(group: Group) -> list[int]:
    """Return the group's ranks, ascending; empty for all workers. Raises ValueError if `group` is
    no group."""
    if group is None:
        return []
    # new_group() returns this value on ranks outside the group.
    outside: object = torch.distributed.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError(f"rank {session.launched().rank} is no member of the group")
    if isinstance(group, torch.distributed.ProcessGroup):
        ranks = torch.distributed.get_process_group_ranks(group)
        first = session.first_rank()
        return sorted(first + r for r in ranks) if first else sorted(ranks)
    ranks = sorted(int(r) for r in group)
    if not ranks:
        raise ValueError("the group has no ranks")
    if len(set(ranks)) != len(ranks) or ranks[0] < 0:
        raise ValueError(f"the group must be distinct ranks, not {list(group)}")
    return ranks


class RanksCache:
    """Caches the engine's form of groups that cannot change. Without the cache, converting a large
    group would take most of the time of a push."""

    MOST = 256
    """Limit of cached groups. The oldest are dropped first."""

    def __init__(self) -> None:
        self._all = c_lib.Ranks([])
        self._known: dict[int, tuple[Callable[[], object], c_lib.Ranks]] = {}
        """Cached groups by the id of the user's object. A value consists of a function that returns
        this object as long as it lives, and of the ranks."""

    def ranks(self, group: Group) -> c_lib.Ranks:
        """Return the ranks of a group. Raises ValueError if `group` is no group."""
        if group is None:
            return self._all
        known = self._known.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        ranks = c_lib.Ranks(ranks_of(group))
        if isinstance(group, tuple):
            self._keep(group, lambda: group, ranks)
        elif isinstance(group, torch.distributed.ProcessGroup):
            # The cache has a weak reference, because the program owns the group.
            self._keep(group, weakref.ref(group), ranks)
        return ranks

    def _keep(self, group: object, get: Callable[[], object], ranks: c_lib.Ranks) -> None:
        self._known.pop(id(group), None)
        if len(self._known) >= self.MOST:
            del self._known[next(iter(self._known))]
        self._known[id(group)] = get, ranks


_cache = RanksCache()


def engine_ranks(group: Group) -> c_lib.Ranks:
    """Return the ranks of a group for c_lib. The result is cached if the group cannot change.

    Raises:
        ValueError: `group` is no group, or this rank is no member of it.
    """
    return _cache.ranks(group)


def make_spec(
    name: str,
    form: WireType,
    numel: int,
    *,
    piece_of: int,
    average: bool,
    ranks: c_lib.Ranks,
    placement: int | None,
    device: int,
    in_order: bool,
) -> Spec:
    """Return c_lib's description of a tensor of `numel` elements that travels as `form`.

    Args:
        piece_of: number of elements of the whole tensor if this is a piece of it, otherwise 0.
        device: number of the GPU; -1 for the CPU.
        in_order: whether servers add in the order of ranks.
    """
    lengths = form.nbytes(numel), form.nbytes(piece_of)
    return (
        *(name, form.engine_name, *lengths),
        *(bool(average), form.feedback, ranks, placement, device, in_order),
    )


type _Described = tuple[
    torch.dtype, int, int, bool, c_lib.Ranks, int | None, Wire | None, int, bool
]
"""A description without the name: type, elements, GPU, average, ranks, placement, wire type,
elements of the tensor of which this is a piece, and whether servers add in the order of ranks."""


@dataclass(slots=True)
class _Known:
    """Properties of the last sum of a name. The next sum mostly has the same properties. It then
    skips checks and conversions, which take a large part of a small sum's time."""

    described: _Described
    form: WireType
    spec: Spec
    tensor: c_lib.KnownTensor

    @classmethod
    def of(cls, name: str, described: _Described) -> _Known:
        """Check and convert the properties. Raises ValueError if such a tensor cannot be summed."""
        dtype, numel, device, average, ranks, placement, wire_dtype, piece_of, in_order = described
        if placement is not None and placement < 0:
            raise ValueError(f"placement must not be negative, got {placement}")
        form = wires.of(dtype, wire_dtype)
        spec = make_spec(
            name,
            form,
            numel,
            piece_of=piece_of,
            average=average,
            ranks=ranks,
            placement=placement,
            device=device,
            in_order=in_order,
        )
        return cls(described, form, spec, c_lib.KnownTensor(spec))


_known: dict[str, _Known] = {}
"""Last sum of each name."""


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
    wire_dtype: Wire | None = None,
    piece_of: int = 0,
    in_order: bool = False,
    checked: bool = False,
    streamed: bool = False,
) -> int:
    """Start summing `tensor` over `group` into `output`; return a handle for `synchronize`.

    Args:
        tensor: any shape, contiguous, an element type of `wire.DTYPES`. Do not change it before
            `synchronize`. CUDA tensors are read after the current stream's work so far.
        output: same shape, type and device; may be `tensor` itself.
        average: whether to divide the sum by the size of the group. Integers are rounded down.
        name: identifies the sum; the same on all members, different for each tensor. A name keeps
            its size, type, average and group until it is released, and groups with the same lowest
            rank need different names.
        priority: tensors of a higher priority are sent first.
        group: the ranks that sum, or their ProcessGroup; None for all workers.
        placement: server of the first partition, modulo the number of servers; the other partitions
            follow round robin. None: computed from the name.
        pull: range of elements of the flattened tensor whose sums this member gets: the first, and
            the last plus one. The rest of `output` stays unchanged. Members may pull different
            ranges, as in a sharded optimizer. None: all elements.
        wire_dtype: type in which the tensor travels, the same on all members. torch.bfloat16 or
            torch.float16: for fp32 and fp64 tensors; each value is rounded before it is sent, the
            server adds in fp32, and rounds the sum once. "int8" or "int4": for fp32, bf16 and fp16
            tensors; blocks of 128 values (`byteps.torch.wire`). None: the tensor's own type.
        piece_of: number of elements of the whole tensor, if `tensor` is a piece of it: see
            `TensorDeclaration`.
        in_order: whether servers add values in the order of ranks, not of arrival. A repeated sum
            then has the same bits. The same on all members.
        checked: whether the caller has checked the tensor's type, layout and device.
        streamed: on a GPU, whether `synchronize` returns at once and makes the current stream wait
            for the sum. If that would take too much pinned memory (BYTEPS_STREAMED_BYTES), it waits
            as usual. If a streamed sum fails, the stream goes on with NaN, and the next call that
            starts a sum raises.

    Raises:
        BytePSError: the job failed, or members disagree about the tensor.
        ValueError, TypeError: an argument is invalid.
    """
    session.launched()
    if checked:
        check_memory(tensor, "the tensor")
    else:
        check(tensor, "the tensor")
    if output is not tensor:
        check(output, "the output")
    if name is None or not name:
        raise ValueError("a push_pull needs a name, the same on all workers")
    numel, device = tensor.numel(), tensor.get_device()
    kind, ranks = (tensor.dtype, numel, device, average), _cache.ranks(group)
    described = (*kind, ranks, placement, wire_dtype, piece_of, in_order)
    known = _known.get(name)
    if known is None or known.described != described:
        known = _known[name] = _Known.of(name, described)
    elements = (0, numel) if pull is None else pull
    if not 0 <= elements[0] <= elements[1] <= numel:
        raise ValueError(f"pull={pull} is no range of {numel} elements")
    with Span("byteps.push_pull " + name):
        return _start(tensor, output, known, elements, pull is None, int(priority), streamed)


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    known: _Known,
    elements: tuple[int, int],
    wants_all: bool,
    priority: int,
    streamed: bool,
) -> int:
    """Start an operation like `start`. The arguments were checked before."""
    name, device = known.spec[0], known.described[2]
    form, values, received, lost, forgets = known.form, tensor, output, None, False
    if form.memory != tensor.dtype:
        if form.feedback:
            lost, forgets = _with_feedback(values, known.spec)
        tensor = received = in_flight.wire_copy(tensor, form, name, lost)
    stream = stream_of(device)
    if in_flight.registers_memory and device < 0:
        in_flight.will_be_sent(tensor)
        in_flight.will_be_sent(received)
    # The arguments are positional, because nanobind needs longer to match names.
    handle = known.tensor.push_pull(
        tensor.data_ptr(),
        received.data_ptr(),
        priority,
        None if wants_all else _pulled_bytes(form, *elements),
        stream,
        streamed,
        forgets,
        _coded(values, output, elements, lost) if form.is_block and device < 0 else None,
    )
    in_flight.sums[handle] = in_flight.Sum(
        sent=tensor,
        received=received,
        output=output,
        elements=elements,
        name=name,
        stream=stream,
        wire=form,
        values=values,
        lost=lost,
    )
    return handle


def forget(names: Sequence[str]) -> None:
    """Forget what is cached for these names: the next tensor under each name is a new one."""
    for name in names:
        _known.pop(name, None)
        in_flight.forget_name(name)
        feedback.forget_name(name)


def start_streamed_inplace(
    tensor: torch.Tensor,
    *,
    average: bool,
    name: str,
    priority: int = 0,
    group: Group = None,
    placement: int | None = None,
    pull: tuple[int, int] | None = None,
    wire_dtype: Wire | None = None,
    piece_of: int = 0,
    in_order: bool = False,
) -> int:
    """Start an in-place sum of a GPU tensor for which streams wait; see `start`."""
    return start(
        tensor,
        tensor,
        average=average,
        name=name,
        priority=priority,
        group=group,
        placement=placement,
        pull=pull,
        wire_dtype=wire_dtype,
        piece_of=piece_of,
        in_order=in_order,
        checked=True,
        streamed=True,
    )


def _with_feedback(tensor: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, bool]:
    """Return the result of `Feedback.of`. If losses were loaded for the servers, first send
    them."""
    name = spec[0]
    lost, forgets = feedback.of(name, tensor.numel(), tensor.device, spec)
    of_servers = feedback.take_of_servers(name)
    if of_servers is not None:
        padded = torch.zeros(_in_blocks(tensor.numel()))
        padded[: tensor.numel()] = of_servers[: tensor.numel()]
        wait_update(start_update(lambda: c_lib.load_feedback(spec, padded.data_ptr()), padded))
    return lost, forgets


def read_feedback(name: str, numel: int) -> torch.Tensor:
    """Return the servers' rounding losses of a tensor's last sum, in bfloat16, on the CPU.

    Not collective: any member may call it, between two sums.

    Raises:
        BytePSError: a server is lost.
    """
    of_servers = feedback.of_servers(name)
    if isinstance(of_servers, torch.Tensor):
        return of_servers
    values = torch.zeros(_in_blocks(numel))
    if of_servers is not None:
        spec = of_servers
        wait_update(start_update(lambda: c_lib.read_feedback(spec, values.data_ptr()), values))
    return values[:numel].to(torch.bfloat16)


def _in_blocks(numel: int) -> int:
    """Round a number of values up to whole blocks."""
    return -(-numel // wires.BLOCK) * wires.BLOCK


def _pulled_bytes(form: WireType, begin: int, end: int) -> tuple[int, int]:
    """Return the range of bytes of the elements that hold these values."""
    if begin == end:
        return 0, 0
    return begin // form.values * form.element_bytes, form.nbytes(end)


def _coded(
    values: torch.Tensor,
    output: torch.Tensor,
    wanted: tuple[int, int],
    lost: torch.Tensor | None,
) -> tuple[str, int, int, int, int, int, int]:
    """Return c_lib's arguments for tensors that the engine encodes and decodes itself."""
    if output.dtype != values.dtype:
        raise ValueError(f"the tensor is {values.dtype}, the output {output.dtype}")
    return (
        DTYPES[values.dtype],
        values.numel(),
        values.data_ptr(),
        output.data_ptr(),
        *wanted,
        0 if lost is None else lost.data_ptr(),
    )


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return, or raise, at once."""
    return c_lib.poll(handle)


def synchronize(handle: int) -> torch.Tensor:
    """Block until the sum is there; return the output tensor and forget the handle.

    The host waits only for the servers' answers. A CUDA tensor then has the sums for work that is
    queued on the current stream from now on, as after `wait` in torch.distributed.

    An exception of a signal handler, such as KeyboardInterrupt, is raised at once. The sum then
    goes on, and `synchronize` may be called again.

    Raises:
        BytePSError: the sum failed; the text says why. Nothing writes to the output any more.
        ValueError: there is no such handle, or it was synchronized already.
    """
    operation = in_flight.sums.get(handle)
    if operation is None:
        c_lib.wait(handle, 0)  # Raises if there is no such handle.
        raise ValueError(f"handle {handle} belongs to no tensor")
    device = operation.received.device
    with Wait("byteps.wait " + operation.name, device):
        try:
            c_lib.wait(handle, stream_of(operation.received.get_device()))
        except session.BytePSError:
            in_flight.keep_failed(handle)
            raise
        return in_flight.sums.pop(handle).finish()


def land(handle: int, stream: torch.cuda.Stream) -> c_lib.Landing:
    """Make a stream wait for a streamed sum of a GPU tensor. Return an object that tells when the
    sum is there.

    Like `synchronize` in that stream, this forgets the handle.

    Raises:
        BytePSError: the sum has failed already.
    """
    operation = in_flight.sums[handle]
    # torch has to convert the sum to the output's type.
    if operation.received is not operation.output:
        return land_by(lambda: synchronize(handle), stream)
    try:
        landing = c_lib.land(handle, stream.cuda_stream)
    except session.BytePSError:
        in_flight.keep_failed(handle)
        raise
    del in_flight.sums[handle]
    return landing


def land_by(receive: Callable[[], object], stream: torch.cuda.Stream) -> c_lib.Landing:
    """Return the point at which a stream has done the work that `receive` queues on it."""
    with torch.cuda.stream(stream):
        receive()
    return c_lib.landing_of(stream.device_index, stream.cuda_stream)


def future(handle: int) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the result of `synchronize(handle)`. Do not use the handle afterwards.

    A thread of this process completes the future. On a GPU, a wait for the future includes the
    tensor's copy.

    Raises:
        ValueError: there is no such handle, or it was synchronized already.
    """
    operation = in_flight.sums.get(handle)
    if operation is None:
        raise ValueError(f"there is no handle {handle}; was it synchronized already?")
    note_unseen_waits()
    device = operation.output.device
    is_on_gpu = device.type == "cuda"
    promised: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[device] if is_on_gpu else []
    )

    def complete() -> None:
        with torch.cuda.stream(stream_for("completions", device) if is_on_gpu else None):
            try:
                promised.set_result(synchronize(handle))
            except Exception as error:
                promised.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong

    completions.call_at_end(handle, complete)
    return promised


def start_update(
    start: Callable[[], int], *tensors: torch.Tensor, numbers: torch.Tensor | None = None
) -> int:
    """Start an operation of a c_lib.UpdatedTensor; return a handle for `wait_update`.

    Args:
        start: function that starts the operation and returns its handle.
        tensors: tensors that the operation reads or writes. They are kept alive until it has ended.
        numbers: small CPU tensor that receives the server's answer. It is kept alive, too.

    Raises:
        BytePSError: the job failed.
        ValueError: the memory of a tensor was freed; nothing was started.
    """
    for tensor in tensors:
        check_memory(tensor, "a tensor")
        if in_flight.registers_memory and not tensor.is_cuda:
            in_flight.will_be_sent(tensor)
    handle = start()
    in_flight.updates[handle] = tensors if numbers is None else (*tensors, numbers)
    return handle


def wait_update(handle: int) -> None:
    """Block until an operation of `start_update` has ended.

    GPU tensors then have their values for all work that is queued on the current stream after this
    call. An exception of a signal handler is raised at once, and this function may be called again.

    Raises:
        BytePSError: the operation failed; the text says why.
    """
    tensors = in_flight.updates.get(handle, ())
    device = next((t.device for t in tensors if t.is_cuda), None)
    stream = 0 if device is None else current_stream(device)
    with Wait("byteps.wait for servers", device or torch.device("cpu")):
        try:
            c_lib.wait(handle, stream)
        except session.BytePSError:
            in_flight.failed.append(in_flight.updates.pop(handle, ()))
            raise
        del in_flight.updates[handle]
