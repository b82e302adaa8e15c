"""A flat tensor of parameters that servers keep, as one rank declares it: its layout and rule."""

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
"""(beta1, beta2, eps, False) of AdamW, (momentum, dampening, 0, nesterov) of SGD."""
Segment = tuple[int, int, bool]
"""End, parameter group, and whether gradients count in the norm: elements from the last end on."""

# What would change the arithmetic, and may only have this value.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}


class Step(NamedTuple):
    """What servers are asked for. All members of a group ask for the same."""

    number: int
    """1 for the first one."""
    scale: float
    """Factor of the gradients: below 1 where they are clipped."""
    skip: bool
    """Change nothing."""
    rates: list[tuple[float, float]]
    """Learning rate and weight decay of each parameter group."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What servers are told once."""

    is_adamw: bool
    groups: list[GroupNumbers]

    def groups_of(self, param_groups: Sequence[dict[str, Any]]) -> list[GroupNumbers]:
        """The numbers of these parameter groups. Raises ValueError for what servers cannot do."""
        found = []
        for index, group in enumerate(param_groups):
            for option, plain in _PLAIN.items():
                if group.get(option, plain) != plain:
                    raise ValueError(
                        f"servers do not know {option}={group[option]} (parameter group {index})"
                    )
            if self.is_adamw:
                beta1, beta2 = group["betas"]
                found.append((float(beta1), float(beta2), float(group["eps"]), False))
            else:
                momentum, dampening = float(group["momentum"]), float(group["dampening"])
                found.append((momentum, dampening, 0.0, bool(group["nesterov"])))
        return found

    @property
    def slot_names(self) -> list[str]:
        """What servers keep, as a torch optimizer names it: the fp32 parameters, then moments."""
        if self.is_adamw:
            return ["master_param", "exp_avg", "exp_avg_sq"]
        if any(momentum for momentum, *_ in self.groups):
            return ["master_param", "momentum_buffer"]
        return ["master_param"]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Raises ValueError for an optimizer, or an option, that servers do not know."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise ValueError(f"servers update as torch.optim.AdamW and SGD do, not as {kind.__name__}")
    rule = Rule(is_adamw=kind is torch.optim.AdamW, groups=[])
    rule.groups.extend(rule.groups_of(optimizer.param_groups))
    return rule


def add_segment(segments: list[Segment], end: int, group: int, counted: bool = True) -> None:
    """Append elements up to `end`, to the last segment if they are like it."""
    if segments and segments[-1][1:] == (group, counted):
        segments.pop()
    segments.append((end, group, counted))


def cut_segments(segments: Sequence[Segment], cut: Range, length: int) -> list[Segment]:
    """The segments of elements `cut` of a tensor, and of zeros behind them up to `length`, which do
    not count."""
    begin, end = cut
    found: list[Segment] = []
    before = 0
    for last, group, counts in segments:
        if before < end and last > begin and begin < end:
            found.append((min(last, end) - begin, group, counts))
        before = last
    if end - begin < length:
        found.append((length, found[-1][1] if found else segments[0][1], False))
    return found


# Parameters laid end to end in one flat tensor.


class Place(NamedTuple):
    """Where a parameter lies in a flat tensor."""

    begin: int
    """Its first element there."""
    parameter: torch.Tensor

    @property
    def end(self) -> int:
        """Its last element there, plus one."""
        return self.begin + self.parameter.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of a flat tensor, in the parameter's shape: a view."""
        return flat[self.begin : self.end].view(self.parameter.shape)


class Codec(Protocol):
    """How a parameter is kept whose memory does not hold its values as they are: fp8, for one."""

    def read(self) -> torch.Tensor:
        """Its values, of its shape and its nominal type."""

    def write(self, values: torch.Tensor) -> None:
        """It keeps these values, of its shape, as nearly as it can."""


Codecs = Mapping[torch.Tensor, Codec]
"""By parameter. One that is in it stays where it is: flat tensors have a copy of its values."""


def laid_flat(
    places: Sequence[Place], numel: int, device: torch.device, codecs: Codecs
) -> torch.Tensor:
    """A flat tensor of `numel` elements that the parameters become views of, with their values.

    Elements between parameters, which have one type, are 0. Parameters with a codec are copied.
    """
    flat = torch.zeros(numel, dtype=places[0].parameter.dtype, device=device)
    with torch.no_grad():
        read_encoded(places, flat, codecs)
        for place in places:
            if place.parameter not in codecs:
                part = place.of(flat)
                part.copy_(place.parameter.detach())
                place.parameter.data = part
    return flat


