"""Rank program that trains with buffers that leave the device between steps.

A trainer that generates between its steps gives the device memory to the generation. It copies the
parameters to pinned host memory, frees the storages of parameters and gradients, moves the
optimizer's state, and restores everything before the next step.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import cpu_platform

STEPS = 4


def train(folder: Path, *, width: int, away: bool, through_byteps: bool) -> dict[str, Any]:
    """Train four layers in bf16 for a few steps, with fp32 gradients and the distributed optimizer.

    Args:
        width: Width of each layer.
        away: Move everything off the device between steps.

    Returns:
        ``checksums`` of this rank's parameters after each step. ``bytes`` by phase: the peak of
        allocated device memory, minus the memory before the model (0 on a CPU). ``held``: the bytes
        of the buffers' storages.
    """
    device = start()
    before = _allocated(device)
    module, ddp, optimizer = model_of(width, device, through_byteps=through_byteps)
    seen: dict[str, Any] = {"checksums": [], "bytes": {}, "held": {}}
    for step in range(STEPS):
        _reset_peak(device)
        make_step(step, width, device, ddp, optimizer)
        seen["checksums"].append(checksum(module))
        _note(seen, "step", before, device, ddp)
        if not away:
            continue
        copies = _leave(ddp, optimizer)
        _reset_peak(device)
        _note(seen, "away", before, device, ddp)
        # The generation uses the memory in between, so that the buffers return at other addresses.
        other = torch.full((width * width // (1 + step % 2),), torch.nan, device=device)
        _come_back(ddp, optimizer, copies, device)
        del other
        assert checksum(module) == seen["checksums"][-1], "the parameters are not as they were"
    from megatron.core.distributed import dpu_reduce

    dpu_reduce.shutdown()
    dist.destroy_process_group()
    return seen


def model_of(
    width: int, device: torch.device, *, through_byteps: bool
) -> tuple[torch.nn.Module, DistributedDataParallel, Any]:
    """Create four layers of this width in bf16: the module, the DDP wrapper, and the optimizer."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(4)]
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    module = torch.nn.Sequential(*layers).to(device)
    module.config = config
    own = {"use_dpu_reduce": True, "dpu_reduce_backend": "flat"} if through_byteps else {}
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            grad_reduce_in_fp32=True,
            bucket_size=2 * width * width,
            **own,
        ),
        module,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0
        ),
        [ddp],
    )
    return module, ddp, optimizer


def make_step(
    step: int, width: int, device: torch.device, ddp: DistributedDataParallel, optimizer: Any
) -> None:
    """Train a step on values that differ by step and rank."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    x = torch.arange(8 * width, device=device).view(8, width).float()
    ddp(torch.sin(x + 100 * step + dist.get_rank()).bfloat16()).float().square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()


def start() -> torch.device:
    """Join the process group and get the device of this rank."""
    if cpu_platform.is_wanted():
        cpu_platform.install()
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    parallel_state.initialize_model_parallel()
    # The first matrix product allocates workspace for good, which is not part of the model.
    first = torch.nn.Linear(8, 8, dtype=torch.bfloat16, device=device)
    first(torch.ones(8, 8, dtype=torch.bfloat16, device=device)).sum().backward()
    return device


def _storages(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    return [tensor for b in ddp.buffers for tensor in (b.param_data, b.grad_data)]


def _leave(ddp: DistributedDataParallel, optimizer: Any) -> list[torch.Tensor]:
    """Free the device memory and return the parameters' copies on the host."""
    copies = []
    for buffer in ddp.buffers:
        copy = torch.empty(buffer.param_data.shape, dtype=buffer.param_data.dtype, pin_memory=True)
        copy.copy_(buffer.param_data)
        copies.append(copy)
    for tensor in _storages(ddp):
        tensor.untyped_storage().resize_(0)
    _move_optimizer(optimizer, torch.device("cpu"))
    return copies


def _come_back(
    ddp: DistributedDataParallel, optimizer: Any, copies: list[torch.Tensor], device: torch.device
) -> None:
    for tensor in _storages(ddp):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    for buffer, copy in zip(ddp.buffers, copies, strict=True):
        buffer.param_data.copy_(copy)
        buffer.grad_data.zero_()
    _move_optimizer(optimizer, device)


def _move_optimizer(optimizer: Any, device: torch.device) -> None:
    """Move the fp32 parameters and the moments."""
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.to(device)
        for state in chained.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    state[name] = value.to(device)


def checksum(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        # A copy, because a tensor cannot be freed once NumPy has used it.
        data = parameter.detach().to("cpu", copy=True).view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def _note(seen: dict[str, Any], phase: str, before: int, device: torch.device, ddp: Any) -> None:
    held = sum(tensor.untyped_storage().nbytes() for tensor in _storages(ddp))
    seen["held"][phase] = max(held, seen["held"].get(phase, 0))
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    seen["bytes"][phase] = max(peak, seen["bytes"].get(phase, 0))
