"""Repeats an optimizer's updates in fp64, or to the bit for gradients in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.few_bits import Rounding, moved

_EPS = 1e-6
"""Epsilon that is added to a norm before a division, like in Megatron."""
_OPTIONS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov")


class ExactUpdates:
    """Follows Megatron's optimizer on a rank and makes each step a second time in fp64.

    Both steps get the same norm and the same gradients, which are summed over data-parallel ranks
    and rounded as the optimizer gets them. So the difference between the results is the rounding
    error of the update.
    """

    def __init__(self, optimizer: Any, buckets: Iterable[tuple[Any, Any]], steps: int) -> None:
        """
        Attach to an optimizer.

        Args:
            optimizer: Megatron's optimizer, before its first step.
            buckets: Buckets of DDP, each with the group that sums it.
            steps: Number of steps after which the errors are computed.
        """
        self.error = self.size = 0.0
        """Sums of squares: of the errors of the fp32 parameters, and of the parameters."""
        self.read_bytes = 0
        """Bytes that were read from servers to get the parameters."""
        self._optimizer, self._last = optimizer, steps
        self._buckets = [(b, group) for b, group in buckets if b.grad_data.numel()]
        self._made = 0
        self._served = any(hasattr(bucket, "dpu_server_buckets") for bucket, _ in self._buckets[:1])
        self._pushed: dict[int, torch.Tensor] = {}
        self._copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._twin = self._twin_of(optimizer.param_groups)
        if self._served:
            for bucket, _ in self._buckets:
                self._watch(bucket)
        self._step = optimizer.step
        optimizer.step = self.step

    def _twin_of(self, groups: Any) -> torch.optim.Optimizer | None:
        """Create torch's optimizer on fp64 copies."""
        model = {
            id(getattr(parameter, "main_param", parameter)): parameter
            for bucket, _ in self._buckets
            for parameter in bucket.params_list
        }
        self._groups = []
        copied = []
        for group in groups:
            parameters = [model[id(p)] for p in group["params"] if id(p) in model]
            if not parameters:
                continue
            copies = [torch.nn.Parameter(p.detach().double().cpu()) for p in parameters]
            self._copies.update(zip(parameters, copies, strict=True))
            self._groups.append(group)
            options = {name: group[name] for name in _OPTIONS if name in group}
            copied.append({"params": copies, **options})
        if not copied:
            return None
        kind = torch.optim.AdamW if "betas" in copied[0] else torch.optim.SGD
        return kind(copied, lr=0.0, foreach=False)

    def _watch(self, bucket: Any) -> None:
        """Record the gradients of a bucket that this rank pushes."""
        (served,), wire = bucket.dpu_server_buckets, bucket.dpu_reduce_op.wire.memory

        def noting(push: Callable[..., Any]) -> Callable[..., Any]:
            def pushed(*args: Any) -> Any:
                self._pushed[id(bucket)] = bucket.grad_data.detach().to(wire, copy=True).cpu()
                return push(*args)

            return pushed

        served._push, served.push_step = noting(served._push), noting(served.push_step)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the optimizer's step."""
        before = {} if self._served else dict(self._summed())
        unscale = 1.0 / float(self._optimizer.get_loss_scale())
        result = self._step(*args, **kwargs)
        if self._served:
            before = dict(self._summed())
        is_made, norm, _ = result
        if is_made and self._twin is not None:
            self._follow(self._twin, before, norm, unscale)
        self._made += 1
        if self._made == self._last:
            self._measure()
        return result

    def _summed(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with the gradient of its update."""
        for bucket, group in self._buckets:
            flat = bucket.grad_data
            if self._served:
                flat = self._added(bucket, group)
            for parameter, (begin, end) in bucket.param_to_index.items():
                yield parameter, flat[begin:end].double().cpu().view(parameter.shape).clone()

    def _added(self, bucket: Any, group: Any) -> torch.Tensor:
        """Add as servers do: exactly, with one rounding at the end."""
        sent = self._pushed[id(bucket)]
        total = sent.to(bucket.grad_data.device, torch.float64)
        dist.all_reduce(total, group=group)
        return total.to(sent.dtype)

    def _follow(
        self,
        twin: torch.optim.Optimizer,
        gradients: dict[torch.nn.Parameter, torch.Tensor],
        norm: Any,
        unscale: float,
    ) -> None:
        limit = self._optimizer.config.clip_grad
        norms = {None: norm, **getattr(self._optimizer, "grad_norms_by_group", {})}
        for parameter, copy in self._copies.items():
            own_norm = norms.get(getattr(parameter, "grad_norm_group", None), norm)
            scale = min(1.0, limit / (float(own_norm) + _EPS)) if own_norm and limit > 0 else 1.0
            copy.grad = gradients[parameter] * unscale * scale
        for group, followed in zip(self._groups, twin.param_groups, strict=True):
            followed.update(lr=group["lr"], weight_decay=group["weight_decay"])
        twin.step()

    def _measure(self) -> None:
        for parameter, value in self._masters():
            exact = self._copies[parameter].detach()
            self.error += (value.double().cpu().view(exact.shape) - exact).square().sum().item()
            self.size += exact.square().sum().item()

    def _masters(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield the fp32 parameters."""
        if not self._served:
            for parameter in self._copies:
                yield parameter, getattr(parameter, "main_param", parameter).detach()
            return
        for bucket, _ in self._buckets:
            (served,) = bucket.dpu_server_buckets
            for begin, parameter in served.places:
                self.read_bytes += parameter.numel() * 4
                yield parameter, served.read(0, begin, begin + parameter.numel())


class ExactBits:
    """Follows the server optimizer on a rank, to the bit.

    A bucket's gradients are quantized like on every rank, summed in fp32, and used by AdamW in
    fp32. The difference gives the parameters that this worker must have.
    """

    def __init__(self, optimizer: Any, buckets: Iterable[tuple[Any, Any]], per_host: int) -> None:
        """
        Attach to an optimizer.

        Args:
            optimizer: Megatron's optimizer, before its first step.
            buckets: Buckets of DDP, each with the group that sums it.
            per_host: Number of consecutive ranks that share a host.
        """
        self.misses: list[str] = []
        self.steps = 0
        """Number of steps that were followed."""
        self._followed = [
            _Followed(served, bucket, group, optimizer.param_groups, per_host)
            for bucket, group in buckets
            for served in getattr(bucket, "dpu_server_buckets", ())
        ]
        self._step = optimizer.step
        optimizer.step = self.step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the optimizer's step."""
        result = self._step(*args, **kwargs)
        self.steps += 1
        for twin in self._followed:
            different = twin.follow()
            if different:
                self.misses.append(f"step {self.steps}, {twin.name}: {different} differ")
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
            for index, group in enumerate(param_groups)
            for parameter in group["params"]
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
        """Count the parameters that differ from the expected ones after the step."""
        assert self._pushed is not None
        members = [torch.empty_like(self._pushed) for _ in self._hosts]
        dist.all_gather(members, self._pushed, group=self._group)
        step = self._made
        if step.skip:
            for up in self._up:
                for rounding in up:
                    rounding.forget()
        else:
            self._update(self._summed([member.cpu() for member in members]), step)
        own = self._served.parameters.detach().cpu()
        same = (own == self.held) | (own.isnan() & self.held.isnan())
        return int((~same).sum())

    def _summed(self, members: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the sum like servers, in fp32."""
        sums: dict[int, torch.Tensor] = {}
        for host, value in zip(self._hosts, members, strict=True):
            sums[host] = value if host not in sums else sums[host] + value
        hosts = list(sums.values())
        if not self._few:
            sent = [value.to(self.held.dtype) for value in hosts]
            is_wide = self.held.dtype == torch.float32 and len(sent) > 2
            total = sent[0].double() if is_wide else sent[0].float()
            for value in sent[1:]:
                total = total + value
            return total.to(self.held.dtype).float()
        total = torch.zeros_like(self.master)
        for places, up in zip(self._places, self._up, strict=True):
            rounded = [rounding(host[places]) for rounding, host in zip(up, hosts, strict=True)]
            part = rounded[0].clone()
            for value in rounded[1:]:
                part += value
            total[places] = part
        return total

    def _update(self, total: torch.Tensor, step: Any) -> None:
        before = self.held
        for begin, parameter in self._served.places:
            end = begin + parameter.numel()
            index = self._group_of[id(parameter)]
            group, (rate, decay) = self._groups[index], step.rates[index]
            master, mean, square = (
                state[begin:end] for state in (self.master, self.mean, self.square)
            )
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
    """Apply AdamW like byteps/server/optimizer/update.cc: in fp32, fused in the same places."""
    beta1, beta2 = betas
    weight1, weight2 = _fp32(1 - beta1), _fp32(1 - beta2)
    master_and_mean = master * _fp32(1 - rate * decay if decay else 1.0)
    if weight1 < 0.5:
        mean.copy_(_fused(weight1, gradient - mean, mean))
    else:
        mean.copy_(_fused(weight1 - 1, gradient - mean, gradient))
    square.copy_(_fused(weight2 * gradient, gradient, square * _fp32(beta2)))
    root = _fp32((1 - beta2**number) ** 0.5)
    slope = _fp32(-(rate / (1 - beta1**number)))
    # torch's square root in fp32 can be off by the last bit.
    length = square.double().sqrt().float() / root + _fp32(eps)
    master.copy_(master_and_mean + slope * mean / length)


def _fp32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute a * b + c with one rounding: the product is exact in fp64, and the sum nearly so."""
    return (a.double() * b.double() + c.double()).float()
