"""An optimizer's updates compared with the same ones in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_EPS = 1e-6
"""Added to a norm before it divides, as by Megatron."""
_OPTIONS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov")


class ExactUpdates:
    """Follows Megatron's optimizer on one rank: each step is made a second time in fp64.

    Both are given the same gradients, summed over data-parallel ranks and rounded as they are when
    the optimizer gets them, and the same norm. So what is measured is the rounding of the update.
    """

    def __init__(self, optimizer: Any, buckets: Iterable[tuple[Any, Any]], steps: int) -> None:
        """
        Args:
            optimizer: Megatron's, before its first step.
            buckets: of DDP, and the group that sums each.
            steps: after so many the errors are there.
        """
        self.error = self.size = 0.0
        """Sums of squares: of what the fp32 parameters are off by, and of the parameters."""
        self.read_bytes = 0
        """From servers, to look at the parameters."""
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
        """torch's, of fp64 copies."""
        model = {
            id(getattr(parameter, "main_param", parameter)): parameter
            for bucket, _ in self._buckets
            for parameter in bucket.params_list
        }
        self._groups = []
        mine = []
        for group in groups:
            parameters = [model[id(p)] for p in group["params"] if id(p) in model]
            if not parameters:
                continue
            copies = [torch.nn.Parameter(p.detach().double().cpu()) for p in parameters]
            self._copies.update(zip(parameters, copies, strict=True))
            self._groups.append(group)
            options = {name: group[name] for name in _OPTIONS if name in group}
            mine.append({"params": copies, **options})
        if not mine:
            return None
        kind = torch.optim.AdamW if "betas" in mine[0] else torch.optim.SGD
        return kind(mine, lr=0.0, foreach=False)

    def _watch(self, bucket: Any) -> None:
        """Note what this rank sends."""
        (served,), wire = bucket.dpu_server_buckets, bucket.dpu_reduce_op.wire.memory

        def noting(push: Callable[..., Any]) -> Callable[..., Any]:
            def pushed(*args: Any) -> Any:
                self._pushed[id(bucket)] = bucket.grad_data.detach().to(wire, copy=True).cpu()
                return push(*args)

            return pushed

        served._push, served.push_step = noting(served._push), noting(served.push_step)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the optimizer's."""
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
        """The gradients that the update is made of."""
        for bucket, group in self._buckets:
            flat = bucket.grad_data
            if self._served:
                flat = self._added(bucket, group)
            for parameter, (begin, end) in bucket.param_to_index.items():
                yield parameter, flat[begin:end].double().cpu().view(parameter.shape).clone()

    def _added(self, bucket: Any, group: Any) -> torch.Tensor:
        """As servers add: exactly, and rounded once."""
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
            mine = norms.get(getattr(parameter, "grad_norm_group", None), norm)
            scale = min(1.0, limit / (float(mine) + _EPS)) if mine and limit > 0 else 1.0
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
        """The fp32 parameters."""
        if not self._served:
            for parameter in self._copies:
                yield parameter, getattr(parameter, "main_param", parameter).detach()
            return
        for bucket, _ in self._buckets:
            (served,) = bucket.dpu_server_buckets
            for begin, parameter in served.places:
                self.read_bytes += parameter.numel() * 4
                yield parameter, served.read(0, begin, begin + parameter.numel())
