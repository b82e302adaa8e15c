"""Runs pretrain_dpu_gpt.py with writers of TensorBoard and wandb that print the values they get."""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class SummaryWriter(MagicMock):
    """Stands in for TensorBoard's writer, which the test environment lacks."""

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        print(f"tensorboard {step} {name} {float(value)}", flush=True)


def log(values: dict[str, Any], step: int) -> None:
    """Stands in for wandb.log."""
    for name, value in values.items():
        print(f"wandb {step} {name} {float(value)}", flush=True)


tensorboard: Any = ModuleType("torch.utils.tensorboard")
tensorboard.SummaryWriter = SummaryWriter
wandb = MagicMock()
wandb.log.side_effect = log
sys.modules |= {"torch.utils.tensorboard": tensorboard, "wandb": wandb}
runpy.run_path(os.environ["TRAINED_PROGRAM"], run_name="__main__")
