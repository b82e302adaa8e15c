"""Updates by gradients in few bits, with differences that come down: made again, to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.few_bits import Rounding, moved


class ExactBits:
    """Follows the optimizer on the servers on one rank.

    A bucket's gradients are rounded as every rank rounds them, added in fp32, and used by AdamW in
    fp32. What workers hold follows from the difference, and is what this rank has to have.
    """

    def __init__(self, optimizer: Any, buckets: Iterable[tuple[Any, Any]], per_host: int) -> None:
        """
        Args:
            optimizer: Megatron's, before its first step.
            buckets: of DDP, and the group that sums each.
            per_host: consecutive ranks that share a host.
        """
        self.misses: list[str] = []
        self.steps = 0
        """That were followed."""
        self._followed = [
            _Followed(served, bucket, group, optimizer.param_groups, per_host)
            for bucket, group in buckets
            for served in getattr(bucket, "dpu_server_buckets", ())
        ]
        self._step = optimizer.step
        optimizer.step = self.step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the optimizer's."""
        result = self._step(*args, **kwargs)
        self.steps += 1
        for one in self._followed:
            different = one.follow()
            if different:
                self.misses.append(f"step {self.steps}, {one.name}: {different} differ")
        return result


class _Followed:
    def __init__(
        self,
        served: Any,
        bucket: Any,
        group: Any,
        param_groups: Sequence[dict[str, Any]],
        per_host: int,
    ) -> None:
        op = bucket.dpu_reduce_op
        self.name = f"{op.name}{'' if served._shards.has_blocks else ', kept'}"
        self._served, self._group, self._groups = served, group, param_groups
        self._hosts = [member // (per_host if op.node_whole else 1) for member in op.group]
        self.held = served.parameters.detach().clone().cpu()
        self.master = self.held.to(torch.float32, copy=True)
        self.mean, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        count, locals_ = self.held.numel(), per_host if op.node_whole else 1
        self._places = torch.arange(count).split(-(-count // locals_))
        self._few = served._shards.has_blocks
        hosts = len(set(self._hosts))
        self._up = [
            [Rounding(op.wire.name, feedback=op.wire.feedback) for _ in range(hosts)]
            for _ in self._places
        ]
        self._group_of = {
            id(parameter): index
            for index, one in enumerate(param_groups)
            for parameter in one["params"]
        }
        self._pushed: torch.Tensor | None = None
        self._made: Any = None
        self._watch()

    def _watch(self) -> None:
        served = self._served
        push, push_step, finish = served._push, served.push_step, served.finish

        def note(gradients: torch.Tensor) -> None:
            self._pushed = gradients.detach().clone()
            for begin, end in served._gaps:
                self._pushed[begin:end] = 0

        def pushed(attempt: Any, gradients: torch.Tensor) -> Any:
            note(gradients)
            return push(attempt, gradients)

        def pushed_step(step: Any) -> Any:
            note(served._gradients())
            self._made = step
            return push_step(step)

        def finished(step: Any) -> Any:
            self._made = step
            return finish(step)

        served._push, served.push_step, served.finish = pushed, pushed_step, finished

    def follow(self) -> int:
        """How many parameters are not what they have to be after the step."""
        assert self._pushed is not None
        members = [torch.empty_like(self._pushed) for _ in self._hosts]
        dist.all_gather(members, self._pushed, group=self._group)
        step = self._made
        if step.skip:
            for up in self._up:
                for rounding in up:
                    rounding.forget()
        else:
            self._update(self._summed([one.cpu() for one in members]), step)
        mine = self._served.parameters.detach().cpu()
        same = (mine == self.held) | (mine.isnan() & self.held.isnan())
        return int((~same).sum())

    def _summed(self, members: Sequence[torch.Tensor]) -> torch.Tensor:
        """As servers have the sum, in fp32."""
        sums: dict[int, torch.Tensor] = {}
        for host, one in zip(self._hosts, members, strict=True):
            sums[host] = one if host not in sums else sums[host] + one
        hosts = list(sums.values())
        if not self._few:
            sent = [one.to(self.held.dtype) for one in hosts]
            is_wide = self.held.dtype == torch.float32 and len(sent) > 2
            total = sent[0].double() if is_wide else sent[0].float()
            for one in sent[1:]:
                total = total + one
            return total.to(self.held.dtype).float()
        total = torch.zeros_like(self.master)
        for places, up in zip(self._places, self._up, strict=True):
            rounded = [rounding(host[places]) for rounding, host in zip(up, hosts, strict=True)]
            part = rounded[0].clone()
            for one in rounded[1:]:
                part += one
            total[places] = part
        return total

    def _update(self, total: torch.Tensor, step: Any) -> None:
        before = self.held
        for begin, parameter in self._served.places:
            end = begin + parameter.numel()
            index = self._group_of[id(parameter)]
            group, (rate, decay) = self._groups[index], step.rates[index]
            master, mean, square = (one[begin:end] for one in (self.master, self.mean, self.square))
            _adamw(
                *(master, mean, square, total[begin:end] * _fp32(step.scale)),
                rate=rate,
                decay=decay,
                betas=group["betas"],
                eps=group["eps"],
                number=step.number,
            )
        if not self._few:
            self.held = self.master.to(before.dtype, copy=True)
            return
        self.held = torch.empty_like(before)
        for places in self._places:
            self.held[places] = moved(before[places], self.master[places])


def _adamw(
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    number: int,
) -> None:
    """As byteps/server/optimizer/update.cc: in fp32, and fused where it fuses."""
    beta1, beta2 = betas
    weight1, weight2 = _fp32(1 - beta1), _fp32(1 - beta2)
    kept = master * _fp32(1 - rate * decay if decay else 1.0)
    if weight1 < 0.5:
        mean.copy_(_fused(weight1, gradient - mean, mean))
    else:
        mean.copy_(_fused(weight1 - 1, gradient - mean, gradient))
    square.copy_(_fused(weight2 * gradient, gradient, square * _fp32(beta2)))
    root = _fp32((1 - beta2**number) ** 0.5)
    slope = _fp32(-(rate / (1 - beta1**number)))
    # torch's root of fp32 may be a place off.
    length = square.double().sqrt().float() / root + _fp32(eps)
    master.copy_(kept + slope * mean / length)


def _fp32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once: the product is exact in fp64, and so nearly is the sum."""
    return (a.double() * b.double() + c.double()).float()
