"""A flat tensor of parameters that servers keep: its layout, update rule and operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from byteps.torch import c_lib, wire
from byteps.torch.engine import Names, TensorDeclaration, spec_of
from byteps.torch.node_groups import Range
from byteps.torch.operations import start_update, wait_update
from byteps.torch.wire import DTYPES, current_stream

GroupNumbers = tuple[float, float, float, bool]
"""(beta1, beta2, eps, False) for AdamW, (momentum, dampening, 0, nesterov) for SGD."""
Segment = tuple[int, int, bool]
"""Last element plus one, parameter group, and whether gradients count in the norm. A segment begins
where the previous one ends."""

# Options that would change the arithmetic, with the only values that servers support.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}


class Step(NamedTuple):
    """Step that workers ask of servers. It is the same on all members of a group."""

    number: int
    """Number of the step, from 1."""
    scale: float
    """Factor for the gradients: below 1 if they are clipped."""
    skip: bool
    """Whether servers skip the step and change nothing."""
    rates: list[tuple[float, float]]
    """Learning rate and weight decay of each parameter group."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Update rule and options, fixed at declaration."""

    is_adamw: bool
    groups: list[GroupNumbers]

    def groups_of(self, param_groups: Sequence[dict[str, Any]]) -> list[GroupNumbers]:
        """Return the fixed options of these parameter groups. Raises ValueError for unsupported
        options."""
        rules = []
        for index, group in enumerate(param_groups):
            for option, plain in _PLAIN.items():
                if group.get(option, plain) != plain:
                    raise ValueError(
                        f"servers do not know {option}={group[option]} (parameter group {index})"
                    )
            if self.is_adamw:
                beta1, beta2 = group["betas"]
                rules.append((float(beta1), float(beta2), float(group["eps"]), False))
            else:
                momentum, dampening = float(group["momentum"]), float(group["dampening"])
                rules.append((momentum, dampening, 0.0, bool(group["nesterov"])))
        return rules

    @property
    def slot_names(self) -> list[str]:
        """Names of the values that servers keep, as in a torch optimizer: fp32 parameters, then
        moments."""
        if self.is_adamw:
            return ["master_param", "exp_avg", "exp_avg_sq"]
        if any(momentum for momentum, *_ in self.groups):
            return ["master_param", "momentum_buffer"]
        return ["master_param"]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer. Raises ValueError for an unsupported optimizer or option."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise ValueError(f"servers update as torch.optim.AdamW and SGD do, not as {kind.__name__}")
    rule = Rule(is_adamw=kind is torch.optim.AdamW, groups=[])
    rule.groups.extend(rule.groups_of(optimizer.param_groups))
    return rule


def add_segment(segments: list[Segment], end: int, group: int, counted: bool = True) -> None:
    """Append a segment that ends at `end`. It is merged with the last one if their properties are
    equal."""
    if segments and segments[-1][1:] == (group, counted):
        segments.pop()
    segments.append((end, group, counted))


def cut_segments(segments: Sequence[Segment], cut: Range, length: int) -> list[Segment]:
    """Return the segments of the elements in `cut`, then a segment of padding up to `length`, which
    does not count in the norm."""
    begin, end = cut
    segments_of_range: list[Segment] = []
    before = 0
    for last, group, counts in segments:
        if before < end and last > begin and begin < end:
            segments_of_range.append((min(last, end) - begin, group, counts))
        before = last
    if end - begin < length:
        segments_of_range.append(
            (length, segments_of_range[-1][1] if segments_of_range else segments[0][1], False)
        )
    return segments_of_range


# Parameters laid end to end in one flat tensor.


