"""Strategies: how a call is split over a mesh of ranks, and its results are joined. Values are
batches of sequences, arrays or tensors, or dicts of these."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Place:
    """Indices of a rank in the dimensions of the mesh."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of Megatron's groups. Ranks are numbered in Megatron's order: tensor, context, data,
    pipeline.

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
        """Return the number of ranks."""
        return self.data * self.tensor * self.context * self.pipeline

    def place(self, rank: int) -> Place:
        """Return the place of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Place(tensor=tensor, context=context, data=data, pipeline=pipeline)

    def places(self) -> list[Place]:
        """Return the places of all ranks, in order."""
        return [self.place(rank) for rank in range(self.size)]


def columns(value: Any) -> list[Any]:
    """Return the columns of a batch: the values of a dict, otherwise the batch itself."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def on_columns(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with every column changed."""
    if isinstance(value, Mapping):
        return {name: change(column) for name, column in value.items()}
    return change(value)


def first_column(value: Any) -> Any:
    """Return the first column of a batch; raises ValueError unless all columns have the same
    length."""
    found = columns(value)
    lengths = {len(column) for column in found if hasattr(column, "__len__")}
    if len(lengths) != 1 or any(isinstance(column, str) for column in found):
        raise ValueError(f"no batch: {type(value).__name__}, whose first axis cannot be cut")
    return found[0]


def rows(values: Sequence[Any]) -> int:
    """Return the number of rows of batches; raises ValueError unless all have the same number."""
    found = {len(first_column(value)) for value in values}
    if len(found) > 1:
        raise ValueError(f"batches of different lengths: {sorted(found)}")
    return found.pop() if found else 0


def padded(value: Any, missing: int) -> Any:
    """Append ``missing`` repetitions of the last row."""
    if not missing:
        return value
    return on_columns(value, lambda c: _concatenated([c] + [c[-1:]] * missing, axis=0))


def part(value: Any, number: int, of: int) -> Any:
    """Return part ``number`` of ``of`` equal parts of the first axis."""

    def cut(column: Any) -> Any:
        size = len(column) // of
        return column[number * size : (number + 1) * size]

    return on_columns(value, cut)


def chunked(value: Any, number: int, of: int) -> Any:
    """Return the part of context rank ``number`` of ``of`` along the second axis: of twice as many
    chunks as ranks, one from the front and its mirror image from the back."""

    def cut(column: Any) -> Any:
        size = column.shape[1] // (2 * of)
        return _concatenated(
            [column[:, n * size : (n + 1) * size] for n in (number, 2 * of - 1 - number)], axis=1
        )

    return value if of == 1 else on_columns(value, cut)


def unchunked(parts: Sequence[Any]) -> Any:
    """Undo ``chunked`` for the parts of all ranks."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Mapping):
        return {name: unchunked([part[name] for part in parts]) for name in parts[0]}
    half = parts[0].shape[1] // 2
    front = [part[:, :half] for part in parts]
    back = [part[:, half:] for part in reversed(parts)]
    return _concatenated([*front, *back], axis=1)


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate along the first axis; None if all parts are None."""
    if all(part is None for part in parts):
        return None
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"ranks returned different kinds: {sorted(k.__name__ for k in kinds)}")
    if isinstance(parts[0], Mapping):
        if len({frozenset(part) for part in parts}) != 1:
            raise ValueError("ranks returned different keys")
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return _concatenated(parts, axis=0)


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    kind = type(parts[0])
    if kind.__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(list(parts), dim=axis)
    if hasattr(parts[0], "__array__"):
        import numpy

        return numpy.concatenate(list(parts), axis=axis)
    if not isinstance(parts[0], list | tuple):
        raise ValueError(f"ranks returned {kind.__name__}, which cannot be joined")
    return kind(item for part in parts for item in part)


def equal(one: Any, other: Any) -> bool:
    """Return whether two results have the same values; arrays and tensors element by element."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(equal, one, other))
    same = one == other
    # Arrays and tensors compare by element, and may not be comparable if shapes differ.
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    return bool(same.all()) if hasattr(same, "all") else bool(same)


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call."""

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def each(self, change: Callable[[Any], Any]) -> Arguments:
        """Return the arguments with every value changed."""
        named = {name: change(value) for name, value in self.named.items()}
        return Arguments(tuple(change(value) for value in self.positional), named)

    def values(self) -> list[Any]:
        return [*self.positional, *self.named.values()]


