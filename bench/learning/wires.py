"""Emulates how hosts reduce gradients and update parameters with each wire type.

A single process simulates all hosts: their gradients are rows of one tensor. Values are rounded by
BytePS's own code: `byteps.torch.wire` on the CPU, its kernels on a GPU. The servers' arithmetic
(sums in fp32 in the order of ranks, an average, AdamW) is written in torch, operation by operation.
tests/bench/test_learning.py compares both with real servers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch import wire
from byteps.torch.wire import BLOCK, WireType

FORMS = {"int8": wire.int8(), "int4": wire.int4()}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Types of pushed and pulled values, and the place of the optimizer."""

    up: str
    """Type of pushed values: bf16, int8, or int4 with error feedback."""
    down: str
    """Type of sums or, with the optimizer on the servers, of differences of parameters. "same": the
    type of the gradients."""
    servers: bool
    """Whether AdamW runs on the servers."""
    gathers: str = ""
    """Type in which FSDP2 gathers parameters; "": all hosts hold all parameters."""
    rotated: bool = False
    """Whether differences are multiplied by a Hadamard matrix before rounding, block by block."""
    is_product: bool = True
    """Whether users can choose this recipe. Otherwise it is an experiment."""


RECIPES: dict[str, Recipe] = {
    "bf16": Recipe(up="bf16", down="bf16", servers=False),
    "int8-servers": Recipe(up="int8", down="int8", servers=True),
    "int4-int8-servers": Recipe(up="int4", down="int8", servers=True),
    "int8": Recipe(up="int8", down="int8", servers=False),
    "int4": Recipe(up="int4", down="int4", servers=False),
    "fsdp-int8": Recipe(up="int8", down="same", servers=False, gathers="int8"),
    "fsdp-int4": Recipe(up="int4", down="same", servers=False, gathers="int8"),
    "int4-int4-servers": Recipe(up="int4", down="int4", servers=True, is_product=False),
    "int4-rotated-servers": Recipe(
        up="int4", down="int4", servers=True, rotated=True, is_product=False
    ),
    "bf16-servers": Recipe(up="bf16", down="bf16", servers=True),
    "int4-int8": Recipe(up="int4", down="int8", servers=False, is_product=False),
}
"""Recipes by name. The reference is "bf16": a ring of bf16, with parameters gathered in bf16."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Options of torch.optim.AdamW and of the servers' AdamW."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of an averaged gradient; 0: no clipping."""

    def numbers(self, step: int, rate: float) -> list[float]:
        """Return the factors and the divisor of a step. The first step is 1."""
        keep = 1 - rate * self.weight_decay
        root = (1 - self.beta2**step) ** 0.5
        return [keep, root, -(rate / (1 - self.beta1**step))]

    def update(
        self,
        gradient: torch.Tensor,
        master: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        """Make a step in place, with the operations of AdamWLoop in server/optimizer/update.cc.

        Args:
            gradient: averaged, in fp32. It is clipped in place.
            numbers: result of `numbers`, fp32, on the device.
        """
        if self.clip > 0:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            gradient.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0).float())
        keep, root, rate = numbers.unbind()
        master.mul_(keep)
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        denominator = square.sqrt().div_(root).add_(self.eps)
        master.add_(mean.mul(rate).div_(denominator))


