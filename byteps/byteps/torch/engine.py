"""The engine as Python sees it: torch tensors in, handles and sums out.

`byteps.torch` re-exports what users need from here. Each part has a file of its own: `session`
joins and leaves a job, `ranks` knows groups, `declarations` what servers are told of a tensor,
`operations` starts and awaits sums and updates, `in_flight` keeps their tensors alive.
"""

from __future__ import annotations

from byteps.torch.declarations import (
    TensorDeclaration,
    bytes_per_server,
    declare,
    link_gbps,
    partition_bytes,
    partition_count,
)
from byteps.torch.operations import poll, start, synchronize
from byteps.torch.ranks import Group, ranks_of
from byteps.torch.session import (
    BytePSError,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    resume,
    shutdown,
    size,
    suspend,
)
from byteps.torch.tensors import DTYPES

__all__ = [
    "DTYPES",
    "BytePSError",
    "Group",
    "TensorDeclaration",
    "bytes_per_server",
    "declare",
    "init",
    "is_initialized",
    "link_gbps",
    "local_rank",
    "local_size",
    "partition_bytes",
    "partition_count",
    "poll",
    "rank",
    "ranks_of",
    "resume",
    "shutdown",
    "size",
    "start",
    "suspend",
    "synchronize",
]