class PlacedParameter(NamedTuple):
    """A parameter, and its offset in a flat tensor."""

    begin: int
    """Index of the parameter's first element."""
    parameter: torch.Tensor

    @property
    def end(self) -> int:
        """Index of the parameter's last element, plus one."""
        return self.begin + self.parameter.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's elements of a flat tensor, as a view in the parameter's shape."""
        return flat[self.begin : self.end].view(self.parameter.shape)


class Codec(Protocol):
    """Reads and writes a parameter whose memory does not hold plain values, such as one in fp8."""

    def read(self) -> torch.Tensor:
        """Return the parameter's values, in the parameter's shape and nominal type."""

    def write(self, values: torch.Tensor) -> None:
        """Store values of the parameter's shape. They are rounded to the format of its memory."""


Codecs = Mapping[torch.Tensor, Codec]
"""Codec by parameter. A parameter with a codec keeps its memory, and flat tensors have a copy of
its values."""


def laid_flat(
    places: Sequence[PlacedParameter], numel: int, device: torch.device, codecs: Codecs
) -> torch.Tensor:
    """Return a flat tensor of `numel` elements with the parameters' values. Make the parameters
    views of it.

    All parameters have the same type. Elements between them are 0. Parameters with a codec are
    copied.
    """
    flat = torch.zeros(numel, dtype=places[0].parameter.dtype, device=device)
    with torch.no_grad():
        read_encoded(places, flat, codecs)
        for placed in places:
            if placed.parameter not in codecs:
                part = placed.of(flat)
                part.copy_(placed.parameter.detach())
                placed.parameter.data = part
    return flat


def read_encoded(places: Sequence[PlacedParameter], flat: torch.Tensor, codecs: Codecs) -> None:
    """Copy the values of parameters with a codec into the flat tensor."""
    for placed in places:
        if placed.parameter in codecs:
            placed.of(flat).copy_(codecs[placed.parameter].read())


def write_encoded(places: Sequence[PlacedParameter], flat: torch.Tensor, codecs: Codecs) -> None:
    """Write the flat tensor's values to the parameters with a codec."""
    for placed in places:
        if placed.parameter in codecs:
            codecs[placed.parameter].write(placed.of(flat))


def segments_of(
    places: Sequence[PlacedParameter],
    numel: int,
    group_of: Mapping[torch.Tensor, int],
    counts: Callable[[torch.Tensor], bool],
) -> list[Segment]:
    """Return each element's parameter group, and whether its gradient counts in the norm.

    Args:
        places: places of the parameters, in the order of the flat tensor.
        numel: number of elements of the flat tensor. Elements between parameters stay 0.
        group_of: index of the parameter group of each parameter.
        counts: function that says whether the gradient of a parameter counts.
    """
    segments: list[Segment] = []
    for placed in places:
        end, group = segments[-1][:2] if segments else (0, group_of[placed.parameter])
        if end < placed.begin:
            add_segment(segments, placed.begin, group, False)
        add_segment(segments, placed.end, group_of[placed.parameter], counts(placed.parameter))
    if segments[-1][0] < numel:
        add_segment(segments, numel, segments[-1][1], False)
    return segments


class FlatGradients:
    """Gradients in one flat tensor, laid out like the parameters."""

    def __init__(self, places: Sequence[PlacedParameter], numel: int, device: torch.device) -> None:
        self._places = places
        dtype = places[0].parameter.dtype
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)

    def collect(self) -> None:
        """Copy each parameter's gradient into the flat tensor. A missing gradient counts as 0."""
        for placed in self._places:
            part, gradient = placed.of(self.tensor), placed.parameter.grad
            if gradient is None:
                part.zero_()
            elif gradient.layout is not torch.strided:
                part.copy_(gradient.to_dense())
            elif gradient.data_ptr() != part.data_ptr():
                part.copy_(gradient)
            placed.parameter.grad = part

    def zero(self) -> None:
        """Set all gradients to 0, and make each parameter's `grad` a view of the flat tensor."""
        self.tensor.zero_()
        for placed in self._places:
            placed.parameter.grad = placed.of(self.tensor)


