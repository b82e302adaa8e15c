"""A rank that saves a Megatron checkpoint into a store and reads it: ``URL HOW``.

HOW is ``sync``, or ``async`` for writing in a separate process like ``--async-save``. In the end
the rank prints ``read RANK``.
"""

from __future__ import annotations

import sys

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training import cpu_platform

NUMBERS = 3 << 20
"""Number of fp32 values of each tensor of a rank."""
TENSORS = 2


def values(tensor: int, rank: int) -> torch.Tensor:
    """Return values that differ by tensor, rank and index."""
    return torch.arange(NUMBERS, dtype=torch.float32) * (1 + tensor) + 0.25 * rank


def state(*, whole: bool) -> dict[str, ShardedTensor]:
    """Get this rank's part; without `whole` it is zeros, to be read into."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = [values(tensor, rank) for tensor in range(TENSORS)]
    return {
        f"weight{number}": ShardedTensor.from_rank_offsets(
            f"weight{number}", weight if whole else torch.zeros_like(weight), (0, rank, world)
        )
        for number, weight in enumerate(own)
    }


def save(url: str, how: str) -> None:
    if how == "sync":
        dist_checkpointing.save(state(whole=True), url)
        return
    calls = AsyncCallsQueue(persistent=True)
    request = dist_checkpointing.save(
        state(whole=True), url, async_sharded_save=True, async_strategy="mcore"
    )
    calls.schedule_async_request(request)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()


def main() -> None:
    url, how = sys.argv[1:]
    cpu_platform.install()
    torch.distributed.init_process_group("gloo")
    MultiStorageClientFeature.enable()
    save(url, how)
    rank = torch.distributed.get_rank()
    read = dist_checkpointing.load(state(whole=False), url)
    for number in range(TENSORS):
        assert torch.equal(read[f"weight{number}"], values(number, rank)), (number, rank)
    print(f"read {rank}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
