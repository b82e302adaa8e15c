"""An optimizer whose gradients are averaged over all ranks during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from byteps.torch import agreement, gradient_averager, ops, session
from byteps.torch.compression import Compression
from byteps.torch.gradient_averager import GradientAverager, averager_of, can_cover

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Average the gradients of an optimizer's parameters over all ranks.

    A gradient is sent as soon as the backward pass has computed it. When ``loss.backward()``
    returns, gradients are averages, as with torch's DistributedDataParallel: clip and unscale them
    as on one rank, with ``torch.amp.GradScaler`` too. All ranks wrap the same optimizers in the
    same order, and make the same backward passes.

    If only some ranks use a parameter, its gradient counts as 0 on the other ranks. If no rank uses
    a parameter, the parameter keeps its gradient. The gradients of frozen parameters are averaged
    once the parameters are unfrozen. Parameters added by ``add_param_group``, which all ranks must
    call, are included. If no backward pass was made since the last ``step()``, then ``step()``
    averages the gradients that parameters have.

    A parameter is averaged for as long as it lives, even after the optimizer is gone.

    Args:
        optimizer: any optimizer. The same object is returned; its class becomes a subclass.
        named_parameters: names, the same on all ranks; None: positions in the optimizer.
        compression: ``Compression.fp16`` sends fp32 and fp64 gradients as fp16.
        backward_passes_per_step: number of passes whose gradients add up before an average.
            ``step()`` after fewer passes averages the gradients of these passes.

    Raises:
        ValueError: names are not unique, or some parameters have no name; a parameter has a type
            that servers cannot average; or the optimizer is wrapped already.
        BytePSError: ranks have different parameters.
    """
    if isinstance(optimizer, _Averaging):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    averaged = _Averaged(optimizer, named_parameters, compression, backward_passes_per_step)
    made = type(optimizer.__class__.__name__, (_Averaging, optimizer.__class__), {})
    optimizer.__class__ = made
    optimizer._averaged = averaged  # type: ignore[attr-defined]
    # This is a hook, because a scheduler that was made earlier calls the method of the old class.
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


