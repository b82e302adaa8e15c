"""A script for DeepSpeed's ZeRO without BytePS code: torchrun ... SCRIPT STAGE OUT."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.programs.saved import save, values

STEPS = 4


def main() -> None:
    stage, out = sys.argv[1:]
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    before = values(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.5),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": int(stage)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        given = torch.randn(8, 64)
        engine.backward((engine(given) - given).square().mean())
        engine.step()
    save(before, values(engine.module.parameters()), out, STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
