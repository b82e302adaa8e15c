# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""An optimizer on the servers that replicas share: who begins it, and what one that joins takes.

Replica 0 gives the servers what they begin with. One that joins takes the parameters from them, and
no moments from anybody; from another replica it takes the number of the last step, and how many
before it were clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, replicas

if TYPE_CHECKING:
    from .server_optimizer import ServerOptimizer


def demand_loaded() -> None:
    """This rank has given the servers what they begin with, if it is one that does. All ranks of
    all replicas call this, but of one that comes to a job whose servers have a state.

    Raises:
        byteps.torch.BytePSError: replica 0 was lost before it had given all of that.
    """
    if replicas.count() == 1 or bytepslib.members.is_late():
        return
    came = torch.zeros(replicas.count(), dtype=torch.float64)
    came[replicas.number()] = 1
    if not replicas.sum_(came, "loaded", always=True)[0]:
        raise bytepslib.byteps.BytePSError(
            "--dpu-optimizer: replica 0 was lost before it had given the servers the parameters "
            "and the optimizer's state: start the job again"
        )


def kept_by_servers(optimizers: Iterable[Any]) -> Iterator[ServerOptimizer]:
    """Of these optimizers those whose state servers have."""
    for one in optimizers:
        if hasattr(one, "facts_of_steps"):
            yield one