# Check that gradients do not change after they were pushed (BYTEPS_CHECK_GRADIENTS).


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by element size in bytes."""


class GradientCheck:
    """Checksums of a flat tensor's gradients at the time of the push."""

    def __init__(
        self, places: Sequence[PlacedParameter], names: Mapping[torch.Tensor, str], advice: str
    ) -> None:
        """The error message uses `names` of the parameters, and `advice` on what may have changed a
        gradient."""
        self._places, self._names, self._advice = places, names, advice
        self._pushed: torch.Tensor | None = None

    def note(self, gradients: torch.Tensor) -> None:
        """Record checksums: the gradients are pushed now."""
        self._pushed = self._sums_of_bits(gradients)

    def forget(self) -> None:
        """Drop the recorded checksums."""
        self._pushed = None

    def error(self, gradients: torch.Tensor) -> RuntimeError | None:
        """Return an error if a gradient has changed since `note`. Each `note` is checked only
        once."""
        before, self._pushed = self._pushed, None
        if before is None:
            return None
        same = (before == self._sums_of_bits(gradients)).tolist()
        changed = [
            self._names[placed.parameter]
            for placed, is_same in zip(self._places, same, strict=True)
            if not is_same
        ]
        if not changed:
            return None
        return RuntimeError(
            f"the gradients of {', '.join(changed)} have changed since they were sent to the "
            f"servers, so that the step would miss what was added: {self._advice}"
        )

    def _sums_of_bits(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return a checksum of each parameter's gradient: the sum of its elements, read as integers
        of the same size."""
        bits = gradients.view(_INTEGERS[gradients.element_size()])
        return torch.stack(
            [bits[placed.begin : placed.end].sum(dtype=torch.int64) for placed in self._places]
        )


_KEEP, _DROP = 1, 2
"""Verdicts that the protocol can carry: whether the speculative step is kept."""


class ServerTensor:
    """Flat tensor of parameters whose fp32 values and moments servers keep.

    Gradients are pushed and parameters pulled in the declared type. For gradients in blocks of few
    bits, servers answer with blocks of `wire.int8()`, to add to the parameters. Call `wait` for
    each started operation, and do not change its tensors before.
    """

    def __init__(
        self,
        declaration: TensorDeclaration,
        rule: Rule,
        segments: Sequence[Segment],
        *,
        in_order: bool = False,
        speculative: bool = False,
        counts_zeros: bool = False,
    ) -> None:
        """Declare the tensor to the servers.

        Args:
            declaration: properties that members agree on. For a GPU, its current stream is used.
            rule: the update rule.
            segments: parameter group of each element; they cover the tensor.
            in_order: whether servers add the gradients in the order of ranks, not of arrival.
            speculative: whether `push_try` will be used; servers then keep memory for the
                gradients.
            counts_zeros: whether servers count gradients that are 0.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.name = declaration.name
        """Name under which servers know the tensor."""
        self.numel = declaration.numel
        form = wire.of(declaration.dtype, declaration.wire_dtype)
        self.held_slot = len(rule.slot_names) if form.is_block else 0
        """Slot with the workers' values, as servers know them. They may differ from the parameters
        (slot 0)."""
        # Servers keep whole blocks. They add without rounding, so only the worker needs feedback.
        self._padded = form.values * -(-self.numel // form.values)
        declaration = replace(
            declaration,
            wire_dtype=replace(form, feedback=False),
            in_order=in_order or declaration.in_order,
        )
        self._device = torch.device(declaration.device)
        self._names = Names(declaration.name, group=declaration.group, owner=self)
        self._tensor = c_lib.UpdatedTensor(
            *(spec_of(declaration), rule.is_adamw, rule.groups),
            *(cut_segments(segments, (0, self.numel), self._padded), DTYPES[declaration.dtype]),
            *(speculative, counts_zeros),
        )
        self._sums = torch.empty(self._tensor.num_partitions(), 2, dtype=torch.float64)
        self._is_open = False
        self._verdict = 0

    def close(self) -> None:
        """Release the servers' state. All members do so, and start nothing afterwards."""
        self._names.release()

    @property
    def squares(self) -> list[float]:
        """Sum of squares of each partition's gradients that count, after `push_norm` or `push_try`.
        It is not finite if a gradient is not."""
        return self._sums[:, 0].tolist()

    @property
    def zeros(self) -> int:
        """Number of gradients that count and are 0, if servers count them. Valid after `push_norm`
        or `push_try`."""
        return int(self._sums[:, 1].sum().item())

    def push_step(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start a step. Servers update when they have the sum. `gradients` and `parameters` may be
        the same tensor."""
        where = gradients.data_ptr(), parameters.data_ptr()
        return start_update(
            lambda: self._tensor.push_step(*where, step, self._last_word(), self._stream()),
            *(gradients, parameters),
        )

    def push_norm(self, gradients: torch.Tensor) -> int:
        """Start a push. Servers answer with the sums of squares."""
        where = gradients.data_ptr(), self._sums.data_ptr()
        return start_update(
            lambda: self._tensor.push_norm(*where, self._last_word(), self._stream()),
            gradients,
            numbers=self._sums,
        )

    def push_try(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start a speculative step. Servers answer with the parameters after the step, and with the
        sums of squares. `gradients` and `parameters` may be the same tensor. Call `keep`, `drop` or
        `step` next."""
        where = gradients.data_ptr(), parameters.data_ptr(), self._sums.data_ptr()

        def start() -> int:
            verdict, self._is_open = self._last_word(), True
            return self._tensor.push_try(*where, step, verdict, self._stream())

        return start_update(start, gradients, parameters, numbers=self._sums)

    def keep(self) -> None:
        """Keep the speculative step. Nothing is sent now: the next operation carries the
        verdict."""
        self._verdict = _KEEP if self._is_open else 0

    def drop(self) -> None:
        """Drop the speculative step, if there is one. Nothing is sent now."""
        self._verdict = _DROP if self._is_open else 0

    def give_up(self) -> None:
        """Drop a speculative step on which this rank has not decided, because the step failed on
        another rank."""
        if self._is_open and not self._verdict:
            self._verdict = _DROP

    def _last_word(self) -> int:
        self.give_up()
        verdict, self._is_open, self._verdict = self._verdict, False, 0
        return verdict

    def step(self, parameters: torch.Tensor, step: Step) -> int:
        """Start the update after `push_norm` or `push_try`."""

        def start() -> int:
            self._is_open, self._verdict = False, 0
            return self._tensor.step(parameters.data_ptr(), step, self._stream())

        return start_update(start, parameters)

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Load fp32 values on the CPU into a slot. Load slot 0 first: this zeroes the others, and
        its values count as the workers' until `held_slot` is loaded."""
        values = torch.nn.functional.pad(values, (0, self._padded - self.numel)).contiguous()
        wait_update(start_update(lambda: self._tensor.load(slot, values.data_ptr()), values))

    def read(self, slot: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return fp32 values of a slot, on the CPU: elements from `begin` to `end` (None: to the
        last)."""
        end = self.numel if end is None else end
        values = torch.empty(end - begin)
        if begin != end:
            self._read(slot, begin, end, values)
        return values

    def settle(self) -> None:
        """Send the verdict on the speculative step now, if there is a step. Otherwise the next push
        would send the verdict."""
        if self._verdict:
            self._read(0, 0, 0, torch.empty(1))

    def _read(self, slot: int, begin: int, end: int, values: torch.Tensor) -> None:
        # Other ranks have not sent the verdict yet, so this rank sends it again with its next push.
        where = begin, end, values.data_ptr()
        wait_update(start_update(lambda: self._tensor.read(slot, *where, self._verdict), values))

    def wait(self, handle: int) -> None:
        """Wait until an operation has ended; raises BytePSError if it failed."""
        wait_update(handle)

    def _stream(self) -> int:
        return current_stream(self._device)
