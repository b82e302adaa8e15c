"""Adam as ``--use-precision-aware-optimizer`` expects it of Transformer Engine, in plain torch.

It keeps master parameters and moments in types of their own, and takes gradients from
``decoupled_grad``, whose type need not be the parameter's. Megatron does the rest itself: which
gradients a rank gets, how they are clipped, how parameters are gathered.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer


class PrecisionAwareAdam(torch.optim.Optimizer):
    """AdamW. Arguments are those that Megatron gives."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert master_weights and use_decoupled_grad and adam_w_mode and not capturable
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        self._dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        """As before the first step."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=self._dtypes[name])
        state["master_param"] = parameter.detach().to(self._dtypes["master_param"], copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)

    def _update(self, parameter: Any, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta2)
        master = state["master_param"].float() * (1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        master -= group["lr"] * mean / (1 - beta1 ** group["step"]) / root
        for name, value in (("exp_avg", mean), ("exp_avg_sq", square), ("master_param", master)):
            state[name].copy_(value)
        parameter.copy_(state["master_param"])


def allow_precision_aware_optimizer() -> None:
    """Have Megatron, which is imported by now without Transformer Engine, find this Adam there."""
    package = ModuleType("transformer_engine.pytorch.optimizers")
    package.FusedAdam = PrecisionAwareAdam  # type: ignore[attr-defined] # as the package has it
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
    sys.modules[package.__name__] = package
    megatron_optimizer.Adam = PrecisionAwareAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
