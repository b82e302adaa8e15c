"""Ranks as a mesh, one axis for each of Megatron's kinds of group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands in each direction of the mesh."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of Megatron's groups. Ranks are numbered in its order: tensor, context, data, pipeline.

    Raises:
        ValueError: a size is less than 1.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"the mesh's size {name!r} must be 1 or more, not {size}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.context * self.pipeline

    def place(self, rank: int) -> Place:
        """Of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Place(tensor=tensor, context=context, data=data, pipeline=pipeline)

    def places(self) -> list[Place]:
        """Of all ranks, in their order."""
        return [self.place(rank) for rank in range(self.size)]