class Strategy(Protocol):
    """Interface: splits a call over ranks, and joins its results.

    May have ``validate(mesh, arguments)``, which is called first and raises ValueError for
    arguments that cannot be split; and ``passes_whole = True`` if ``cut`` does not use values, so
    that ranks fetch ObjectRefs themselves.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        """Return each rank's arguments, in the order of ranks. Use the same object for ranks with
        equal arguments: it is sent once."""
        ...

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """Return the caller's result, from each rank's result.

        Raises:
            ValueError: the results do not fit together.
        """
        ...


def validate(how: Strategy, mesh: Mesh, arguments: Arguments) -> None:
    """Call the strategy's own check of these arguments.

    Raises:
        ValueError: it cannot split them.
    """
    own = getattr(how, "validate", None)
    if own is not None:
        own(mesh, arguments)


class _All:
    """The same arguments to all ranks; returns a list of their results."""

    passes_whole = True

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        return [arguments] * mesh.size

    def join(self, mesh: Mesh, results: Sequence[Any]) -> list[Any]:
        del mesh
        return list(results)


class _Same(_All):
    """The same arguments to all ranks, which must all return the same result."""

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        del mesh
        for rank, result in enumerate(results):
            if not equal(result, results[0]):
                raise ValueError(f"rank {rank} returned another value than rank 0")
        return results[0]


class _Data:
    """Batches, split over the data ranks along the first axis of each argument.

    Ranks of the same model copy get the same arguments. The result of the first of them in the last
    pipeline stage counts; results are joined along the first axis.
    """

    def validate(self, mesh: Mesh, arguments: Arguments) -> None:
        total = rows(arguments.values())
        if total % mesh.data:
            raise ValueError(
                f"{total} rows cannot be cut evenly over {mesh.data} data ranks: pad=True repeats "
                "the last one"
            )

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        parts = [
            arguments.each(partial(part, number=number, of=mesh.data))
            for number in range(mesh.data)
        ]
        return [parts[place.data] for place in mesh.places()]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        wanted = [
            rank
            for rank, place in enumerate(mesh.places())
            if place.tensor == 0 and place.context == 0 and place.pipeline == mesh.pipeline - 1
        ]
        return joined([results[rank] for rank in wanted])


class _Sequence(_Data):
    """Like ``_Data``, and in addition split over the context ranks along the second axis of tensors
    and arrays.

    Megatron's order: two chunks per rank, one from the front and its mirror image from the back.
    Results are joined along both axes.
    """

    def validate(self, mesh: Mesh, arguments: Arguments) -> None:
        chunks = 2 * mesh.context if mesh.context > 1 else 1
        for value in arguments.values():
            for column in columns(value):
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
                cut = partial(chunked, number=place.context, of=mesh.context)
                parts[place.data, place.context] = own.each(cut)
        return [parts[place.data, place.context] for place in places]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        rows = []
        for data in range(mesh.data):
            parts = [
                results[rank]
                for rank, place in enumerate(mesh.places())
                if place.tensor == 0 and place.data == data and place.pipeline == mesh.pipeline - 1
            ]
            rows.append(unchunked(parts))
        return joined(rows)


class _Model:
    """Lists with an item for each rank of a model copy, in the order pipeline, then tensor.

    Every copy of the model gets the same list; returns a list of the first copy's results in the
    same order.
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
    """Add a strategy under a name for calls.

    Raises:
        ValueError: the name is taken.
        TypeError: it lacks ``cut`` or ``join``.
    """
    for method in ("cut", "join"):
        if not callable(getattr(strategy, method, None)):
            raise TypeError(f"the strategy {name!r} has no method {method}(mesh, ...)")
    if name in _STRATEGIES:
        raise ValueError(f"there is a strategy {name!r} already")
    _STRATEGIES[name] = strategy


def strategy(name: str) -> Strategy:
    """Return the strategy of this name.

    Raises:
        ValueError: there is no such strategy.
    """
    if name not in _STRATEGIES:
        raise ValueError(f"no strategy {name!r}; there are: {' '.join(_STRATEGIES)}")
    return _STRATEGIES[name]
