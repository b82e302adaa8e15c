"""A rank of verl's Megatron engine in a layout, without a rollout: ``LAYOUT MODEL OUT``.

The same steps run through all-reduce, through BytePS, and with the server optimizer. With BytePS
another engine also continues from a checkpoint. The folder OUT gets the parameters and checkpoints
of each run.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_byteps_rl import engines
from scripts.trainkit.rl_settings import BYTEPS

STEPS = 4
SAVED = 2
"""Step after which a checkpoint is saved."""
ROWS = 8
"""Samples of a step on each data-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallelism of verl's engine over the ranks."""

    ranks: int = 2
    model: dict[str, int] = field(default_factory=dict)
    """Arguments of ``rl_task.make_model``."""
    cut: dict[str, Any] = field(default_factory=dict)
    """Parallel sizes of verl's engine."""
    lora: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "dp2": Layout(),
    "dp2-lora": Layout(
        lora={
            "type": "lora",
            "rank": 8,
            "alpha": 32,
            "dropout": 0.0,
            "merge": False,
            "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        }
    ),
    "tp2-sp-dp2": Layout(ranks=4, cut={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-vpp2-dp2": Layout(
        ranks=4,
        model={"layers": 4},
        cut={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "cp2": Layout(cut={"context_parallel_size": 2}),
    "ep2": Layout(model={"experts": 4}, cut={"expert_model_parallel_size": 2}),
}
BACKENDS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "byteps": {**BYTEPS},
    "servers": {**BYTEPS, "dpu_optimizer": True},
}


def make_engine(layout: Layout, model: str, ddp: dict[str, Any]) -> Any:
    """Create verl's engine with its model; `ddp` determines the reduction of gradients."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=model, use_remove_padding=False, lora=layout.lora),
        engine_config=McoreEngineConfig(
            override_ddp_config=dict(ddp),
            use_remove_padding=False,
            dist_ckpt_optim_fully_reshardable=True,
            **({"sequence_parallel": False} | layout.cut),
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=1e-3, lr_decay_style="constant", total_training_steps=STEPS
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(step: int, engine: Any) -> Any:
    """Make random sequences of a step, different on each data-parallel rank."""
    import torch
    from verl.utils import tensordict_utils as tu

    number = engine.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(step * 10 + number)
    lengths = torch.randint(6, 12, (ROWS,), generator=generator).tolist()
    ids = [torch.randint(2, 14, (length,), generator=generator) for length in lengths]
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return tu.get_tensordict(
        {
            "input_ids": nested(ids),
            "loss_mask": nested([torch.ones_like(sequence) for sequence in ids]),
        },
        {
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": ROWS // 2,
            "temperature": 1.0,
            "global_batch_size": ROWS * engine.get_data_parallel_size(),
        },
    )


def train(engine: Any, steps: range) -> None:
    from verl.workers.utils.losses import sft_loss

    for step in steps:
        with engine.train_mode():
            engine.train_batch(batch(step, engine), functools.partial(sft_loss, None))
            engine.lr_scheduler_step()


def state(engine: Any) -> dict[str, Any]:
    """Get the trained parameters of all parts of the model."""
    return {
        f"{part}.{name}": parameter.detach().clone()
        for part, chunk in enumerate(engine.module)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def main() -> None:
    name, model, out = sys.argv[1:]
    engines.prepare()
    import torch

    layout, rank = LAYOUTS[name], torch.distributed.get_rank()
    for backend, ddp in BACKENDS.items():
        engine = make_engine(layout, model, ddp)
        first, saved = state(engine), f"{out}/{backend}-saved"
        train(engine, range(SAVED))
        engine.save_checkpoint(saved)
        train(engine, range(SAVED, STEPS))
        seen = {"first": first, "last": state(engine)}
        resumed = make_engine(layout, model, ddp)
        resumed.load_checkpoint(saved)
        train(resumed, range(SAVED, STEPS))
        seen["resumed"] = state(resumed)
        torch.save(seen, Path(out) / f"{backend}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
