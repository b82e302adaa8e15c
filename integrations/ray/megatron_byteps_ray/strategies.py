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
    """How a call is spread over ranks, and its results are joined.

    May have ``validate(mesh, arguments)``, which is called first and raises ValueError for what
    cannot be cut; and ``passes_whole = True`` where ``cut`` does not look at values, so that ranks
    fetch ObjectRefs themselves.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        """What each rank gets, in the order of ranks; the same object for ranks that get the same,
        which is sent once."""
        ...

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """What the caller gets, of what each rank returned.

        Raises:
            ValueError: the results do not fit together.
        """
        ...


def validate(how: Strategy, mesh: Mesh, arguments: Arguments) -> None:
    """What the strategy itself has against these arguments.

    Raises:
        ValueError: it cannot cut them.
    """
    own = getattr(how, "validate", None)
    if own is not None:
        own(mesh, arguments)


class _All:
    """The same to all ranks; a list of what they return."""

    passes_whole = True

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

    def validate(self, mesh: Mesh, arguments: Arguments) -> None:
        total = batches.rows(arguments.values())
        if total % mesh.data:
            raise ValueError(
                f"{total} rows cannot be cut evenly over {mesh.data} data ranks: pad=True repeats "
                "the last one"
            )

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        parts = [
            arguments.each(partial(batches.part, number=number, of=mesh.data))
            for number in range(mesh.data)
        ]
        return [parts[place.data] for place in mesh.places()]

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

    def validate(self, mesh: Mesh, arguments: Arguments) -> None:
        chunks = 2 * mesh.context if mesh.context > 1 else 1
        for value in arguments.values():
            for column in batches.columns(value):
                length = getattr(column, "shape", ())[1:2]
                if not length or length[0] % chunks:
                    raise ValueError(
                        f"each argument must have a second axis that {chunks} chunks divide: "
                        f"{type(column).__name__} of shape {tuple(getattr(column, 'shape', ()))}"
                    )
        super().validate(mesh, arguments)

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        places = mesh.places()
        parts = {}
        for place, own in zip(places, super().cut(mesh, arguments), strict=True):
            if (place.data, place.context) not in parts:
                chunked = partial(batches.chunked, number=place.context, of=mesh.context)
                parts[place.data, place.context] = own.each(chunked)
        return [parts[place.data, place.context] for place in places]

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

    def validate(self, mesh: Mesh, arguments: Arguments) -> None:
        parts = mesh.pipeline * mesh.tensor
        for value in arguments.values():
            if not isinstance(value, Sequence) or len(value) != parts:
                raise ValueError(f"each argument must be a list with {parts} items, one per part")

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        items = range(mesh.pipeline * mesh.tensor)
        parts = [arguments.each(operator.itemgetter(item)) for item in items]
        return [parts[place.pipeline * mesh.tensor + place.tensor] for place in mesh.places()]

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
        TypeError: it cannot cut and join.
    """
    for method in ("cut", "join"):
        if not callable(getattr(strategy, method, None)):
            raise TypeError(f"the strategy {name!r} has no method {method}(mesh, ...)")
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
