"""A rank that trains with Twinkle, through BytePS or all-reduce: ``ROW 0|1 MODEL OUT``.

ROW is a `Row` as JSON. Under Ray this process is the row's driver. The folder OUT gets the trained
model as HF files and, except under Ray, the parameters of each rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_byteps_rl import twinkle_cpu

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
    vpp: int = 1
    """Number of model parts on each pipeline rank."""
    cp: int = 1
    mode: str = "local"
    """Twinkle's mode: ``local`` under torchrun, or ``ray``."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def adapters(self) -> list[str]:
        return {"whole": [""], "lora": ["one"], "tenants": ["one", "two"]}[self.kind]

    def json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in ("dp", "tp", "pp", "vpp", "cp")]
        layout = " ".join(f"{name}{size}" for name, size in sizes if size > 1)
        return f"{self.kind} {layout} {self.mode}"


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

    sizes = {f"{name}_size": getattr(row, name) for name in ("dp", "tp", "pp", "cp")}
    if row.vpp > 1:  # Twinkle takes a size of 1 for another feature.
        sizes["vpp_size"] = row.vpp
    mesh = DeviceMesh.from_sizes(world_size=row.ranks, **sizes)
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
            "worker_process_setup_hook": "megatron_byteps_rl.twinkle_cpu.install",
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
        # All ranks are on a single host, so by default nothing would go to servers.
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
            # A pipeline whose ranks have several parts needs as many micro-batches as ranks.
            result = model.forward_backward(inputs=inputs, micro_batch_size=1, **named(adapter))
            model.step(**named(adapter))
            model.zero_grad(**named(adapter))
            yield float((result() if callable(result) else result)["loss"])


def main() -> None:
    row, through_byteps, folder = Row(**json.loads(sys.argv[1])), sys.argv[2] == "1", sys.argv[3]
    out = Path(sys.argv[4])
    twinkle_cpu.install()
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
