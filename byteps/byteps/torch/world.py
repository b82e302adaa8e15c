"""All workers and servers of the job."""

from __future__ import annotations

import torch
from byteps.torch import declarations, operations, session

__all__ = ["barrier", "num_servers"]


def num_servers() -> int:
    """Servers of the job. Raises BytePSError where this process is in none."""
    session.launched()
    return len(declarations.bytes_per_server(1, name="count"))


def barrier() -> None:
    """Block until all workers have called it.

    Raises:
        BytePSError: the job failed, or one did not come within BYTEPS_OP_TIMEOUT_S.
    """
    one = torch.ones(1, dtype=torch.int32)
    handle = operations.start(
        one, one, average=False, name="byteps/barrier", priority=0, group=None, placement=None
    )
    operations.synchronize(handle)
