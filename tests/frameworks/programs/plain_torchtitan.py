"""torchtitan's debug model without BytePS code: torchrun ... SCRIPT ddp|hsdp|fsdp OUT.

torchtitan's Trainer requires a GPU: ``Trainer.__init__`` calls ``device_module.set_device``, and
without an accelerator this is CUDA's (``torchtitan.tools.utils.get_device_info``); later it queries
the device memory. This script does the Trainer's work on the CPU with the same functions.
"""

from __future__ import annotations

import os
import sys

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.frameworks.programs.saved import save, values

# torchtitan's modules query the device at import, and choose CUDA if there is none.
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import build_cross_entropy_loss  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

STEPS = 3
LENGTH = 64


def main() -> None:
    kind, out = sys.argv[1:]
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "debugmodel"
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.comm.trace_buf_size = 0
    size = dist_utils.init_distributed(config.comm)
    shards = {"ddp": 1, "hsdp": int(os.environ["LOCAL_WORLD_SIZE"]), "fsdp": size}[kind]
    parallel_dims = ParallelDims(
        dp_replicate=size // shards,
        dp_shard=shards,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        etp=1,
        world_size=size,
    )
    dist_utils.set_determinism(
        parallel_dims, torch.device("cpu"), config.debug, distinct_seed_mesh_dims=["pp"]
    )
    spec = get_train_spec(config.model.name)
    model_args = spec.model_args[config.model.flavor]
    model_args.update_from_config(config)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = spec.model_cls(model_args)
    model = spec.parallelize_fn(model, parallel_dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply while it adds
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    before = values(model.parameters())
    optimizers = build_optimizers([model], config.optimizer, parallel_dims)
    loss_of = build_cross_entropy_loss(config, parallel_dims=parallel_dims)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(model_args.vocab_size, (2, LENGTH + 1))
        optimizers.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        # torchtitan makes FSDP add gradients, and divides the loss.
        (loss if kind == "ddp" else loss / size).backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), config.training.max_norm)
        optimizers.step()
    save(before, values(model.parameters()), out, STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
