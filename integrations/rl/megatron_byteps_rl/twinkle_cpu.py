"""Layers of Megatron in plain torch, in place of Transformer Engine's, for Twinkle on a CPU.

Twinkle builds its models from Transformer Engine's layers, which do not run on a CPU. Call
`install` in each rank before Twinkle is imported; under Ray, by ``worker_process_setup_hook``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.nn import functional

_MODULES = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.attention",
    "transformer_engine_torch",
)


class Linear(nn.Module):
    """A linear layer with the arguments of Megatron's wrappers, split over tensor-parallel ranks.

    `parallel_mode` selects the split. The layer returns values, and the bias if it must be added
    later.
    """

    mode = "duplicated"
    """Mode of layers without `parallel_mode`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any = None,
        bias: bool = False,
        skip_bias_add: bool = False,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        self.config, self.parallel_mode = config, parallel_mode or self.mode
        self.tp_group = tp_group or get_tensor_model_parallel_group()
        self.tp_size = self.tp_group.size()
        column, row = self.parallel_mode == "column", self.parallel_mode == "row"
        self.in_features = input_size // (self.tp_size if row else 1)
        self.out_features = output_size // (self.tp_size if column else 1)
        self.use_bias, self.skip_bias_add = bias, skip_bias_add
        kind = config.params_dtype
        self.weight = nn.Parameter(torch.zeros(self.out_features, self.in_features, dtype=kind))
        if init_method is not None and config.perform_initialization:
            init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=kind)) if bias else None
        for parameter in self.parameters():
            # Megatron marks dense parameters in this way: all data-parallel ranks sum them.
            parameter.allreduce, parameter.sequence_parallel = True, False  # type: ignore[attr-defined]
        split = [self.weight] if column or row else []
        if column and self.bias is not None:
            split.append(self.bias)
        for parameter in split:
            set_tensor_model_parallel_attributes(parameter, True, dim=int(row), stride=1)

    def forward(self, x: torch.Tensor, *others: Any, **more: Any) -> Any:
        from megatron.core import tensor_parallel

        added, later = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        if self.parallel_mode == "column":
            x = tensor_parallel.copy_to_tensor_model_parallel_region(x, self.tp_group)
        if self.parallel_mode != "row":
            return functional.linear(x, self.weight, added), later
        out = functional.linear(x, self.weight)
        out = tensor_parallel.reduce_from_tensor_model_parallel_region(out, self.tp_group)
        return (out if added is None else out + added), later


class ColumnLinear(Linear):
    mode = "column"


class RowLinear(Linear):
    mode = "row"


class NormedLinear(Linear):
    """A column-parallel layer after a norm."""

    mode = "column"

    def __init__(self, input_size: int, *args: Any, config: Any, **others: Any) -> None:
        super().__init__(input_size, *args, config=config, **others)
        self.return_layernorm_output, self.eps = False, config.layernorm_epsilon
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *others: Any, **more: Any) -> Any:
        normed = functional.rms_norm(x, (self.in_features,), self.layer_norm_weight, self.eps)
        out, later = super().forward(normed)
        return ((out, normed) if self.return_layernorm_output else out), later


def _norm(config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:
    return nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


def _recompute(forward: Any, distribute: Any, tracker: Any, group: Any, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False)


def _attention() -> type:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """Megatron's own attention with the arguments of Transformer Engine's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in ("num_splits", "k_channels", "v_channels"):
                kwargs.pop(name, None)
            super().__init__(*args, **kwargs)

        def forward(self, *args: Any, num_splits: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Attention


def install() -> None:
    """Make this process ready to train with Twinkle on a CPU. Must be called before all else."""
    # Twinkle imports vllm if it is installed, which takes half a minute per rank.
    sys.modules["vllm"] = None  # type: ignore[assignment]
    from megatron.training import cpu_layers, cpu_platform

    cpu_platform.install()
    cpu_layers.allow_context_parallel()
    import megatron.core.extensions.transformer_engine as core

    unused = (
        "FusedMLP",
        "GroupedLinear",
        "ColumnParallelGroupedLinear",
        "RowParallelGroupedLinear",
    )
    layers = {
        "TELinear": Linear,
        # Each has its own class, because LoRA checks the class of a layer.
        "TEColumnParallelLinear": ColumnLinear,
        "TERowParallelLinear": RowLinear,
        "TELayerNormColumnParallelLinear": NormedLinear,
        "TENorm": _norm,
        "TEDotProductAttention": _attention(),
        "te_checkpoint": _recompute,
        **{f"TE{name}": type(name, (nn.Module,), {}) for name in unused},
    }
    vars(core).update(layers)
    import megatron.core.extensions.transformer_engine_spec_provider as provider
    import megatron.core.models.gpt.gpt_layer_specs as specs

    vars(provider).update({name: new for name, new in layers.items() if name in vars(provider)})
    theirs: Any = provider.TESpecProvider

    class Provider(theirs):
        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            return _norm

    vars(specs).update(TESpecProvider=Provider, TENorm=_norm)
    for name in _MODULES:
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__, module.__version__ = [], "0.0.0"
        # isinstance() is called with these classes
        module.Float8BlockwiseQTensor = module.Float8BlockQuantizer = type("Absent", (), {})
        sys.modules[name] = module
    # Twinkle does not support CPUs, so its nearest platform is used, with gloo.
    from twinkle import DeviceMesh
    from twinkle.utils.platforms.gpu import GPU

    GPU.device_backend = staticmethod(lambda platform=None: "gloo")
    make = DeviceMesh.create_process_group

    def create_process_group(mesh: Any, dims: Any) -> Any:
        # Twinkle makes its data-parallel groups at the same time and under one name, so two groups
        # would meet in the store and hang. With local synchronization the name contains the ranks.
        new_group = partial(torch.distributed.new_group, use_local_synchronization=True)
        with patch.object(torch.distributed, "new_group", new_group):
            return make(mesh, dims)

    DeviceMesh.create_process_group = create_process_group
