"""What a ServerOptimizer is made of: its rule, and its parameters in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import c_lib
from byteps.torch.declarations import TensorDeclaration, spec_of
from byteps.torch.operations import start_update, wait_update
from byteps.torch.tensors import current_stream

Step = tuple[int, float, bool, list[tuple[float, float]]]
"""Number, factor of the gradients, whether to skip it, learning rate and weight decay by group."""
GroupNumbers = tuple[float, float, float, bool]
"""(beta1, beta2, eps, False) of AdamW, (momentum, dampening, 0, nesterov) of SGD."""
Segment = tuple[int, int, bool]
"""End, parameter group, and whether gradients count in the norm: elements from the last end on."""

CLIPS = ("speculate", "wait")
"""How steps are made that may be clipped; see Speculation."""

_LOST = 2
"""So many clipped steps in a row, and the next one waits."""
_TOLD_EACH = 200
"""Steps that were tried, between two messages about them."""
_KEEP, _DROP = 1, 2
"""Verdicts of the protocol."""

# What would change the arithmetic, and may only have this value.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}


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
        """What servers keep, as a torch optimizer names it."""
        if self.is_adamw:
            return ["master_param", "exp_avg", "exp_avg_sq"]
        if any(momentum for momentum, *_ in self.groups):
            return ["master_param", "momentum_buffer"]
        return ["master_param"]


class Speculation:
    """Which steps servers try before their norm is known, and how that went.

    A step that is tried brings parameters that hold if nothing is clipped. If something is, they
    come down once more, after the gradients, as they would have without trying. After two clipped
    steps in a row nothing is tried before a step that is not clipped: trying has a cost for
    servers. All ranks know the same norms, and so decide the same.
    """

    def __init__(self, clip: str, *, useful: bool = True) -> None:
        """`clip`: one of CLIPS. `useful`: False where a step waits for nothing.

        Raises:
            ValueError: there is no such way to clip.
        """
        if clip not in CLIPS:
            raise ValueError(f"clip must be {' or '.join(map(repr, CLIPS))}, not {clip!r}")
        self.is_on = clip == "speculate" and useful
        """Whether steps may be tried at all."""
        self.tried = 0
        """Steps that were tried."""
        self.redone = 0
        """Of these, steps that were made again, since they were clipped."""
        self._clipped_in_a_row = 0
        self._told = (0, 0)

    @property
    def tries(self) -> bool:
        """Whether the next step is tried."""
        return self.is_on and self._clipped_in_a_row < _LOST

    def note(self, *, tried: bool, clipped: bool, skipped: bool = False) -> None:
        """A step was made. One that was skipped tells nothing of the next one."""
        self.tried += tried
        self.redone += tried and clipped and not skipped
        if not skipped:
            self._clipped_in_a_row = self._clipped_in_a_row + 1 if clipped else 0

    def forget(self) -> None:
        """A state was loaded: ranks may have made different numbers of steps before."""
        self._clipped_in_a_row = 0

    def advice(self) -> str | None:
        """What to say of the last steps, once in a while, if trying them was of little use."""
        tried, redone = (now - then for now, then in zip(self._counts(), self._told, strict=True))
        if tried < _TOLD_EACH:
            return None
        self._told = self._counts()
        if redone * 4 < tried:
            return None
        return (
            f"{redone} of the last {tried} steps that servers tried were clipped, and made again; "
            "a larger limit of the norm would make more of them stand"
        )

    def _counts(self) -> tuple[int, int]:
        return self.tried, self.redone


def start_and_wait[B, H](
    buckets: Sequence[B], start: Callable[[B], H | None], wait: Callable[[B, H, bool], None]
) -> None:
    """Start something for each bucket, if `start` does; wait for all of it, also when one fails:
    nothing is read or written any more when this returns or raises.

    Args:
        start: its error ends the round of starts.
        wait: is told whether anything has failed before.

    Raises:
        RuntimeError: the first one, which may be a BytePSError.
    """
    started: list[tuple[B, H]] = []
    errors: list[RuntimeError] = []
    try:
        for bucket in buckets:
            handle = start(bucket)
            if handle is not None:
                started.append((bucket, handle))
    except RuntimeError as error:
        errors.append(error)
    for bucket, handle in started:
        try:
            wait(bucket, handle, bool(errors))
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def add_segment(segments: list[Segment], end: int, group: int, counted: bool = True) -> None:
    """Append elements up to `end`, to the last segment if they are like it."""
    if segments and segments[-1][1:] == (group, counted):
        segments.pop()
    segments.append((end, group, counted))


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Raises ValueError for an optimizer, or an option, that servers do not know."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise ValueError(f"servers update as torch.optim.AdamW and SGD do, not as {kind.__name__}")
    rule = Rule(is_adamw=kind is torch.optim.AdamW, groups=[])
    rule.groups.extend(rule.groups_of(optimizer.param_groups))
    return rule


class ServerTensor:
    """A flat tensor of parameters whose fp32 values and moments servers keep.

    Gradients go up and parameters come down in the type that was declared. What is started is
    ended by `wait`; until then its tensors stay as they are.
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
        self._device = torch.device(declaration.device)
        self._tensor = c_lib.UpdatedTensor(
            *(spec_of(declaration), rule.is_adamw, rule.groups, list(segments)),
            *(in_order, speculative, counts_zeros),
        )
        self._sums = torch.empty(self._tensor.num_partitions(), 2, dtype=torch.float64)
        self._is_open = False
        self._verdict = 0

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
        """Put fp32 values, on the CPU, into a slot. Slot 0 comes first and zeroes the others."""
        values = values.contiguous()
        wait_update(start_update(lambda: self._tensor.load(slot, values.data_ptr()), values))

    def read(self, slot: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The fp32 values of a slot, on the CPU: of elements `begin` to `end`, or to the last."""
        end = self.numel if end is None else end
        values = torch.empty(end - begin)
        if begin == end:
            return values
        # Other ranks have not said it yet, and this one says it again with its next push.
        where = begin, end, values.data_ptr()
        wait_update(start_update(lambda: self._tensor.read(slot, *where, self._verdict), values))
        return values

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError if it failed."""
        wait_update(handle)

    def _stream(self) -> int:
        return current_stream(self._device)


class Bucket:
    """Parameters of one type and device, in one flat tensor, and their gradients in another."""

    def __init__(self, places: list[tuple[int, int, torch.Tensor]], device: torch.device) -> None:
        """`places`: index among all parameters, first element here, the parameter."""
        self.places = places
        last = places[-1]
        self.numel = last[1] + last[2].numel()
        self.parameters = torch.empty(self.numel, dtype=last[2].dtype, device=device)
        self.gradients = torch.zeros_like(self.parameters)
        for _, begin, parameter in places:
            self._part(self.parameters, begin, parameter).copy_(parameter.detach())
            parameter.data = self._part(self.parameters, begin, parameter)
        self._tensor: ServerTensor | None = None

    def declare(
        self,
        name: str,
        ranks: list[int],
        average: bool,
        rule: Rule,
        group_of: dict[int, int],
        speculative: bool,
    ) -> None:
        """Tell the servers. Raises BytePSError when they refuse."""
        segments: list[Segment] = []
        for index, begin, parameter in self.places:
            add_segment(segments, begin + parameter.numel(), group_of[index])
        declaration = TensorDeclaration(
            name=name,
            dtype=self.parameters.dtype,
            numel=self.numel,
            average=average,
            group=ranks,
            device=self.parameters.device,
        )
        self._tensor = ServerTensor(declaration, rule, segments, speculative=speculative)

    @property
    def tensor(self) -> ServerTensor:
        """Once declared."""
        assert self._tensor is not None
        return self._tensor

    @staticmethod
    def _part(flat: torch.Tensor, begin: int, parameter: torch.Tensor) -> torch.Tensor:
        return flat[begin : begin + parameter.numel()].view(parameter.shape)

    def collect_gradients(self) -> None:
        """Each parameter's gradient is in the flat tensor, wherever it was computed."""
        for _, begin, parameter in self.places:
            part = self._part(self.gradients, begin, parameter)
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)
            parameter.grad = part

    def zero_gradients(self) -> None:
        self.gradients.zero_()
        for _, begin, parameter in self.places:
            parameter.grad = self._part(self.gradients, begin, parameter)

    def push_step(self, step: Step) -> int:
        """Start; the servers update as soon as they have the sum."""
        return self.tensor.push_step(self.gradients, self.parameters, step)

    def push_norm(self) -> int:
        """Start; the servers answer with the sum's squares."""
        return self.tensor.push_norm(self.gradients)

    def push_try(self, step: Step) -> int:
        """Start; the servers answer with the parameters that the step would make, and the squares.

        The parameters come down into the gradients' memory: what was answered has been sent.
        """
        return self.tensor.push_try(self.gradients, self.gradients, step)

    def keep(self) -> None:
        """Take the parameters of the step that was tried."""
        self.tensor.keep()
        self.take()

    def step_again(self, step: Step) -> int:
        """Start, after push_try; the servers update. `take` is called when all buckets are there:
        a rank has the parameters of one step."""
        return self.tensor.step(self.gradients, step)

    def take(self) -> None:
        """Take the parameters that came down into the gradients' memory."""
        self.parameters.copy_(self.gradients)

    def drop(self) -> None:
        """Forget the step that was tried."""
        self.tensor.drop()

    def step(self, step: Step) -> int:
        """Start; after push_norm, the servers update."""
        return self.tensor.step(self.parameters, step)

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError when it failed."""
        self.tensor.wait(handle)


def make_buckets(
    param_groups: Sequence[dict[str, Any]],
    rule: Rule,
    *,
    name: str,
    ranks: list[int],
    average: bool,
    most_bytes: int,
    speculative: bool,
) -> list[Bucket]:
    """The parameters that need a gradient, in buckets that the servers know.

    Raises:
        BytePSError: the servers refuse.
        ValueError: there are none, or one has a type that servers do not update.
    """
    group_of: dict[int, int] = {}
    open_places: dict[tuple[torch.dtype, torch.device], list[tuple[int, int, torch.Tensor]]] = {}
    full: list[list[tuple[int, int, torch.Tensor]]] = []
    index = -1
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            index += 1
            if not parameter.requires_grad or parameter.numel() == 0:
                continue
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"servers update parameters of float32 and bfloat16; number {index} (of group "
                    f"{number}) is {parameter.dtype}"
                )
            group_of[index] = number
            kind = parameter.dtype, parameter.device
            places = open_places.setdefault(kind, [])
            begin = places[-1][1] + places[-1][2].numel() if places else 0
            size = (begin + parameter.numel()) * parameter.element_size()
            if places and size > most_bytes:
                full.append(places)
                places, begin = [], 0
                open_places[kind] = places
            places.append((index, begin, parameter))
    full.extend(open_places.values())
    if not full:
        raise ValueError("no parameter needs a gradient: there is nothing to optimize")
    full.sort(key=lambda places: places[0][0])
    with torch.no_grad():
        buckets = [Bucket(places, places[0][2].device) for places in full]
    for number, bucket in enumerate(buckets):
        bucket.declare(f"{name}/{number}", ranks, average, rule, group_of, speculative)
    return buckets
