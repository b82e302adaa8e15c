"""Averages of gradients over all ranks, made while a backward pass computes them.

After a backward pass `.grad` holds averages, as with torch's DistributedDataParallel. Code that
reads gradients afterwards (GradScaler, clipping, LBFGS) works as on one rank.

    in the pass    each gradient is sent as soon as it is there
    at its end     ranks add up which parameters have a new gradient on any of them;
                   a rank without such a gradient sends its old gradient, or zeros;
                   the ranks wait for the averages
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from byteps.torch import agreement, operations, session
from byteps.torch.names import Names
from byteps.torch.wire import DTYPES
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

_COUNT_BITS = 15
"""Bits per count of ranks in a parameter's flags. A flags word has four counts; the last one has
the rest of 63 bits."""
_NEW, _DENSE, _SPARSE, _SPARSE_DIMS = (1 << _COUNT_BITS * field for field in range(4))
"""A one in each count of a flags word: ranks with a new, a dense and a sparse gradient; the sum of
the sparse gradients' sparse dimensions."""


def _count(flags: int, field: int) -> int:
    return flags // field % (1 << _COUNT_BITS)


@dataclass(frozen=True, kw_only=True)
class _Covered:
    """Parameter with the properties that it had on all ranks when its averager was made."""

    name: str
    parameter: TensorWeakRef
    shape: torch.Size
    strides: tuple[int, ...]
    """Strides in which the gradients of the parameter travel: those of a dense tensor, even if a
    rank's gradient is sparse."""

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> _Covered:
        strides = torch.empty_like(parameter, device="meta").stride()
        return cls(
            name=name,
            parameter=TensorWeakRef(parameter),
            shape=parameter.shape,
            strides=strides,
        )

    def to_send(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient in the layout in which it travels; the same tensor if it has that
        layout."""
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().to_dense()
        if gradient.stride() == self.strides:
            return gradient
        moved = torch.empty_strided(
            self.shape, self.strides, dtype=gradient.dtype, device=gradient.device
        )
        return moved.copy_(gradient)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of this layout in memory order. A complex element becomes
        two real ones."""
        flat = values.detach().as_strided((values.numel(),), (1,))
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


@dataclass(kw_only=True)
class _InFlight:
    parameter: torch.Tensor
    before: torch.Tensor | None
    """Gradient of the parameter when the average was started."""
    average: torch.Tensor
    """Tensor that was sent and that receives the average. It is `before` itself, if `before` has
    the layout in which gradients travel."""
    handle: int | None
    """Handle of the sum; None if the gradient has no elements."""
    rows: torch.Tensor | None = None
    """For a sparse gradient: the number of ranks with a value in each row."""
    rows_handle: int | None = None


def can_cover(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter can have a gradient that servers average.

    Raises:
        ValueError: the parameter needs a gradient, but servers cannot average its type.
    """
    dtype = parameter.dtype
    number = dtype.to_real() if dtype.is_complex else dtype
    why = ""
    if is_traceable_wrapper_subclass(parameter):
        why = f"a {type(parameter.data).__name__}, of which each rank has another part"
    elif not (dtype.is_floating_point or dtype.is_complex) or number not in DTYPES:
        why = f"{dtype}, which servers cannot average"
    if why and parameter.requires_grad:
        raise ValueError(f"parameter {name!r} is {why}")
    return not why


class GradientAverager:
    """Averages the gradients of a set of parameters, as long as the parameters live.

    A hook of each parameter keeps the averager alive. The averager holds only weak references to
    parameters. All ranks make the same averagers in the same order.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], key: str, *, passes: int, half: bool
    ) -> None:
        """
        Args:
            parameters: parameters by name, none of which has an averager; see `can_cover`.
            key: prefix of the names of sums; the same on all ranks, unique within the job.
            passes: number of backward passes whose gradients add up before an average.
            half: whether fp32 and fp64 gradients travel as fp16.
        """
        self.passes = passes
        self.half = half
        self.key = key
        """Prefix of the names of this averager's sums."""
        self.averages = 0
        """Number of averages so far."""
        self._session = session.number()
        self._covered = [_Covered.of(name, value) for name, value in parameters.items()]
        self._passes_made = 0
        self._new: set[int] = set()
        """Indices of parameters whose gradient has changed since its last average."""
        self._in_flight: dict[int, _InFlight] = {}
        self._flags: torch.Tensor | None = None
        self._flags_handle = 0
        for index, parameter in enumerate(parameters.values()):
            _averagers[parameter] = self
            _hook(parameter, partial(self._computed, index))
        _all.append(weakref.ref(self))
        self._take_names()

    @property
    def is_pending(self) -> bool:
        """Whether gradients have changed, or passes were made, since the last average."""
        return bool(self._new or self._passes_made)

    def mark(self) -> None:
        """Mark every gradient as new."""
        for index, covered in enumerate(self._covered):
            parameter = covered.parameter()
            if parameter is not None and parameter.grad is not None:
                self._new.add(index)

    def demand_none_in_flight(self) -> None:
        """Raise BytePSError if a backward pass has failed or is still running."""
        for index in self._in_flight:
            raise session.BytePSError(
                f"the gradient of {self._covered[index].name!r} was sent, and its backward pass "
                "has not ended. Either the pass raised an exception, or this call is made inside "
                "the pass. Other ranks may have received the gradient: end the job, and go on "
                "from a checkpoint"
            )

    def describe(self) -> list[str]:
        """Return lines that must be the same on all ranks."""
        return [
            f"{covered.name} {tuple(covered.shape)} {covered.strides}" for covered in self._covered
        ]

    def rejoin(self) -> None:
        """Start over in another job, whose servers know no declarations. All ranks call this."""
        self.key = agreement.number("gradients", self.describe())
        self._session = session.number()
        self._in_flight.clear()
        self._passes_made = 0
        self._take_names()

    def _take_names(self) -> None:
        """Take the names of the sums. Servers free them when this object is collected."""
        covered = (f"{self.key}/{parameter.name}" for parameter in self._covered)
        self._names = Names(f"{self.key}/new", *covered, owner=self)

    # ------------------------------------------------------------------- in a backward pass

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        """Note that a parameter's gradient has been computed. This is the parameter's hook."""
        if session.size() == 1:
            return
        if self._session != session.number():
            rejoin()
        if index in self._in_flight:
            raise session.BytePSError(
                f"the gradient of {self._covered[index].name!r} was computed again while it was "
                "being averaged. If the last backward pass raised an exception, restart the job "
                "from a checkpoint. If the parameter is used inside and outside of "
                "checkpoint(..., use_reentrant=True), pass use_reentrant=False"
            )
        _call_at_end(self)
        self._new.add(index)
        if self._passes_made + 1 >= self.passes:
            self._send(index, parameter)

    def end_pass(self) -> bool:
        """Count the end of a backward pass; return whether averages are due."""
        self._passes_made += 1
        return self._passes_made >= self.passes

    # ------------------------------------------------------------------- averages, in three steps

    def tell(self) -> None:
        """Start sending new gradients, and the flags that say which gradients are new."""
        self._flags = torch.zeros(len(self._covered), dtype=torch.int64)
        for index, covered in enumerate(self._covered):
            parameter = covered.parameter()
            if parameter is None:
                continue
            flags = _NEW if index in self._new else 0
            if (gradient := parameter.grad) is not None:
                is_dense = gradient.layout is torch.strided
                flags += _DENSE if is_dense else _SPARSE + _SPARSE_DIMS * gradient.sparse_dim()
            self._flags[index] = flags
            if index in self._new and index not in self._in_flight:
                self._send(index, parameter)
        self._flags_handle = _start(self._flags, f"{self.key}/new", average=False)

    def complete(self) -> None:
        """Wait for the flags. Then send the gradients that are new on other ranks but not on this
        one."""
        assert self._flags is not None
        operations.synchronize(self._flags_handle)
        for index, flags in enumerate(self._flags.tolist()):
            if _count(flags, _NEW) == 0:
                continue
            if index not in self._in_flight:
                self._send(index, self._parameter(index))
            sparse = _count(flags, _SPARSE)
            if sparse and not _count(flags, _DENSE):
                self._send_rows(index, flags // _SPARSE_DIMS // sparse)

    def receive(self) -> None:
        """Wait for the averages and store them as the parameters' gradients."""
        for index, sent in list(self._in_flight.items()):
            for handle in (sent.handle, sent.rows_handle):
                if handle is not None:
                    operations.synchronize(handle)
            if sent.parameter.grad is not sent.before:
                raise session.BytePSError(
                    f"the gradient of {self._covered[index].name!r} was replaced in the backward "
                    "pass, while it was being averaged: replace it after the pass"
                )
            if sent.rows is not None:
                sent.parameter.grad = _in_rows(sent.average, sent.rows)
            elif sent.average is not sent.before:
                sent.parameter.grad = sent.average
            del self._in_flight[index]
        self._new.clear()
        self._passes_made = 0
        self.averages += 1

    def _parameter(self, index: int) -> torch.Tensor:
        parameter = self._covered[index].parameter()
        if parameter is None:
            raise session.BytePSError(
                f"parameter {self._covered[index].name!r} was deleted on this rank, but other "
                "ranks have sent its gradient"
            )
        return parameter

    @torch.no_grad()
    def _send(self, index: int, parameter: torch.Tensor) -> None:
        covered, gradient = self._covered[index], parameter.grad
        if gradient is None:
            values = torch.empty_strided(
                covered.shape, covered.strides, dtype=parameter.dtype, device=parameter.device
            ).zero_()
        else:
            values = covered.to_send(gradient)
        handle = None
        if values.numel():
            handle = _start(
                covered.flat(values), f"{self.key}/{covered.name}", average=True, half=self.half
            )
        self._in_flight[index] = _InFlight(
            parameter=parameter, before=gradient, average=values, handle=handle
        )

    def _send_rows(self, index: int, sparse_dims: int) -> None:
        sent, covered = self._in_flight[index], self._covered[index]
        shape = covered.shape[:sparse_dims]
        sent.rows = torch.zeros(shape, dtype=torch.int32, device=sent.average.device)
        if sent.before is not None:
            sent.rows[tuple(sent.before.coalesce().indices())] = 1
        if sent.rows.numel():
            name = f"{self.key}/{covered.name}/rows{sparse_dims}"
            self._names.take(name)
            sent.rows_handle = _start(sent.rows.view(-1), name, average=False)


def average(averagers: Sequence[GradientAverager]) -> None:
    """Average the new gradients of all these averagers.

    Ranks may list the averagers in different orders. This cannot deadlock, because each averager
    sends everything before any averager waits.
    """
    for averager in averagers:
        averager.tell()
    for averager in averagers:
        averager.complete()
    for averager in averagers:
        averager.receive()


def rejoin() -> None:
    """Make all averagers of this process start over after it has joined a new job. All ranks do so
    together."""
    for averager in _living():
        if averager._session != session.number():
            averager.rejoin()


def averager_of(parameter: torch.Tensor) -> GradientAverager | None:
    return _averagers.get(parameter)


_averagers: torch.utils.weak.WeakTensorKeyDictionary = torch.utils.weak.WeakTensorKeyDictionary()
"""Averager of each parameter."""
_all: list[weakref.ref[GradientAverager]] = []
"""Averagers, in the order in which they were made."""


def _living() -> list[GradientAverager]:
    _all[:] = [reference for reference in _all if reference() is not None]
    return [averager for reference in _all if (averager := reference()) is not None]


_lock = threading.Lock()
_passes: dict[int, list[weakref.ref[GradientAverager]]] = {}
"""Averagers that take part in a backward pass, by torch's number of the pass."""


def _call_at_end(averager: GradientAverager) -> None:
    """Make the running backward pass call `average` at its end."""
    number = torch._C._current_graph_task_id()
    reference = weakref.ref(averager)
    with _lock:
        known = _passes.setdefault(number, [])
        if reference in known:
            return
        known.append(reference)
        if len(known) == 1:
            torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    with _lock:
        known = _passes.pop(number)
    averagers = [averager for reference in known if (averager := reference()) is not None]
    average([averager for averager in averagers if averager.end_pass()])


def _start(flat: torch.Tensor, name: str, *, average: bool, half: bool = False) -> int:
    return operations.start(
        *(flat, flat),
        average=average,
        name=name,
        priority=0,
        group=None,
        placement=None,
        wire_dtype=torch.float16 if half and flat.dtype.itemsize > 2 else None,
    )


def _in_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a dense tensor that at least one rank has, as a sparse tensor."""
    indices = rows.nonzero().t()
    return torch.sparse_coo_tensor(indices, values[tuple(indices)], values.shape, is_coalesced=True)


def _hook(parameter: torch.Tensor, call: partial[None]) -> None:
    """Register `call` as a hook, which gets the parameter whenever its gradient has been computed.
    The parameter may be frozen at this time."""
    needed = parameter.requires_grad
    parameter.requires_grad_(True)  # torch accepts a hook only on parameters that need a gradient
    parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(needed)
