"""What the ranks of tests of Megatron-FSDP run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron.rank_programs import _on_core, _pushed_bytes

STEPS = 3


def hybrid(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a model with two replicas of two ranks each, as this rank holds them in each
    step, and how many bytes it pushed."""

    def body() -> dict[str, Any]:
        # Of 256 parameters each, which need no padding: that is not initialized.
        layers = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
        module = torch.nn.Sequential(*layers)
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            num_distributed_optimizer_instances=2,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=False,  # gloo cannot scale and sum in one
            **config,
        )
        transformer = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
        with mock.patch("torch.cuda.current_device", lambda: 0):  # it asks for a number
            model = FullyShardedDataParallel(
                transformer,
                ddp_config,
                module,
                fsdp_unit_modules=[torch.nn.Linear],
                device=torch.device("cpu"),
            )
        steps: list[list[torch.Tensor]] = []
        for step in range(STEPS):
            model.zero_grad_buffer()
            inputs = torch.sin(torch.arange(64.0).view(4, 16) ** 2 + step + dist.get_rank())
            with model.no_sync():  # replicas reduce after the last micro-batch
                model(inputs).square().sum().backward()
            model(inputs + 1.0).square().sum().backward()
            model.finish_grad_sync()
            groups = model.param_and_grad_buffer.parameter_groups
            steps.append([group.main_grad_buffer.data.clone() for group in groups])
        return {"gradients": steps, "pushed": _pushed_bytes()}

    return _on_core(body, num_distributed_optimizer_instances=2)
