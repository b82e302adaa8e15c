"""Averages of gradients over all ranks, made while a backward pass computes them.

What a backward pass leaves in `.grad` are averages, as with torch's DistributedDataParallel. Who
reads gradients afterwards (GradScaler, clipping, LBFGS) need not know that there are other ranks.

    in the pass    a gradient is there: it is sent
    at its end     ranks add up which parameters have a new gradient on any of them;
                   who has none of such a parameter sends its old gradient, or zeros;
                   the averages are waited for
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
"""Width of a count of ranks in a parameter's flags; the largest sum has four of them, and the last
one has what is left of 63 bits."""
_NEW, _DENSE, _SPARSE, _SPARSE_DIMS = (1 << _COUNT_BITS * field for field in range(4))
"""Counts of ranks that have a new gradient, a dense one and a sparse one; and the sum of the latter
ones' sparse dimensions."""


def _count(flags: int, field: int) -> int:
    return flags // field % (1 << _COUNT_BITS)


@dataclass(frozen=True, kw_only=True)
class _Covered:
    """A parameter, as all ranks had it when it was covered."""

    name: str
    parameter: TensorWeakRef
    shape: torch.Size
    strides: tuple[int, ...]
    """In which its gradients travel: dense, whatever a rank's gradient has."""

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
        """The gradient in the layout in which it travels; itself, if it has that."""
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().to_dense()
        if gradient.stride() == self.strides:
            return gradient
        moved = torch.empty_strided(
            self.shape, self.strides, dtype=gradient.dtype, device=gradient.device
        )
        return moved.copy_(gradient)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """The elements of such a tensor as they lie in memory; complex ones as pairs."""
        flat = values.detach().as_strided((values.numel(),), (1,))
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


@dataclass(kw_only=True)
class _InFlight:
    parameter: torch.Tensor
    before: torch.Tensor | None
    """The parameter's gradient when it was sent."""
    average: torch.Tensor
    """What was sent, and becomes the average: `before` itself, where that has the layout."""
    handle: int | None
    """None: there are no elements."""
    rows: torch.Tensor | None = None
    """For a sparse gradient: the number of ranks with a value in each row."""
    rows_handle: int | None = None


