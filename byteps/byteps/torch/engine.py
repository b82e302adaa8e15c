"""The engine's interface in Python: declarations of tensors, and queries of their placement.

`declare` begins a name's life, `release` ends it. `Names` owns the names of an object and releases
them with it (byteps/torch/names.py).

`byteps.torch` re-exports what users need from here. `session` joins and leaves a job. `operations`
handles groups, and starts and awaits sums and updates. `in_flight` keeps their tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import byteps.distribution  # noqa: F401  Before c_lib: it may be another distribution's.
import torch
from byteps.torch import c_lib, operations, session, wire
from byteps.torch.names import Names, release
from byteps.torch.operations import Group, engine_ranks, poll, ranks_of, start, synchronize
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
from byteps.torch.wire import DTYPES, Spec, Wire, device_number

__all__ = [
    "DTYPES",
    "BytePSError",
    "Group",
    "Names",
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
    "release",
    "resume",
    "server_hosts",
    "shutdown",
    "size",
    "start",
    "suspend",
    "synchronize",
]


@dataclass(frozen=True, kw_only=True)
class TensorDeclaration:
    """Properties of a tensor on which all members of a group agree before they sum it: see
    `declare`."""

    name: str
    """Name with which `push_pull` is called."""
    dtype: torch.dtype
    """Element type of the tensor."""
    numel: int
    """Number of elements."""
    average: bool = True
    group: Group = None
    """The ranks that sum, or their ProcessGroup; None for all workers."""
    placement: int | None = None
    wire_dtype: Wire | None = None
    """The `wire_dtype` with which `push_pull` is called."""
    device: torch.device | str = "cpu"
    """Device of the tensor. For a GPU, the declaration reserves pinned memory."""
    piece_of: int = 0
    """If this tensor is a piece of another one: number of elements of the whole tensor, the same on
    all members. Partitions are then as long as those of the whole tensor. 0: this is no piece."""
    in_order: bool = False
    """Whether servers add in the order of ranks, not of arrival. A repeated sum then has the same
    bits."""


def spec_of(tensor: TensorDeclaration) -> Spec:
    """Return the arguments of c_lib.declare."""
    if not tensor.name:
        raise ValueError("a tensor needs a name, the same on all workers")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.name!r} is {tensor.dtype}, which cannot be summed")
    form = wire.of(tensor.dtype, tensor.wire_dtype)
    if tensor.numel < 1:
        raise ValueError(f"{tensor.name!r} has {tensor.numel} elements: nothing to sum")
    if tensor.placement is not None and tensor.placement < 0:
        raise ValueError(f"placement of {tensor.name!r} must not be negative")
    return operations.make_spec(
        tensor.name,
        form,
        tensor.numel,
        piece_of=tensor.piece_of,
        average=tensor.average,
        ranks=engine_ranks(tensor.group),
        placement=tensor.placement,
        device=device_number(torch.device(tensor.device)),
        in_order=tensor.in_order,
    )


def declare(tensors: Sequence[TensorDeclaration]) -> None:
    """Declare many tensors with one message per server; return when all servers have answered.

    Without this call, the first push_pull of a name declares it, which takes a round trip. The
    members of a group may declare its tensors in any order and in different lists.

    Raises:
        BytePSError: a server does not answer, or members disagree about a tensor.
        ValueError: a tensor cannot be summed as declared, or its name was declared differently.
    """
    session.launched()
    c_lib.declare([spec_of(tensor) for tensor in tensors])


def link_gbps() -> float:
    """Return the rate of the slowest worker's NIC, in Gbit/s per direction; 0 if the rate of any
    worker's NIC is unknown."""
    session.launched()
    return c_lib.link_gbps()


def server_hosts() -> list[str]:
    """Return each server's address, in the order of ranks. An unknown address is empty."""
    session.launched()
    return c_lib.server_hosts()


def partition_bytes(nbytes: int, *, piece_of: int = 0, wire_dtype: Wire = torch.float32) -> int:
    """Return the partition size, in bytes, of a tensor of `nbytes` bytes (the last partition may be
    shorter). `piece_of`: bytes of the whole tensor, if the tensor is a piece of another one.
    `wire_dtype`: type in which the tensor travels."""
    session.launched()
    form = wire.of(torch.float32, wire_dtype)
    return c_lib.partition_bytes(form.engine_name, nbytes, piece_of)


def partition_count(nbytes: int, *, piece_of: int = 0, wire_dtype: Wire = torch.float32) -> int:
    """Return the number of partitions of a tensor. The arguments are those of `partition_bytes`."""
    return -(-nbytes // partition_bytes(nbytes, piece_of=piece_of, wire_dtype=wire_dtype))


def bytes_per_server(
    nbytes: int,
    *,
    name: str,
    group: Group = None,
    placement: int | None = None,
    piece_of: int = 0,
    wire_dtype: Wire = torch.float32,
) -> list[int]:
    """Return how many bytes of a tensor of `nbytes` bytes each server gets, in the order of ranks.

    The other arguments are the same as for `push_pull`, except that `piece_of` is in bytes.

    Raises:
        BytePSError: byteps is not initialised.
        ValueError: the arguments cannot be used.
    """
    session.launched()
    return c_lib.bytes_per_server(
        name=name,
        dtype=wire.of(torch.float32, wire_dtype).engine_name,
        bytes=nbytes,
        piece_of=piece_of,
        group=engine_ranks(group),
        placement=placement,
    )
