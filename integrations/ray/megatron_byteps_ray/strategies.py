"""How a call is spread over a mesh of ranks, and its results are joined."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from . import batches
from .mesh import Mesh


@dataclass(frozen=True)
class Arguments:
    """Of a call."""

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def each(self, change: Callable[[Any], Any]) -> Arguments:
        """The same with every value changed."""
        named = {name: change(value) for name, value in self.named.items()}
        return Arguments(tuple(change(value) for value in self.positional), named)

    def values(self) -> list[Any]:
        return [*self.positional, *self.named.values()]


class Strategy(Protocol):
    """How a call is spread over ranks, and its results are joined."""

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        """What each rank gets, in the order of ranks.

        Raises:
            ValueError: the arguments cannot be cut so.
        """
        ...

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """What the caller gets, of what each rank returned.

        Raises:
            ValueError: the results do not fit together.
        """
        ...


class _All:
    """The same to all ranks; a list of what they return."""

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        return [arguments] * mesh.size

    def join(self, mesh: Mesh, results: Sequence[Any]) -> list[Any]:
        del mesh
        return list(results)


class _Same(_All):
    """The same to all ranks, all of which must return the same."""

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        del mesh
        for rank, result in enumerate(results):
            if not batches.equal(result, results[0]):
                raise ValueError(f"rank {rank} returned another value than rank 0")
        return results[0]


class _Data:
    """Batches, cut over the data ranks: the first axis of each argument.

    The ranks that share a copy of the model get the same. What the first of them returns counts, of
    the last stage of a pipeline; it is joined along the first axis.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        rows = {len(value) for value in map(batches.first_column, arguments.values())}
        if len(rows) > 1:
            raise ValueError(f"batches of different lengths: {sorted(rows)}")
        for total in rows:
            if total % mesh.data:
                raise ValueError(f"{total} rows cannot be cut evenly over {mesh.data} data ranks")
        return [
            arguments.each(partial(batches.part, number=place.data, of=mesh.data))
            for place in mesh.places()
        ]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        wanted = [
            rank
            for rank, place in enumerate(mesh.places())
            if place.tensor == 0 and place.context == 0 and place.pipeline == mesh.pipeline - 1
        ]
        return batches.joined([results[rank] for rank in wanted])


class _Sequence(_Data):
    """The same, and each row of a tensor or array is cut over the context ranks: its second axis.

    Megatron's order: twice as many chunks as ranks, of which each gets one from the front and its
    mirror image from the back. Results are joined along both axes.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        chunks = 2 * mesh.context if mesh.context > 1 else 1
        for value in arguments.values():
            for column in batches.columns(value):
                length = getattr(column, "shape", ())[1:2]
                if not length or length[0] % chunks:
                    raise ValueError(
                        f"each argument must have a second axis that {chunks} chunks divide: "
                        f"{type(column).__name__} of shape {tuple(getattr(column, 'shape', ()))}"
                    )
        by_data = super().cut(mesh, arguments)
        return [
            by_data[rank].each(partial(batches.chunked, number=place.context, of=mesh.context))
            for rank, place in enumerate(mesh.places())
        ]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        rows = []
        for data in range(mesh.data):
            parts = [
                results[rank]
                for rank, place in enumerate(mesh.places())
                if place.tensor == 0 and place.data == data and place.pipeline == mesh.pipeline - 1
            ]
            rows.append(batches.unchunked(parts))
        return batches.joined(rows)


class _Model:
    """Lists with an item for each rank that holds a part of the model: pipeline, then tensor.

    Every copy of the model gets the same; the first copy's results are a list in the same order.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        parts = mesh.pipeline * mesh.tensor
        for value in arguments.values():
            if not isinstance(value, Sequence) or len(value) != parts:
                raise ValueError(f"each argument must be a list with {parts} items, one a part")
        return [
            arguments.each(operator.itemgetter(place.pipeline * mesh.tensor + place.tensor))
            for place in mesh.places()
        ]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> list[Any]:
        return [
            results[rank]
            for rank, place in enumerate(mesh.places())
            if place.data == 0 and place.context == 0
        ]


_STRATEGIES: dict[str, Strategy] = {
    "all": _All(),
    "same": _Same(),
    "data": _Data(),
    "sequence": _Sequence(),
    "model": _Model(),
}


def register(name: str, strategy: Strategy) -> None:
    """Add a strategy, to be named in calls.

    Raises:
        ValueError: there is one of this name.
    """
    if name in _STRATEGIES:
        raise ValueError(f"there is a strategy {name!r} already")
    _STRATEGIES[name] = strategy


def strategy(name: str) -> Strategy:
    """The one of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _STRATEGIES:
        raise ValueError(f"no strategy {name!r}; there are: {' '.join(_STRATEGIES)}")
    return _STRATEGIES[name]