class _Averaging:
    """Mixin that is added to the class of an optimizer."""

    _averaged: _Averaged

    def synchronize(self) -> None:
        """Average the gradients that have added up since the last average.

        Raises:
            BytePSError: a push or a pull failed.
        """
        self._averaged.average_pending()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` averages nothing."""
        self._averaged.is_skipped = True
        try:
            yield
        finally:
            self._averaged.is_skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients add up before an average."""
        self._averaged.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. All ranks call this. Raises BytePSError if their parameters
        differ."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._averaged.cover(self.param_groups)  # type: ignore[attr-defined]


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-step hook of torch; `args` is the optimizer and possibly a closure."""
    averaged: _Averaged = optimizer._averaged
    averaged.demand_covered(optimizer.param_groups)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        if not averaged.is_skipped:
            averaged.average_for_step()
        return None
    compute = averaged.averaged_closure(closure, isinstance(optimizer, torch.optim.LBFGS))
    if len(args) > 1:
        return (args[0], compute, *args[2:]), kwargs
    return args, kwargs | {"closure": compute}


class _Averaged:
    """The gradient averagers of an optimizer's parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        passes: int,
    ) -> None:
        self.is_skipped = False
        self._given = None if named is None else {value: name for name, value in named}
        self._half = compression is Compression.fp16
        self._passes = passes
        self._averagers: list[GradientAverager] = []
        self._seen: dict[GradientAverager, int] = {}
        """Number of averages of each averager at the last step."""
        self._covered: set[int] = set()
        """Ids of parameters that have an averager."""
        self.cover(optimizer.param_groups)

    def cover(self, param_groups: list[dict[str, Any]]) -> None:
        """Average the gradients of all parameters of these groups from now on."""
        names = _names_of(param_groups, self._given)
        parameters = {name: value for value, name in names.items() if can_cover(name, value)}
        here = {name: averager_of(parameter) for name, parameter in parameters.items()}
        lines = [_line(name, value, here[name]) for name, value in parameters.items()]
        lines.append(f"passes {self._passes}, fp16 {self._half}")
        key = agreement.number("optimizer", lines) if session.size() > 1 else ""
        new = {name: parameters[name] for name, averager in here.items() if averager is None}
        if new:
            GradientAverager(new, key, passes=self._passes, half=self._half)
        averagers = {averager_of(parameter): None for parameter in parameters.values()}
        self._averagers = [averager for averager in averagers if averager is not None]
        self.set_passes(self._passes)
        for averager in self._averagers:
            averager.half = self._half
            self._seen.setdefault(averager, averager.averages)
        self._covered = {id(parameter) for parameter in parameters.values()}

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        for averager in self._averagers:
            averager.passes = passes

    def demand_covered(self, param_groups: list[dict[str, Any]]) -> None:
        """Raise ValueError if a parameter needs a gradient but has no averager."""
        for number, group in enumerate(param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in self._covered:
                    can_cover(f"group{number}.{index}", parameter)
                    raise ValueError(
                        f"parameter {index} of group {number} was not added by "
                        "optimizer.add_param_group(), so its gradient is not averaged: call that "
                        "on all ranks"
                    )

    def average_pending(self) -> None:
        """Average the gradients that have changed since their last average."""
        self._average([averager for averager in self._averagers if averager.is_pending])

    def average_for_step(self) -> None:
        """Do the same as `average_pending`. Also average gradients that no backward pass has
        averaged since the last step."""
        due = []
        for averager in self._averagers:
            if self._seen[averager] == averager.averages:
                averager.mark()
                due.append(averager)
            elif averager.is_pending:
                due.append(averager)
        self._average(due)
        self._note_step()

    def averaged_closure(self, closure: Callable[[], Any], decides: bool) -> Callable[[], Any]:
        """Return a closure that averages the gradients. `decides`: whether the optimizer takes
        decisions by the loss. Then the closure returns the average loss, so that all ranks decide
        the same."""

        def compute() -> Any:
            self._note_step()
            loss = closure()
            self.average_for_step()
            return self._mean(loss) if decides and loss is not None else loss

        return compute

    def _note_step(self) -> None:
        for averager in self._averagers:
            self._seen[averager] = averager.averages

    def _average(self, averagers: list[GradientAverager]) -> None:
        if session.size() == 1:
            return
        gradient_averager.rejoin()
        for averager in self._averagers:
            averager.demand_none_in_flight()
        gradient_averager.average(averagers)

    def _mean(self, loss: Any) -> Any:
        if session.size() == 1:
            return loss
        mean = torch.tensor([float(loss)], dtype=torch.float64)
        ops.push_pull_inplace(mean, average=True, name=f"{self._averagers[0].key}/loss")
        return loss.detach().new_tensor(mean.item()) if torch.is_tensor(loss) else mean.item()


def _line(name: str, parameter: torch.Tensor, averager: GradientAverager | None) -> str:
    """Describe the properties of a parameter that must be the same on all ranks."""
    shape = f"{tuple(parameter.shape)} {parameter.dtype} strides {parameter.stride()}"
    return f"{name} {shape}" + (f" of {averager.key}" if averager else "")


def _names_of(
    param_groups: list[dict[str, Any]], given: Mapping[torch.Tensor, str] | None
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter. Raises ValueError if a name is missing or not unique."""
    names: dict[torch.Tensor, str] = {}
    unnamed = 0
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            name = None if given is None else given.get(parameter)
            unnamed += given is not None and name is None and parameter.requires_grad
            names[parameter] = f"group{number}.{index}" if name is None else name
    if unnamed:
        raise ValueError(f"named_parameters names all but {unnamed} of the optimizer's parameters")
    if len(set(names.values())) < len(names):
        raise ValueError("named_parameters gives one name to several parameters")
    return names
