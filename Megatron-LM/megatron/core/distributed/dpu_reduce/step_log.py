# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Writes the cost of reductions per step to the TensorBoard and wandb writers of
``megatron.training``.

One rank writes its own measurements: the rank that writes Megatron's own values.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from . import bytepslib

_meter: Any = None
_last_iteration = 0


def begin(args: Namespace) -> None:
    """Start counting when training begins, because earlier reductions belong to no step."""
    global _meter, _last_iteration
    _meter = bytepslib.step_metrics.StepMeter()
    _meter.read()
    _last_iteration = getattr(args, "iteration", 0)


def write(args: Namespace, iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write the metrics of the steps since the last call.

    Args:
        args: Megatron's arguments.
        iteration: number of the last iteration.
        writer: TensorBoard's writer.
        wandb_writer: wandb's module, or None.
    """
    global _last_iteration
    if _meter is None:
        begin(args)
    steps, _last_iteration = iteration - _last_iteration, iteration
    metrics = _meter.read(max(1, steps))
    for name, value in metrics.items():
        writer.add_scalar(name, value, iteration)
    if wandb_writer:
        wandb_writer.log(metrics, iteration)