def read_encoded(places: Sequence[Place], flat: torch.Tensor, codecs: Codecs) -> None:
    """The flat tensor has the values of the parameters with a codec."""
    for place in places:
        if place.parameter in codecs:
            place.of(flat).copy_(codecs[place.parameter].read())


def write_encoded(places: Sequence[Place], flat: torch.Tensor, codecs: Codecs) -> None:
    """The parameters with a codec have the values of the flat tensor."""
    for place in places:
        if place.parameter in codecs:
            codecs[place.parameter].write(place.of(flat))


def segments_of(
    places: Sequence[Place],
    numel: int,
    group_of: Mapping[torch.Tensor, int],
    counts: Callable[[torch.Tensor], bool],
) -> list[Segment]:
    """Which parameter group each element belongs to, and whether its gradient counts in the norm.

    Args:
        places: in the order of the flat tensor.
        numel: elements of the flat tensor. Those between parameters are 0 and stay so.
        group_of: index of the parameter group of each parameter.
        counts: whether the gradient of a parameter counts.
    """
    segments: list[Segment] = []
    for place in places:
        end, group = segments[-1][:2] if segments else (0, group_of[place.parameter])
        if end < place.begin:
            add_segment(segments, place.begin, group, False)
        add_segment(segments, place.end, group_of[place.parameter], counts(place.parameter))
    if segments[-1][0] < numel:
        add_segment(segments, numel, segments[-1][1], False)
    return segments


class FlatGradients:
    """The gradients of parameters, in one flat tensor that is laid out as the parameters are."""

    def __init__(self, places: Sequence[Place], numel: int, device: torch.device) -> None:
        self._places = places
        dtype = places[0].parameter.dtype
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)

    def collect(self) -> None:
        """Each parameter's gradient is in the flat tensor, wherever it was computed; 0 where there
        is none."""
        for place in self._places:
            part, gradient = place.of(self.tensor), place.parameter.grad
            if gradient is None:
                part.zero_()
            elif gradient.layout is not torch.strided:
                part.copy_(gradient.to_dense())
            elif gradient.data_ptr() != part.data_ptr():
                part.copy_(gradient)
            place.parameter.grad = part

    def zero(self) -> None:
        """Each parameter's gradient is 0, in the flat tensor."""
        self.tensor.zero_()
        for place in self._places:
            place.parameter.grad = place.of(self.tensor)


# Whether gradients have changed since they were pushed (BYTEPS_CHECK_GRADIENTS).


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element."""


class GradientCheck:
    """Checksums of the gradients of a flat tensor, when they were pushed."""

    def __init__(
        self, places: Sequence[Place], names: Mapping[torch.Tensor, str], advice: str
    ) -> None:
        """`names` of the parameters, and `advice` on what may have changed a gradient: for the
        error's text."""
        self._places, self._names, self._advice = places, names, advice
        self._pushed: torch.Tensor | None = None

    def note(self, gradients: torch.Tensor) -> None:
        """They are pushed now."""
        self._pushed = self._sums_of_bits(gradients)

    def forget(self) -> None:
        """What was pushed is not looked at again."""
        self._pushed = None

    def error(self, gradients: torch.Tensor) -> RuntimeError | None:
        """What there is to say if one has changed since. Once for each `note`."""
        before, self._pushed = self._pushed, None
        if before is None:
            return None
        same = (before == self._sums_of_bits(gradients)).tolist()
        changed = [
            self._names[place.parameter]
            for place, is_same in zip(self._places, same, strict=True)
            if not is_same
        ]
        if not changed:
            return None
        return RuntimeError(
            f"the gradients of {', '.join(changed)} have changed since they were sent to the "
            f"servers, so that the step would miss what was added: {self._advice}"
        )

    def _sums_of_bits(self, gradients: torch.Tensor) -> torch.Tensor:
        """Of each parameter's gradient."""
        bits = gradients.view(_INTEGERS[gradients.element_size()])
        return torch.stack(
            [bits[place.begin : place.end].sum(dtype=torch.int64) for place in self._places]
        )


_KEEP, _DROP = 1, 2
"""Verdicts of the protocol: what becomes of the step that was tried."""


