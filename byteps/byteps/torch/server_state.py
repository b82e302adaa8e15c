"""What a ServerOptimizer is made of: its rule, and its parameters in flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import c_lib, engine

Step = tuple[int, float, bool, list[tuple[float, float]]]
"""Number, factor of the gradients, whether to skip it, learning rate and weight decay by group."""
GroupNumbers = tuple[float, float, float, bool]
"""(beta1, beta2, eps, False) of AdamW, (momentum, dampening, 0, nesterov) of SGD."""
Segment = tuple[int, int, bool]
"""End, parameter group, and whether gradients count in the norm: elements from the last end on."""

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
        declaration: engine.TensorDeclaration,
        rule: Rule,
        segments: Sequence[Segment],
        *,
        in_order: bool = False,
    ) -> None:
        """Tell the servers.

        Args:
            declaration: what the members agree on; of a GPU, its current stream is used.
            rule: how parameters are updated.
            segments: which elements belong to which group; they cover the tensor.
            in_order: servers add the gradients in the order of ranks, not of arrival.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = declaration.numel
        self._device = torch.device(declaration.device)
        self._tensor = c_lib.UpdatedTensor(
            engine.spec_of(declaration), rule.is_adamw, rule.groups, list(segments), in_order
        )
        self.norms = torch.empty(self._tensor.num_partitions(), dtype=torch.float64)
        """Of `push_norm`: each partition's sum of the squares of what counts."""

    def push_step(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start; the servers update as soon as they have the sum. Both may be one tensor."""
        engine.will_be_moved(gradients, parameters)
        where = gradients.data_ptr(), parameters.data_ptr()
        return self._tensor.push_step(*where, step, self._stream())

    def push_norm(self, gradients: torch.Tensor) -> int:
        """Start; the servers answer with the sum's squares."""
        engine.will_be_moved(gradients)
        where = gradients.data_ptr(), self.norms.data_ptr()
        return self._tensor.push_norm(*where, self._stream())

    def step(self, parameters: torch.Tensor, step: Step) -> int:
        """Start; after push_norm, the servers update."""
        engine.will_be_moved(parameters)
        return self._tensor.step(parameters.data_ptr(), step, self._stream())

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put fp32 values, on the CPU, into a slot. Slot 0 comes first and zeroes the others."""
        values = values.contiguous()
        engine.will_be_moved(values)
        engine.wait(self._tensor.load(slot, values.data_ptr()), values)

    def read(self, slot: int) -> torch.Tensor:
        """The fp32 values of a slot, on the CPU."""
        values = torch.empty(self.numel)
        engine.will_be_moved(values)
        engine.wait(self._tensor.read(slot, values.data_ptr()), values)
        return values

    def wait(self, handle: int, *tensors: torch.Tensor) -> None:
        """Until what was started with these tensors has ended; raises BytePSError if it failed."""
        engine.wait(handle, *tensors, self.norms)

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


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
        self, name: str, ranks: list[int], average: bool, rule: Rule, group_of: dict[int, int]
    ) -> None:
        """Tell the servers. Raises BytePSError when they refuse."""
        segments: list[Segment] = []
        for index, begin, parameter in self.places:
            add_segment(segments, begin + parameter.numel(), group_of[index])
        declaration = engine.TensorDeclaration(
            name=name,
            dtype=self.parameters.dtype,
            numel=self.numel,
            average=average,
            group=ranks,
            device=self.parameters.device,
        )
        self._tensor = ServerTensor(declaration, rule, segments)

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

    def step(self, step: Step) -> int:
        """Start; after push_norm, the servers update."""
        return self.tensor.step(self.parameters, step)

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError when it failed."""
        self.tensor.wait(handle, self.parameters, self.gradients)


def make_buckets(
    param_groups: Sequence[dict[str, Any]],
    rule: Rule,
    *,
    name: str,
    ranks: list[int],
    average: bool,
    most_bytes: int,
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
        bucket.declare(f"{name}/{number}", ranks, average, rule, group_of)
    return buckets
