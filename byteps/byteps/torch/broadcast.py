"""An optimizer's whole state from one rank to all."""

from __future__ import annotations

import io

import torch
from byteps.torch import ops

__all__ = ["broadcast_optimizer_state"]


def _sum(tensor: torch.Tensor, name: str) -> torch.Tensor:
    ops.push_pull_inplace(tensor, average=False, name=name)
    return tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Give every rank the state and the options that the optimizer has on `root_rank`.

    Blocks until all ranks have called it. The state travels serialised, as a sum in which only
    the root's part is not zero, so that whatever an optimizer keeps arrives: tensors of any dtype,
    numbers, None. Tensors arrive on the device of the parameter that they belong to. The ranks'
    parameters must be the same in number and order.

    Raises:
        ValueError: no rank is `root_rank`.
        BytePSError: the job failed.
    """
    if not 0 <= root_rank < ops.size():
        raise ValueError(f"root_rank is {root_rank}, and there are {ops.size()} ranks")
    content = b""
    if ops.rank() == root_rank:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        content = buffer.getvalue()
    name = f"{prefix}optimizer_state.{root_rank}"
    length = int(_sum(torch.tensor([len(content)], dtype=torch.int64), f"{name}.length"))
    # The name has the length: a name keeps its size, and states may grow.
    everyone = torch.zeros(length, dtype=torch.uint8)
    if content:
        everyone.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    received = _sum(everyone, f"{name}.{length}")
    if ops.rank() != root_rank:
        state = torch.load(io.BytesIO(received.numpy().tobytes()), weights_only=True)
        optimizer.load_state_dict(state)
