"""The engine as Python sees it: tensors in, handles and sums out, and what servers are told.

`declare` and `release` are the two ends of a name's life; `Names` is the names of one object, which
gives them back with it: `release(names, *, group=None)`, `Names(*names, group=None)`,
`.take(*names)` and `.release()` (byteps/torch/names.py).

`byteps.torch` re-exports what users need from here. `session` joins and leaves a job, `operations`
knows groups, and starts and awaits sums and updates, `in_flight` keeps their tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What the members of a group agree on before they sum a tensor: see `declare`."""

    name: str
    """As push_pull has it."""
    dtype: torch.dtype
    """Of the tensor."""
    numel: int
    """Its elements."""
    average: bool = True
    group: Group = None
    """The ranks that sum, or their ProcessGroup; None for all workers."""
    placement: int | None = None
    wire_dtype: Wire | None = None
    """As push_pull has it."""
    device: torch.device | str = "cpu"
    """Where the tensor is; for one on a GPU, pinned memory is reserved now."""
    piece_of: int = 0
    """Elements of the tensor that this one is a piece of, the same on all members: it is cut into
    partitions as long as that one's. 0: it is no piece."""
    in_order: bool = False
    """Servers add in the order of ranks, not of arrival: a sum repeated has the same bits."""


def spec_of(tensor: TensorDeclaration) -> Spec:
    """The arguments of c_lib.declare."""
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
    """Tell the servers of many tensors by one message to each; return when all have answered.

    A name that is not declared declares itself at its first push_pull, which then waits for the
    servers. All members of a group may declare its tensors, in any order and in lists of their own.

    Raises:
        BytePSError: a server does not answer, or members disagree about a tensor.
        ValueError: a tensor cannot be summed so, or its name was declared otherwise.
    """
    session.launched()
    c_lib.declare([spec_of(tensor) for tensor in tensors])


def link_gbps() -> float:
    """Gbit/s each way of the slowest worker's NIC; 0 where one of them is not known."""
    session.launched()
    return c_lib.link_gbps()


def server_hosts() -> list[str]:
    """The address of each server, in the order of their ranks; empty where it is not known."""
    session.launched()
    return c_lib.server_hosts()


def partition_bytes(nbytes: int, *, piece_of: int = 0, wire_dtype: Wire = torch.float32) -> int:
    """Bytes of the partitions (the last may have fewer) of a tensor of `nbytes` bytes, which may be
    a piece of one of `piece_of` bytes. `wire_dtype`: in which it travels."""
    session.launched()
    form = wire.of(torch.float32, wire_dtype)
    return c_lib.partition_bytes(form.engine_name, nbytes, piece_of)


def partition_count(nbytes: int, *, piece_of: int = 0, wire_dtype: Wire = torch.float32) -> int:
    """How many partitions such a tensor has."""
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
    """Bytes that each server, in the order of their ranks, gets of a tensor of `nbytes` bytes.

    The other arguments are those that it is summed with, but for `piece_of`, which is in bytes.

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