def can_cover(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter can have a gradient that servers average.

    Raises:
        ValueError: it needs one, and servers cannot.
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
    """Averages the gradients of some parameters, for as long as these live.

    A parameter's hook keeps it alive; it keeps no parameter. All ranks make the same ones, in the
    same order.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], key: str, *, passes: int, half: bool
    ) -> None:
        """
        Args:
            parameters: by name, none of them averaged by another one; see `can_cover`.
            key: the same on all ranks, and of no other one of this job.
            passes: backward passes whose gradients add up on the rank.
            half: whether fp32 and fp64 travel as fp16.
        """
        self.passes = passes
        self.half = half
        self.key = key
        """Begins the names of its sums."""
        self.averages = 0
        """Number of averages so far."""
        self._session = session.number()
        self._covered = [_Covered.of(name, value) for name, value in parameters.items()]
        self._passes_made = 0
        self._new: set[int] = set()
        """Indices of parameters whose gradient has changed since it was averaged."""
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
        """Whether gradients have changed since they were averaged, or passes were made."""
        return bool(self._new or self._passes_made)

    def mark(self) -> None:
        """Take all gradients that there are for new ones."""
        for index, covered in enumerate(self._covered):
            parameter = covered.parameter()
            if parameter is not None and parameter.grad is not None:
                self._new.add(index)

    def demand_none_in_flight(self) -> None:
        """Raises BytePSError where a backward pass did not end, or has not ended yet."""
        for index in self._in_flight:
            raise session.BytePSError(
                f"the gradient of {self._covered[index].name!r} was sent, and its backward pass "
                "has not ended: it raised, or this is called inside it. What other ranks have "
                "received cannot be taken back: end the job, and go on from a checkpoint"
            )

    def describe(self) -> list[str]:
        """What is the same on all ranks."""
        return [f"{one.name} {tuple(one.shape)} {one.strides}" for one in self._covered]

    def rejoin(self) -> None:
        """Another job has begun, whose servers know nothing: all ranks call this."""
        self.key = agreement.number("gradients", self.describe())
        self._session = session.number()
        self._in_flight.clear()
        self._passes_made = 0
        self._take_names()

    def _take_names(self) -> None:
        """Have the servers free the sums with this object."""
        covered = (f"{self.key}/{one.name}" for one in self._covered)
        self._names = Names(f"{self.key}/new", *covered, owner=self)

    # ------------------------------------------------------------------- in a backward pass

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        """The hook of a parameter: its gradient is there."""
        if session.size() == 1:
            return
        if self._session != session.number():
            rejoin()
        if index in self._in_flight:
            raise session.BytePSError(
                f"the gradient of {self._covered[index].name!r} was computed again while it is "
                "being averaged: the backward pass before this one raised, so that the job must "
                "go on from a checkpoint; or the parameter is used inside and outside of a "
                "checkpoint(..., use_reentrant=True), which must be use_reentrant=False"
            )
        _call_at_end(self)
        self._new.add(index)
        if self._passes_made + 1 >= self.passes:
            self._send(index, parameter)

    def end_pass(self) -> bool:
        """A backward pass that computed some of the gradients has ended: whether they are due."""
        self._passes_made += 1
        return self._passes_made >= self.passes

    # ------------------------------------------------------------------- averages, in three steps

    def tell(self) -> None:
        """Send what is new here, and which gradients these are."""
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
        """Learn what is new on other ranks, and send what they need of this one."""
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
        """Wait for the averages: parameters have them as gradients."""
        for index, sent in list(self._in_flight.items()):
            for handle in (sent.handle, sent.rows_handle):
                if handle is not None:
                    operations.synchronize(handle)
            if sent.parameter.grad is not sent.before:
                raise session.BytePSError(
                    f"the gradient of {self._covered[index].name!r} was replaced in the backward "
                    "pass, while it was being averaged: do that after the pass"
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
                f"parameter {self._covered[index].name!r} was deleted on this rank, and others "
                "have computed its gradient"
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
    """Average what is new of all of these.

    Ranks may have them in different orders: nothing is waited for that another rank sends only when
    it has received.
    """
    for averager in averagers:
        averager.tell()
    for averager in averagers:
        averager.complete()
    for averager in averagers:
        averager.receive()


def rejoin() -> None:
    """Another job has begun: all averagers of this process agree with those of other ranks anew."""
    for averager in _living():
        if averager._session != session.number():
            averager.rejoin()


def averager_of(parameter: torch.Tensor) -> GradientAverager | None:
    """The one that has this parameter."""
    return _averagers.get(parameter)


_averagers: torch.utils.weak.WeakTensorKeyDictionary = torch.utils.weak.WeakTensorKeyDictionary()
"""By parameter."""
_all: list[weakref.ref[GradientAverager]] = []
"""In the order in which they were made."""


def _living() -> list[GradientAverager]:
    _all[:] = [one for one in _all if one() is not None]
    return [averager for one in _all if (averager := one()) is not None]


_lock = threading.Lock()
_passes: dict[int, list[weakref.ref[GradientAverager]]] = {}
"""Which averagers take part in a backward pass, by the number that torch gives the pass."""


def _call_at_end(averager: GradientAverager) -> None:
    """Have a backward pass, which calls this, average what it computes."""
    number = torch._C._current_graph_task_id()
    mine = weakref.ref(averager)
    with _lock:
        known = _passes.setdefault(number, [])
        if mine in known:
            return
        known.append(mine)
        if len(known) == 1:
            torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    with _lock:
        known = _passes.pop(number)
    averagers = [averager for one in known if (averager := one()) is not None]
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
    """The rows of a dense tensor that some rank has, as a sparse one."""
    indices = rows.nonzero().t()
    return torch.sparse_coo_tensor(indices, values[tuple(indices)], values.shape, is_coalesced=True)


def _hook(parameter: torch.Tensor, call: partial[None]) -> None:
    """Call it with the parameter when its gradient was computed, also if it needs none now."""
    needed = parameter.requires_grad
    parameter.requires_grad_(True)  # or torch takes no hook
    parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(needed)
