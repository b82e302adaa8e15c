"""Lets the CPU replace the GPUs that PyTorch's tests of DDP require.

These tests put models on ``cuda:RANK`` to get several devices. Their checks of sums are valid on a
CPU over gloo as well. The results are compared with gloo's results on the same replacements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


def prepare() -> None:
    """Replace the checks that skip tests without GPUs. Must run before the suite is imported."""
    os.environ["MEGATRON_CPU"] = "1"
    import torch.distributed.optim  # it compiles classes from their source
    from megatron.training import cpu_platform
    from torch.testing._internal import common_distributed as common

    def always(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
        return lambda function: function

    common.skip_if_lt_x_gpu = common.require_n_gpus_for_nccl_backend = always
    common.skip_if_no_gpu = lambda function: function
    common.init_multigpu_helper = _device_each
    cpu_platform.install()
    torch.cuda.set_device = lambda device: None
    for owner, name, replacement in (
        (torch, "Stream", torch.cuda.Stream),
        (torch, "Event", torch.cuda.Event),
        (torch.accelerator, "current_stream", torch.cuda.current_stream),
    ):
        setattr(owner, name, replacement)
    made = DistributedDataParallel.__init__

    def make(self: Any, module: Any, *placed: Any, **named: Any) -> None:
        # A model on the CPU must not have device arguments.
        made(self, module, **{k: v for k, v in named.items() if k not in _DEVICES})

    setattr(DistributedDataParallel, "__init__", make)  # noqa: B010 # mypy refuses a plain one


def _device_each(world_size: int, backend: str) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}


_DEVICES = ("device_ids", "output_device")
_LARGE, _SMALL = 1000, 32
"""Width of pictures that the suite convolves, in pixels. A core takes minutes for large
pictures."""


class OnCpu(TorchFunctionMode):
    """Replaces every device by the CPU, both numbers and ``cuda:0``."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if getattr(function, "__name__", "") == "ones" and args[2:] == (_LARGE, _LARGE):
            args = (*args[:2], _SMALL, _SMALL)
        if "device" in named:
            named = {**named, "device": torch.device("cpu")}
        if function is torch.Tensor.to:
            args = (args[0], *(_cpu_of(argument) for argument in args[1:]))
        return function(*args, **named)


def _cpu_of(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or type(value) is int
    named = isinstance(value, str) and value.startswith("cuda")
    return torch.device("cpu") if is_device or named else value
