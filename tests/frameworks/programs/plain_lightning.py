"""A script for Lightning without BytePS code: torchrun ... SCRIPT ddp|hsdp OUT."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.programs.saved import save, values

STEPS = 4
HOST_RANKS = int(os.environ["LOCAL_WORLD_SIZE"])
HOSTS = int(os.environ["WORLD_SIZE"]) // HOST_RANKS


class Model(lightning.LightningModule):
    """Two layers that learn the identity."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        self.sharded = sharded

    def configure_model(self) -> None:
        """Shard parameters inside each host (HSDP). Lightning calls this more than once."""
        if not self.sharded or isinstance(self.net[0].weight, torch.distributed.tensor.DTensor):
            return
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (HOSTS, HOST_RANKS), mesh_dim_names=names)
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Compute the loss of a batch."""
        (given,) = batch
        return (self.net(given) - given).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create a plain optimizer."""
        return torch.optim.SGD(self.parameters(), 0.5)


class Remember(lightning.Callback):
    """Stores the parameters before the first step."""

    before: list[torch.Tensor]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = values(pl_module.parameters())


def main() -> None:
    kind, out = sys.argv[1:]
    torch.manual_seed(11)
    data = DataLoader(TensorDataset(torch.randn(4 * 8 * STEPS, 64)), batch_size=8)
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "hsdp": lambda: ModelParallelStrategy(
            data_parallel_size=HOSTS * HOST_RANKS, tensor_parallel_size=1
        ),
    }
    remember = Remember()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=HOST_RANKS,
        num_nodes=HOSTS,
        strategy=strategies[kind](),
        max_steps=STEPS,
        callbacks=[remember],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(sharded=kind == "hsdp")
    trainer.fit(model, data)
    save(remember.before, values(model.parameters()), out, STEPS)


if __name__ == "__main__":
    main()
