"""Trains by Twinkle, through BytePS or all-reduce: ``twinkle_rank.py MODE KIND 0|1 MODEL OUT``.

MODE is ``local``, a rank that torchrun started, or ``ray``, the driver. KIND is ``whole`` or
``lora``. OUT gets what was trained: of each rank, or what Twinkle saves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.reinforcement import te_layers

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


def initialize(mode: str) -> Any:
    """Twinkle's mesh of all ranks."""
    import twinkle
    from twinkle import DeviceGroup, DeviceMesh

    mesh = DeviceMesh.from_sizes(world_size=RANKS, dp_size=RANKS)
    if mode == "local":
        twinkle.initialize(mode="local", global_device_mesh=mesh)
        return mesh
    import ray

    ray.init(
        address="local",
        num_gpus=RANKS,
        num_cpus=RANKS,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        runtime_env={"worker_process_setup_hook": "tests.reinforcement.te_layers.install"},
    )
    group = DeviceGroup(name="model", ranks=RANKS, device_type="GPU")
    twinkle.initialize(
        mode="ray",
        nproc_per_node=RANKS,
        groups=[group],
        global_device_mesh=mesh,
        lazy_collect=False,
    )
    return mesh


def train(mode: str, kind: str, through_byteps: bool, folder: str, mesh: Any, rank: int) -> Any:
    """A model that has made some steps."""
    from peft import LoraConfig
    from twinkle.model import MegatronModel

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
        **({"remote_group": "model"} if mode == "ray" else {}),
    )
    named = {}
    if kind == "lora":
        named = {"adapter_name": "one"}
        model.add_adapter_to_model(
            "one", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        )
    model.set_optimizer("default", lr=1e-3, **named)
    rows = slice(None) if mode == "ray" else slice(rank, None, RANKS)
    for step in range(STEPS):
        model.forward_backward(inputs=batch(step, rows), **named)
        model.step(**named)
        model.zero_grad(**named)
    return model


def main() -> None:
    mode, kind, through_byteps, folder, out = sys.argv[1:]
    te_layers.install()
    import os

    import torch

    rank = int(os.environ.get("RANK", "0"))
    model = train(mode, kind, through_byteps == "1", folder, initialize(mode), rank)
    if mode == "ray":
        model.save(name="trained", output_dir=out)
        return
    (part,) = model.strategy.unwrap_model(model.model)
    state = {name: p.detach().clone() for name, p in part.named_parameters() if p.requires_grad}
    torch.save(state, Path(out) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
