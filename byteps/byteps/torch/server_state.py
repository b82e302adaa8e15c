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


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Raises ValueError for an optimizer, or an option, that servers do not know."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise ValueError(f"servers update as torch.optim.AdamW and SGD do, not as {kind.__name__}")
    rule = Rule(is_adamw=kind is torch.optim.AdamW, groups=[])
    rule.groups.extend(rule.groups_of(optimizer.param_groups))
    return rule


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
        self.norms = torch.empty(0, dtype=torch.float64)
        self._tensor: Any = None

    def declare(
        self, name: str, ranks: list[int], average: bool, rule: Rule, group_of: dict[int, int]
    ) -> None:
        """Tell the servers. Raises BytePSError when they refuse."""
        segments: list[tuple[int, int]] = []
        for index, begin, parameter in self.places:
            if segments and segments[-1][1] == group_of[index]:
                segments.pop()
            segments.append((begin + parameter.numel(), group_of[index]))
        declaration = engine.TensorDeclaration(
            name=name,
            dtype=self.parameters.dtype,
            numel=self.numel,
            average=average,
            group=ranks,
            device=self.parameters.device,
        )
        self._tensor = c_lib.UpdatedTensor(
            engine.spec_of(declaration), rule.is_adamw, rule.groups, segments
        )
        self.norms = torch.empty(self._tensor.num_partitions(), dtype=torch.float64)

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
        engine.will_be_moved(self.gradients, self.parameters)
        where = self.gradients.data_ptr(), self.parameters.data_ptr()
        return self._tensor.push_step(*where, step, self._stream())

    def push_norm(self) -> int:
        """Start; the servers answer with the sum's squares."""
        engine.will_be_moved(self.gradients)
        where = self.gradients.data_ptr(), self.norms.data_ptr()
        return self._tensor.push_norm(*where, self._stream())

    def step(self, step: Step) -> int:
        """Start; after push_norm, the servers update."""
        engine.will_be_moved(self.parameters)
        return self._tensor.step(self.parameters.data_ptr(), step, self._stream())

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put fp32 values into a slot."""
        values = values.contiguous()
        engine.will_be_moved(values)
        engine.wait(self._tensor.load(slot, values.data_ptr()), values)

    def read(self, slot: int) -> torch.Tensor:
        """The fp32 values of a slot, on the CPU."""
        values = torch.empty(self.numel)
        engine.will_be_moved(values)
        engine.wait(self._tensor.read(slot, values.data_ptr()), values)
        return values

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError when it failed."""
        engine.wait(handle, self.parameters, self.gradients, self.norms)

    def _stream(self) -> int:
        if not self.parameters.is_cuda:
            return 0
        return torch.cuda.current_stream(self.parameters.device).cuda_stream


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