class Hosts:
    """Parameters of all hosts, and the fp32 state of AdamW.

    In flat tensors, parameters that travel in few bits come first. Those that stay bf16 (norms and
    small parameters) follow.
    """

    def __init__(
        self, held: torch.Tensor, few: int, hosts: int, shards: torch.Tensor | None = None
    ) -> None:
        """`held`: bf16 parameters, updated in place. `few`: number of values that travel in few
        bits. `shards`: indices of `held`, in the order in which FSDP2 gathers the values."""
        self.held, self.few, self.hosts, self._shards = held, few, hosts, shards
        device, numel = held.device, held.numel()
        self.master, self.mean, self.square = (torch.zeros(numel, device=device) for _ in range(3))
        self.total = torch.zeros(numel, device=device)
        """Averaged gradient of the last step."""

    def start(self, recipe: Recipe, adamw: AdamW, values: torch.Tensor) -> None:
        """Begin with these fp32 parameters, and with a state of zeros."""
        device, few = self.held.device, self.few
        self.recipe, self.adamw = recipe, adamw
        self.held.copy_(values)
        self.master.copy_(self.held)
        self.mean.zero_()
        self.square.zero_()
        has_blocks = recipe.up != "bf16"
        self._lost = self._lost_down = None
        if has_blocks and not recipe.gathers and FORMS[recipe.up].feedback:
            self._lost = torch.zeros(self.hosts * few, dtype=torch.bfloat16, device=device)
        sends_blocks_down = has_blocks and not recipe.servers and not recipe.gathers
        if sends_blocks_down and FORMS[recipe.down].feedback:
            self._lost_down = torch.zeros(few, dtype=torch.bfloat16, device=device)
        if recipe.gathers:
            assert self._shards is not None
            count = len(self._shards)
            self._blocks = FORMS[recipe.up].empty(self.hosts * count, device)
            self._down = FORMS[recipe.gathers].empty(count, device)
            self._values = torch.empty(self.hosts, count, device=device)
            if FORMS[recipe.up].feedback:
                self._lost = torch.zeros(self.hosts * count, dtype=torch.bfloat16, device=device)
        elif has_blocks:
            if few % BLOCK:
                raise ValueError(f"{few} values in few bits are no whole blocks of {BLOCK}")
            self._blocks = FORMS[recipe.up].empty(self.hosts * few, device)
            self._down = FORMS[recipe.down].empty(few, device)
            self._values = torch.empty(self.hosts, few, device=device)
        self._rotation = hadamard(BLOCK, device) if recipe.rotated else None

    def choose(self, host: int) -> None:
        """Do nothing: all hosts hold the same parameters."""

    def finish(self) -> None:
        """Do nothing: the model already computes with the parameters that count."""

    def state(self) -> dict[str, torch.Tensor | None]:
        """Return views of everything that a checkpoint needs."""
        names = ("held", "master", "mean", "square", "_lost", "_lost_down")
        return {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, torch.Tensor | None]) -> None:
        """Resume from a `state`. Call `start` first."""
        for name, values in state.items():
            if values is not None:
                getattr(self, name).copy_(values)

    def step(self, few: torch.Tensor, exact: torch.Tensor, numbers: torch.Tensor) -> None:
        """Reduce gradients and update.

        Args:
            few: bf16, with a row per host. It is overwritten.
            exact: like `few`, for the parameters that stay bf16.
            numbers: result of `AdamW.numbers`, fp32, on the device.
        """
        total, kept_total = self.total[: self.few], self.total[self.few :]
        if self.recipe.gathers:
            self._scatter(torch.cat([few, exact], 1))
        elif self.recipe.up == "bf16":
            reduce = servers_mean if self.recipe.servers else ring_mean
            total.copy_(reduce(few))
            kept_total.copy_(reduce(exact))
        else:
            self._mean_of_blocks(few, total)
            kept_total.copy_(servers_mean(exact))
        self.adamw.update(self.total, self.master, self.mean, self.square, numbers)
        if self.recipe.gathers:
            self._gather()
        elif self.recipe.servers and self.recipe.up != "bf16":
            self._send_differences()
        else:
            self.held.copy_(self.master)

    def _mean_of_blocks(self, gradients: torch.Tensor, total: torch.Tensor) -> None:
        form = FORMS[self.recipe.up]
        wire.encode(gradients.view(-1), form, self._blocks, self._lost)
        wire.decode(self._blocks, form, self._values.view(-1))
        total.copy_(self._values[0])
        for values in self._values[1:]:
            total.add_(values)
        total.div_(self.hosts)
        if not self.recipe.servers:
            down = FORMS[self.recipe.down]
            wire.encode(total, down, self._down, self._lost_down)
            wire.decode(self._down, down, total)

    def _scatter(self, gradients: torch.Tensor) -> None:
        """Average as byteps.torch.fsdp does: bf16 gradients travel in blocks, and the owner of a
        shard pulls the average in bf16."""
        form = FORMS[self.recipe.up]
        wire.encode(gradients[:, self._shards].reshape(-1), form, self._blocks, self._lost)
        wire.decode(self._blocks, form, self._values.view(-1))
        total = self._values[0]
        for values in self._values[1:]:
            total.add_(values)
        self.total[self._shards] = total.div_(self.hosts).to(torch.bfloat16).float()

    def _gather(self) -> None:
        """Round the parameters as byteps.torch.fsdp gathers them."""
        form = FORMS[self.recipe.gathers]
        values = self.master[self._shards].to(torch.bfloat16)
        wire.encode(values, form, self._down)
        wire.decode(self._down, form, values)
        self.held[self._shards] = values

    def _send_differences(self) -> None:
        """Round the differences between the servers' parameters and the hosts', as servers send
        them."""
        held, master = self.held[: self.few], self.master[: self.few]
        self.held[self.few :].copy_(self.master[self.few :])
        difference = master - held.float()
        if self._rotation is not None:
            difference = (difference.view(-1, BLOCK) @ self._rotation).view(-1)
        form: WireType = FORMS[self.recipe.down]
        wire.encode(difference, form, self._down)
        if self.recipe.down == "int8":
            wire.add_differences(self._down, held, held)
            return
        wire.decode(self._down, form, difference)
        if self._rotation is not None:
            difference = (difference.view(-1, BLOCK) @ self._rotation).view(-1)
        moved = (held.float() + difference).to(held.dtype)
        torch.where(difference == 0, held, moved, out=held)


def ring_mean(gradients: torch.Tensor) -> torch.Tensor:
    """Average as a ring of bf16 does. Each host divides first. The tensor is cut into as many
    chunks as hosts. Each chunk goes around the ring, and is rounded at every host."""
    hosts, numel = gradients.shape
    chunks = (gradients / hosts).view(hosts, hosts, numel // hosts)
    total = torch.empty_like(chunks[0])
    for chunk in range(hosts):
        total[chunk] = chunks[(chunk + 1) % hosts, chunk]
        for host in range(2, hosts + 1):
            total[chunk] += chunks[(chunk + host) % hosts, chunk]
    return total.view(-1)


def servers_mean(gradients: torch.Tensor) -> torch.Tensor:
    """Average bf16 values as servers do: they are added in fp32 and rounded once."""
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total.add_(gradient)
    return total.div_(len(gradients)).to(gradients.dtype)


def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return the symmetric, orthogonal matrix of +-1/sqrt(size). `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)
