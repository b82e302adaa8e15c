"""Calls to a group of actors, one for each rank, with arguments cut over the mesh of ranks.

    mesh = Mesh(data=4, tensor=2)
    group = Group.start(Scorer, mesh, gpus=1)
    scores = group.call("score", prompts)          # cut over the data ranks, joined again
    group.call("load", path, by="all")             # the same to all

How arguments are cut, and results joined, is a ``Strategy``; ``register`` adds one of your own. A
call ends when all ranks have answered, and fails with the name of the rank that failed first.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PLACE_S = 300.0
CALL_S = 3600.0


class DispatchError(Exception):
    """A call failed on a rank, was not answered in time, or its results do not fit together."""


# --------------------------------------------------------------------------- the mesh


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


# --------------------------------------------------------------------------- strategies


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
            if not _equal(result, results[0]):
                raise ValueError(f"rank {rank} returned another value than rank 0")
        return results[0]


class _Data:
    """Batches, cut over the data ranks: the first axis of each argument.

    The ranks that share a copy of the model get the same. What the first of them returns counts, of
    the last stage of a pipeline; it is joined along the first axis.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        rows = {len(value) for value in map(_first_column, arguments.values())}
        if len(rows) > 1:
            raise ValueError(f"batches of different lengths: {sorted(rows)}")
        for total in rows:
            if total % mesh.data:
                raise ValueError(f"{total} rows cannot be cut evenly over {mesh.data} data ranks")
        return [
            arguments.each(lambda v, n=place.data: _part(v, n, mesh.data))
            for place in mesh.places()
        ]

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        wanted = [
            rank
            for rank, place in enumerate(mesh.places())
            if place.tensor == 0 and place.context == 0 and place.pipeline == mesh.pipeline - 1
        ]
        return _joined([results[rank] for rank in wanted])


