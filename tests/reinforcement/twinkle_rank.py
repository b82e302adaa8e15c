"""A rank that trains by Twinkle, through BytePS or all-reduce: ``KIND 0|1 MODEL OUT``.

Twinkle builds its models of Transformer Engine's layers alone, and a CPU has none: here they are in
plain torch.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from torch.nn import functional

MODULES = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.attention",
    "transformer_engine_torch",
)


class Linear(nn.Module):
    """A linear layer in the arguments of Megatron's wrappers. Returns values, and the bias where it
    is to be added later."""

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
        self.config, self.parallel_mode, self.tp_group = config, parallel_mode, tp_group
        self.in_features, self.out_features, self.tp_size = input_size, output_size, 1
        self.use_bias, self.skip_bias_add = bias, skip_bias_add
        kind = config.params_dtype
        self.weight = nn.Parameter(torch.zeros(output_size, input_size, dtype=kind))
        if init_method is not None and config.perform_initialization:
            init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(output_size, dtype=kind)) if bias else None
        for parameter in self.parameters():
            # As Megatron marks dense ones, which all data-parallel ranks sum.
            parameter.allreduce, parameter.sequence_parallel = True, False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *others: Any, **more: Any) -> Any:
        later = self.bias if self.skip_bias_add else None
        return functional.linear(x, self.weight, None if self.skip_bias_add else self.bias), later


class NormedLinear(Linear):
    """The same after a norm."""

    def __init__(self, input_size: int, *args: Any, config: Any, **others: Any) -> None:
        super().__init__(input_size, *args, config=config, **others)
        self.return_layernorm_output, self.eps = False, config.layernorm_epsilon
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *others: Any, **more: Any) -> Any:
        normed = functional.rms_norm(x, (self.in_features,), self.layer_norm_weight, self.eps)
        out, later = super().forward(normed)
        return ((out, normed) if self.return_layernorm_output else out), later


def norm(config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:
    return nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


def recompute(forward: Any, distribute: Any, tracker: Any, group: Any, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False)


def _attention() -> type:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """Megatron's own, in the arguments of Transformer Engine's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in ("num_splits", "k_channels", "v_channels"):
                kwargs.pop(name, None)
            super().__init__(*args, **kwargs)

        def forward(self, *args: Any, num_splits: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Attention


def install() -> None:
    """Make this process one that trains by Twinkle on a CPU. To be called first of all."""
    from megatron.training import cpu_platform

    cpu_platform.install()
    import megatron.core.extensions.transformer_engine as core

    unused = (
        "FusedMLP",
        "GroupedLinear",
        "ColumnParallelGroupedLinear",
        "RowParallelGroupedLinear",
    )
    layers = {
        "TELinear": Linear,
        # Each a class of its own: LoRA asks which of them a layer is.
        "TEColumnParallelLinear": type("Column", (Linear,), {}),
        "TERowParallelLinear": type("Row", (Linear,), {}),
        "TELayerNormColumnParallelLinear": NormedLinear,
        "TENorm": norm,
        "TEDotProductAttention": _attention(),
        "te_checkpoint": recompute,
        **{f"TE{name}": type(name, (nn.Module,), {}) for name in unused},
    }
    vars(core).update(layers)
    import megatron.core.extensions.transformer_engine_spec_provider as provider
    import megatron.core.models.gpt.gpt_layer_specs as specs

    vars(provider).update({name: new for name, new in layers.items() if name in vars(provider)})
    theirs: Any = provider.TESpecProvider

    class Provider(theirs):
        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            return norm

    vars(specs).update(TESpecProvider=Provider, TENorm=norm)
    for name in MODULES:
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__, module.__version__ = [], "0.0.0"
        # isinstance() is asked about these.
        module.Float8BlockwiseQTensor = module.Float8BlockQuantizer = type("Absent", (), {})
        sys.modules[name] = module
    # Twinkle knows no CPU: the nearest of its platforms, over gloo.
    from twinkle.utils.platforms.gpu import GPU

    GPU.device_backend = staticmethod(lambda platform=None: "gloo")


RANKS = 2
STEPS = 3
TOKENS = 24
ROWS = 4
"""Of a step, on all ranks together."""


def batch(step: int, rows: slice) -> list[dict[str, Any]]:
    """Random samples of a step, in Twinkle's form."""
    import torch

    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, 256, (ROWS, TOKENS), generator=generator).tolist()
    return [
        {
            "input_ids": ids,
            "labels": [*ids[1:], -100],
            "attention_mask": [1] * TOKENS,
            "position_ids": list(range(TOKENS)),
            "length": TOKENS,
        }
        for ids in drawn[rows]
    ]


def train(kind: str, through_byteps: bool, folder: str, rank: int) -> Any:
    """A model that has made some steps."""
    import twinkle
    from peft import LoraConfig
    from twinkle import DeviceMesh
    from twinkle.model import MegatronModel

    mesh = DeviceMesh.from_sizes(world_size=RANKS, dp_size=RANKS)
    twinkle.initialize(mode="local", global_device_mesh=mesh)
    fusions = ("bias_activation", "masked_softmax", "gradient_accumulation", "apply_rope")
    off = {f"{name}_fusion": False for name in (*fusions, "bias_dropout")}
    model = MegatronModel(
        folder,
        device_mesh=mesh,
        # A single host: nothing would go to servers unless asked for.
        ddp_config=({"use_dpu_reduce": True, "dpu_reduce_route": "flat"} if through_byteps else {}),
        mixed_precision="bf16",
        use_distributed_optimizer=False,
        persist_layer_norm=False,
        **off,
    )
    named = {}
    if kind == "lora":
        named = {"adapter_name": "one"}
        model.add_adapter_to_model(
            "one", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        )
    model.set_optimizer("default", lr=1e-3, **named)
    rows = slice(rank, None, RANKS)
    for step in range(STEPS):
        model.forward_backward(inputs=batch(step, rows), **named)
        model.step(**named)
        model.zero_grad(**named)
    return model


def main() -> None:
    kind, through_byteps, folder, out = sys.argv[1:]
    install()
    import torch

    rank = int(os.environ["RANK"])
    model = train(kind, through_byteps == "1", folder, rank)
    (part,) = model.strategy.unwrap_model(model.model)
    state = {name: p.detach().clone() for name, p in part.named_parameters() if p.requires_grad}
    torch.save(state, Path(out) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
