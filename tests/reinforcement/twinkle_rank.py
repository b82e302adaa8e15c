"""A rank that trains by Twinkle, through BytePS or all-reduce: ``KIND 0|1 MODEL OUT``.

KIND is ``whole`` or ``lora``. The folder OUT gets what each rank trained.
"""

from __future__ import annotations

import os
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
    te_layers.install()
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
