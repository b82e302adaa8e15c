"""The ranks of a host, which sum gradients among themselves before each sends its shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from byteps.torch import nodes
from byteps.torch.node_groups import NodeGroup, on_side_stream, wait_for_side_stream
from byteps.torch.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """The ranks of this host. All of them call the methods, in one order."""

    group: NodeGroup
    local: int
    """This rank's place among them."""
    average: bool = False
    """Gradients are divided by the number of these ranks before they are added."""
    in_order: bool = False
    """See `nodes.scatter`."""

    def scatter(self, gradients: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Sum a piece of `gradients`; return this rank's shard of the sum, in them if it can be."""
        return nodes.scatter(gradients, piece, self.group, self.local, in_order=self.in_order)

    def gather(self, target: torch.Tensor, piece: Piece, shard: torch.Tensor) -> None:
        """Put the shards that the ranks have of a piece into `target`, which has its length."""
        nodes.gather(target, piece, shard, self.group)

    def of_each(self, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each rank gives, in the order of ranks; of one dimension and the same length."""
        gathered = mine.new_empty(self.group.size * mine.numel())
        with self.stream(mine):
            self.group.all_gather(gathered, mine)
        return gathered.chunk(self.group.size)

    @contextlib.contextmanager
    def stream(self, tensor: torch.Tensor, *, joins: bool = True) -> Iterator[None]:
        """Inside, work on a GPU is queued on the stream of the collectives inside the host.

        `joins`: the caller's stream then waits for it.
        """
        with torch.no_grad(), on_side_stream(tensor):
            yield
        if joins:
            wait_for_side_stream(tensor)