class ServerTensor:
    """A flat tensor of parameters whose fp32 values and moments servers keep.

    Gradients go up and parameters come down in the type that was declared. Gradients in blocks of
    few bits are answered with blocks of `wire.int8()`: what is to be added to the parameters. What
    is started is ended by `wait`; until then its tensors stay as they are.
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
        """Tell the servers.

        Args:
            declaration: what the members agree on; of a GPU, its current stream is used.
            rule: how parameters are updated.
            segments: which elements belong to which group; they cover the tensor.
            in_order: servers add the gradients in the order of ranks, not of arrival.
            speculative: there will be `push_try`; servers keep memory for the gradients.
            counts_zeros: servers count the gradients that are 0.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = declaration.numel
        form = wire.of(declaration.dtype, declaration.wire_dtype)
        self.held_slot = len(rule.slot_names) if form.is_block else 0
        """Of what servers know that workers hold, which may differ from the parameters (slot 0)."""
        # Servers keep whole blocks, and round nothing that they add: feedback is the worker's.
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
        """Give the servers' state back, as all members do; nothing is started any more."""
        self._names.release()

    @property
    def squares(self) -> list[float]:
        """After `push_norm` or `push_try`: each partition's squares of what counts, added up; no
        finite number if any gradient is none."""
        return self._sums[:, 0].tolist()

    @property
    def zeros(self) -> int:
        """After `push_norm` or `push_try`: how many gradients that count are 0, if servers count
        them."""
        return int(self._sums[:, 1].sum().item())

    def push_step(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start; the servers update as soon as they have the sum. Both may be one tensor."""
        where = gradients.data_ptr(), parameters.data_ptr()
        return start_update(
            lambda: self._tensor.push_step(*where, step, self._last_word(), self._stream()),
            *(gradients, parameters),
        )

    def push_norm(self, gradients: torch.Tensor) -> int:
        """Start; the servers answer with the sum's squares."""
        where = gradients.data_ptr(), self._sums.data_ptr()
        return start_update(
            lambda: self._tensor.push_norm(*where, self._last_word(), self._stream()),
            gradients,
            numbers=self._sums,
        )

    def push_try(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start; the servers answer with the parameters as the step would make them, and with the
        sum's squares. Both tensors may be one. Then comes `keep`, `drop`, or `step`."""
        where = gradients.data_ptr(), parameters.data_ptr(), self._sums.data_ptr()

        def start() -> int:
            verdict, self._is_open = self._last_word(), True
            return self._tensor.push_try(*where, step, verdict, self._stream())

        return start_update(start, gradients, parameters, numbers=self._sums)

    def keep(self) -> None:
        """The step that was tried stands. Nothing is sent: what is started next says so."""
        self._verdict = _KEEP if self._is_open else 0

    def drop(self) -> None:
        """The step that was tried, if there is one, was none. Nothing is sent."""
        self._verdict = _DROP if self._is_open else 0

    def give_up(self) -> None:
        """Drop the step that was tried, if nothing was said of it: it failed on some rank."""
        if self._is_open and not self._verdict:
            self._verdict = _DROP

    def _last_word(self) -> int:
        self.give_up()
        verdict, self._is_open, self._verdict = self._verdict, False, 0
        return verdict

    def step(self, parameters: torch.Tensor, step: Step) -> int:
        """Start; after push_norm or push_try, the servers update."""

        def start() -> int:
            self._is_open, self._verdict = False, 0
            return self._tensor.step(parameters.data_ptr(), step, self._stream())

        return start_update(start, parameters)

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put fp32 values, on the CPU, into a slot. Slot 0 comes first, zeroes the others, and is
        what workers hold until `held_slot` is loaded."""
        values = torch.nn.functional.pad(values, (0, self._padded - self.numel)).contiguous()
        wait_update(start_update(lambda: self._tensor.load(slot, values.data_ptr()), values))

    def read(self, slot: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The fp32 values of a slot, on the CPU: of elements `begin` to `end`, or to the last."""
        end = self.numel if end is None else end
        values = torch.empty(end - begin)
        if begin != end:
            self._read(slot, begin, end, values)
        return values

    def settle(self) -> None:
        """Say what becomes of the step that was tried, if it was, before the next push does."""
        if self._verdict:
            self._read(0, 0, 0, torch.empty(1))

    def _read(self, slot: int, begin: int, end: int, values: torch.Tensor) -> None:
        # Other ranks have not said it yet, and this one says it again with its next push.
        where = begin, end, values.data_ptr()
        wait_update(start_update(lambda: self._tensor.read(slot, *where, self._verdict), values))

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError if it failed."""
        wait_update(handle)

    def _stream(self) -> int:
        return current_stream(self._device)
