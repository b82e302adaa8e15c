"""An optimizer whose gradients are averaged over all ranks during the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import operations, session
from byteps.torch.compression import Compression
from byteps.torch.wire import flat_view

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Wrap an optimizer: ``step()`` uses gradients averaged over all ranks.

    A gradient is sent as soon as the backward pass has it. ``synchronize()`` waits for all; call it
    before you clip or unscale gradients::

        loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    A parameter without a gradient on this rank counts as 0, since other ranks may have one.

    Args:
        optimizer: any; the result is of a class derived from its class.
        named_parameters: names, the same on all ranks; None: by position in the optimizer.
        compression: ``Compression.fp16`` sends fp32 and fp64 gradients as fp16.
        backward_passes_per_step: gradients add up on the rank over so many passes.

    Raises:
        ValueError: names are not unique, or are missing for some parameters.
    """
    made = type(optimizer.__class__.__name__, (_Averaging, optimizer.__class__), {})
    optimizer.__class__ = made
    optimizer._averaged = _Gradients(  # type: ignore[attr-defined]
        optimizer, named_parameters, compression, backward_passes_per_step
    )
    return optimizer


class _Averaging:
    """What is added to the class of an optimizer."""

    _averaged: _Gradients

    def synchronize(self) -> None:
        """Wait until all gradients are averages.

        Raises:
            BytePSError: a push or a pull failed, or a gradient was changed while it was in flight.
        """
        self._averaged.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside does not wait again, after ``synchronize()``."""
        self._averaged.waits = False
        try:
            yield
        finally:
            self._averaged.waits = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up over so many passes from now on."""
        self._averaged.passes = passes

    def step(self, closure: Any = None) -> Any:
        """Wait for the averages, then step."""
        if self._averaged.waits:
            self._averaged.synchronize()
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises BytePSError where gradients are still being averaged."""
        self._averaged.demand_none_in_flight()
        super().zero_grad(set_to_none)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    handle: int
    gradient: torch.Tensor
    version: int
    """As torch counts changes in place, when it was sent. The engine's writes do not count."""


class _Gradients:
    """Starts and awaits the averages."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        passes: int,
    ) -> None:
        self.waits = True
        self.passes = passes
        names = _names_of(optimizer, named)
        # A rank alone has its averages already.
        self._names = names if session.size() > 1 else {}
        self._half = compression is Compression.fp16
        self._seen = dict.fromkeys(self._names, 0)
        self._in_flight: dict[torch.nn.Parameter, _InFlight] = {}
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        if parameter in self._in_flight:
            raise session.BytePSError(
                f"the gradient of {self._names[parameter]!r} was computed again while it is being "
                "averaged: call step() or synchronize() first, or set backward_passes_per_step"
            )
        self._seen[parameter] += 1
        if self._seen[parameter] >= self.passes:
            self._start(parameter)

    def _start(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        flat, name = flat_view(gradient, "a gradient"), self._names[parameter]
        wire = torch.float16 if self._half and gradient.dtype.itemsize > 2 else None
        handle = operations.start(
            *(flat, flat),
            average=True,
            name=f"Gradient.{name}",
            priority=0,
            group=None,
            placement=None,
            wire_dtype=wire,
        )
        self._in_flight[parameter] = _InFlight(
            handle=handle, gradient=gradient, version=gradient._version
        )

    def synchronize(self) -> None:
        for parameter in self._names:
            if parameter not in self._in_flight and parameter.requires_grad:
                self._start(parameter)
        in_flight, self._in_flight = self._in_flight, {}
        changed = []
        for parameter, sent in in_flight.items():
            untouched = sent.gradient is parameter.grad and sent.gradient._version == sent.version
            operations.synchronize(sent.handle)
            self._seen[parameter] = 0
            if not untouched:
                changed.append(self._names[parameter])
        if changed:
            raise session.BytePSError(
                f"{len(changed)} gradients were changed while they were being averaged, the first "
                f"is that of {changed[0]!r}: call optimizer.synchronize() before "
                "GradScaler.unscale_() or clipping, and step() inside "
                "`with optimizer.skip_synchronize()`"
            )

    def demand_none_in_flight(self) -> None:
        if self._in_flight:
            name = self._names[next(iter(self._in_flight))]
            raise session.BytePSError(
                f"zero_grad() while the gradient of {name!r} is being averaged: call step() or "
                "synchronize() first"
            )


def _names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """The name of each parameter that the optimizer steps and that has gradients."""
    if named is None:
        return {
            parameter: f"group{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad
        }
    given = {parameter: name for name, parameter in named}
    stepped = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    unnamed = sum(parameter not in given for parameter in stepped)
    if unnamed:
        raise ValueError(f"named_parameters names all but {unnamed} of the optimizer's parameters")
    names = {parameter: given[parameter] for parameter in stepped}
    if len(set(names.values())) < len(names):
        raise ValueError("named_parameters gives one name to several parameters")
    return names