class _Sequence(_Data):
    """The same, and each row of a tensor or array is cut over the context ranks: its second axis.

    Megatron's order: twice as many chunks as ranks, of which each gets one from the front and its
    mirror image from the back. Results are joined along both axes.
    """

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        chunks = 2 * mesh.context if mesh.context > 1 else 1
        for value in arguments.values():
            for column in _columns(value):
                length = getattr(column, "shape", ())[1:2]
                if not length or length[0] % chunks:
                    raise ValueError(
                        f"each argument must have a second axis that {chunks} chunks divide: "
                        f"{type(column).__name__} of shape {tuple(getattr(column, 'shape', ()))}"
                    )
        by_data = super().cut(mesh, arguments)
        return [
            by_data[rank].each(lambda v, n=place.context: _on_columns(v, _chunks_of(n, mesh)))
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
            rows.append(_unchunked(parts))
        return _joined(rows)


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


# --------------------------------------------------------------------------- values


def _columns(value: Any) -> list[Any]:
    """A batch is a sequence, an array or a tensor, or a dict of such."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _on_columns(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: change(column) for name, column in value.items()}
    return change(value)


def _first_column(value: Any) -> Any:
    columns = _columns(value)
    lengths = {len(column) for column in columns if hasattr(column, "__len__")}
    if len(lengths) != 1 or any(isinstance(column, str) for column in columns):
        raise ValueError(f"no batch: {type(value).__name__}, whose first axis cannot be cut")
    return columns[0]


def _part(value: Any, number: int, of: int) -> Any:
    def cut(column: Any) -> Any:
        size = len(column) // of
        return column[number * size : (number + 1) * size]

    return _on_columns(value, cut)


def _chunks_of(context: int, mesh: Mesh) -> Callable[[Any], Any]:
    """A function that takes a context rank's two chunks of the second axis."""

    def take(column: Any) -> Any:
        if mesh.context == 1:
            return column
        size = column.shape[1] // (2 * mesh.context)
        back = 2 * mesh.context - 1 - context
        return _concatenated(
            [column[:, n * size : (n + 1) * size] for n in (context, back)], axis=1
        )

    return take


def _unchunked(parts: Sequence[Any]) -> Any:
    """The opposite, of all context ranks' results."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Mapping):
        return {name: _unchunked([part[name] for part in parts]) for name in parts[0]}
    half = parts[0].shape[1] // 2
    front = [part[:, :half] for part in parts]
    back = [part[:, half:] for part in reversed(parts)]
    return _concatenated([*front, *back], axis=1)


def _joined(parts: Sequence[Any]) -> Any:
    """Along the first axis; None where all are None."""
    if all(part is None for part in parts):
        return None
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"ranks returned different kinds: {sorted(k.__name__ for k in kinds)}")
    if isinstance(parts[0], Mapping):
        if len({frozenset(part) for part in parts}) != 1:
            raise ValueError("ranks returned different keys")
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    same = one == other
    # Arrays and tensors compare by element, and of different shapes perhaps not at all.
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    return bool(same.all()) if hasattr(same, "all") else bool(same)


# --------------------------------------------------------------------------- the group


class Group:
    """Actors in the order of ranks. Not for several threads."""

    def __init__(self, actors: Sequence[Any], mesh: Mesh) -> None:
        """Of actors that are there.

        Raises:
            ValueError: not as many as ranks.
        """
        if len(actors) != mesh.size:
            raise ValueError(f"{len(actors)} actors for a mesh of {mesh.size} ranks")
        self.actors = list(actors)
        self.mesh = mesh
        self._placement: PlacementGroup | None = None

    @classmethod
    def start(
        cls,
        kind: type,
        mesh: Mesh,
        *arguments: Any,
        cpus: float = 1.0,
        gpus: float = 0.0,
        environment: Mapping[str, str] | None = None,
        **named: Any,
    ) -> Group:
        """Make an actor of this class for each rank, all of them with these arguments.

        Each has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment before its object
        is made: ``torch.distributed.init_process_group`` needs nothing else.

        Raises:
            DispatchError: Ray has no room for them, or one could not be made.
        """
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        placement = placement_group([bundle] * mesh.size, strategy="PACK")
        if not placement.wait(PLACE_S):
            remove_placement_group(placement)
            raise DispatchError(
                f"Ray found no room within {PLACE_S:g} s for {mesh.size} x {bundle}"
            )
        actors = [
            ray.remote(_Worker)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=rank
                ),
            )
            .remote()
            for rank in range(mesh.size)
        ]
        group = cls(actors, mesh)
        group._placement = placement
        try:
            address, port = group._answers([actors[0].meeting_place.remote()], "start", CALL_S)[0]
            common = {
                **(environment or {}),
                "WORLD_SIZE": str(mesh.size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                # Each has its GPU for itself, as Ray hands it out.
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            made = [
                actor.make.remote({**common, "RANK": str(rank)}, kind, arguments, named)
                for rank, actor in enumerate(actors)
            ]
            group._answers(made, "start", CALL_S)
        except BaseException:
            group.close()
            raise
        return group

    def call(
        self,
        method: str,
        *arguments: Any,
        by: str = "data",
        limit_s: float = CALL_S,
        check: Callable[[Any], None] | None = None,
        **named: Any,
    ) -> Any:
        """Call a method on every rank, and join what they return.

        Args:
            by: name of the strategy.
            check: called with the joined result; raises what it likes.

        Raises:
            ValueError: no such strategy, or arguments that it cannot cut.
            DispatchError: a rank failed or did not answer, or the results do not fit together.
        """
        how = strategy(by)
        cut = how.cut(self.mesh, Arguments(arguments, named))
        if len(cut) != self.mesh.size:
            raise ValueError(
                f"the strategy {by!r} made {len(cut)} parts for {self.mesh.size} ranks"
            )
        if self._placement is None:
            calls = [
                getattr(actor, method).remote(*own.positional, **own.named)
                for actor, own in zip(self.actors, cut, strict=True)
            ]
        else:
            calls = [
                actor.call.remote(method, own.positional, dict(own.named))
                for actor, own in zip(self.actors, cut, strict=True)
            ]
        results = self._answers(calls, method, limit_s)
        try:
            joined = how.join(self.mesh, results)
        except ValueError as error:
            raise DispatchError(f"{method}: {error}") from error
        if check is not None:
            check(joined)
        return joined

    def close(self) -> None:
        """End the actors that ``start`` made."""
        if self._placement is None:
            return
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self._placement)
        self._placement = None

    def _answers(self, calls: Sequence[Any], method: str, limit_s: float) -> list[Any]:
        """All of them; the first failure ends the wait, since others may wait for that rank."""
        ranks = {ref: rank for rank, ref in enumerate(calls)}
        waiting, deadline = list(calls), time.monotonic() + limit_s
        results: dict[int, Any] = {}
        while waiting:
            left = deadline - time.monotonic()
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, left))
            if not done:
                silent = " ".join(str(ranks[ref]) for ref in waiting)
                raise DispatchError(f"{method}: no answer within {limit_s:g} s of ranks {silent}")
            for ref in done:
                try:
                    results[ranks[ref]] = ray.get(ref)
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    text = f"{type(cause).__name__}: {cause}"
                    raise DispatchError(f"{method}: rank {ranks[ref]} raised {text}") from error
                except ray.exceptions.RayActorError as error:
                    raise DispatchError(f"{method}: rank {ranks[ref]} was lost") from error
        return [results[rank] for rank in range(len(calls))]


class _Worker:
    """An actor that makes an object of the user's class once its environment is set."""

    def __init__(self) -> None:
        self._object: Any = None

    def meeting_place(self) -> tuple[str, int]:
        """Of rank 0: this machine's address, and a port that nobody listens at."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def make(
        self,
        environment: Mapping[str, str],
        kind: type,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        import os

        os.environ.update(environment)
        self._object = kind(*arguments, **named)

    def call(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return getattr(self._object, method)(*arguments, **named)
