"""A rank that trains with Twinkle, through BytePS or all-reduce: ``ROW 0|1 MODEL OUT``.

ROW is a `Row` as JSON; under Ray this is its driver. The folder OUT gets the trained model as HF
files and, except under Ray, the parameters of each rank. Twinkle builds its models from Transformer
Engine's layers, and these do not run on a CPU: here they are replaced by plain torch.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

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
    """A linear layer with the arguments of Megatron's wrappers, split over tensor-parallel ranks.

    `parallel_mode` selects the split. Returns values, and the bias if it has to be added later.
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
            # Megatron marks dense parameters like this: all data-parallel ranks sum them.
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


def norm(config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:
    return nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


def recompute(forward: Any, distribute: Any, tracker: Any, group: Any, *args: Any) -> Any:
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
    """Make this process ready to train with Twinkle on a CPU. Must be called first."""
    # Twinkle imports vllm if it is installed, and this takes half a minute per rank.
    sys.modules["vllm"] = None  # type: ignore[assignment]
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
        # A class for each, because LoRA checks the class of a layer.
        "TEColumnParallelLinear": ColumnLinear,
        "TERowParallelLinear": RowLinear,
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
        # isinstance() is called with these.
        module.Float8BlockwiseQTensor = module.Float8BlockQuantizer = type("Absent", (), {})
        sys.modules[name] = module
    # Twinkle does not support CPUs: its nearest platform is used with gloo.
    from twinkle import DeviceMesh
    from twinkle.utils.platforms.gpu import GPU

    GPU.device_backend = staticmethod(lambda platform=None: "gloo")
    make = DeviceMesh.create_process_group

    def create_process_group(mesh: Any, dims: Any) -> Any:
        # Twinkle makes its data-parallel groups concurrently and under one name, so that two groups
        # meet in the store and hang. With local synchronization the name contains the ranks.
        new_group = partial(torch.distributed.new_group, use_local_synchronization=True)
        with patch.object(torch.distributed, "new_group", new_group):
            return make(mesh, dims)

    DeviceMesh.create_process_group = create_process_group


ACTORS = "actors"
"""Twinkle's name of the ranks under Ray."""
STEPS = 3
TOKENS = 24
ROWS = 4
"""Samples of a step, on all data-parallel ranks together."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Kind of training, and parallelism."""

    kind: str = "whole"
    """``whole``: all parameters. ``lora``: an adapter. ``tenants``: two adapters of one base model,
    interleaved."""
    dp: int = 2
    tp: int = 1
    pp: int = 1
    mode: str = "local"
    """Twinkle's mode: ``local`` under torchrun, or ``ray``."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def adapters(self) -> list[str]:
        return {"whole": [""], "lora": ["one"], "tenants": ["one", "two"]}[self.kind]

    def json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"{self.kind} dp{self.dp} tp{self.tp} pp{self.pp} {self.mode}"


def batch(step: int, rows: slice) -> list[dict[str, Any]]:
    """Make random samples of a step, in Twinkle's form."""
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


def initialize(row: Row) -> Any:
    """Create Twinkle's mesh of the ranks."""
    import twinkle
    from twinkle import DeviceGroup, DeviceMesh

    mesh = DeviceMesh.from_sizes(
        world_size=row.ranks, dp_size=row.dp, tp_size=row.tp, pp_size=row.pp
    )
    if row.mode == "local":
        twinkle.initialize(mode="local", global_device_mesh=mesh)
        return mesh
    start_ray(row)
    twinkle.initialize(
        mode="ray",
        nproc_per_node=row.ranks,
        groups=[DeviceGroup(name=ACTORS, ranks=row.ranks, device_type="GPU")],
        global_device_mesh=mesh,
        lazy_collect=False,
    )
    return mesh


def start_ray(row: Row) -> None:
    """Start a Ray for this process alone, which assumes a GPU for each rank."""
    import ray

    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_gpus=row.ranks,
        num_cpus=2 * row.ranks,
        include_dashboard=False,
        object_store_memory=200 << 20,
        _temp_dir=os.environ["RAY_FOLDER"],
        runtime_env={
            "worker_process_setup_hook": "tests.reinforcement.twinkle_rank.install",
            "env_vars": {
                name: os.environ[name]
                for name in ("PYTHONPATH", "MODELSCOPE_OFFLINE", "OMP_NUM_THREADS")
            },
        },
    )


def named(adapter: str) -> dict[str, Any]:
    return {"adapter_name": adapter} if adapter else {}


def build(row: Row, through_byteps: bool, folder: str, mesh: Any) -> Any:
    """Create the model, with an optimizer for each adapter."""
    from peft import LoraConfig
    from twinkle.model import MegatronModel, MultiLoraMegatronModel

    fusions = ("bias_activation", "masked_softmax", "gradient_accumulation", "apply_rope")
    settings: dict[str, Any] = {f"{name}_fusion": False for name in (*fusions, "bias_dropout")}
    if row.kind == "tenants":
        make, settings = MultiLoraMegatronModel, {**settings, "max_loras": 2, "max_r": 8}
    else:
        make, settings = MegatronModel, {**settings, "use_distributed_optimizer": False}
    if row.mode == "ray":
        settings["remote_group"] = ACTORS
    model = make(
        folder,
        device_mesh=mesh,
        # A single host: by default nothing would go to servers.
        ddp_config=(
            {"use_dpu_reduce": True, "dpu_reduce_backend": "flat"} if through_byteps else {}
        ),
        mixed_precision="bf16",
        persist_layer_norm=False,
        **settings,
    )
    for number, adapter in enumerate(row.adapters):
        if adapter:
            config = LoraConfig(r=4 + 4 * number, lora_alpha=8, target_modules="all-linear")
            model.add_adapter_to_model(adapter, config)
        model.set_optimizer("default", lr=1e-3, **named(adapter))
    return model


def losses(row: Row, model: Any, rows: slice) -> Iterator[float]:
    """Train each adapter on samples of its own, and yield the losses."""
    for step in range(STEPS):
        for number, adapter in enumerate(row.adapters):
            inputs = batch(step + 100 * number, rows)
            result = model.forward_backward(inputs=inputs, **named(adapter))
            model.step(**named(adapter))
            model.zero_grad(**named(adapter))
            yield float((result() if callable(result) else result)["loss"])


def main() -> None:
    row, through_byteps, folder = Row(**json.loads(sys.argv[1])), sys.argv[2] == "1", sys.argv[3]
    out = Path(sys.argv[4])
    install()
    mesh = initialize(row)
    model = build(row, through_byteps, folder, mesh)
    # Ray's driver passes all samples, and Twinkle distributes them.
    rows = slice(None) if row.mode == "ray" else slice(mesh.data_rank, None, row.dp)
    print("losses", list(losses(row, model, rows)), flush=True)
    for adapter in row.adapters:
        model.save(name=adapter or "whole", output_dir=str(out), **named(adapter))
    if row.mode == "ray":
        return
    parts = model.strategy.unwrap_model(model.model)
    state = {
        name: parameter.detach().clone()
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    }
    torch.save(state, out / f"{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
