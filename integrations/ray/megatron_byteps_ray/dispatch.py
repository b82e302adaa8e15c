"""Calls to a group of actors, one per rank, with arguments split over the mesh of ranks.

    mesh = Mesh(data=4, tensor=2)
    group = Group.start(Scorer, mesh, gpus=1)
    scores = group.call("score", prompts)          # cut over the data ranks, joined again
    group.call("load", path, by="all")             # the same to all
    running = group.start_call("score", prompts)   # goes on with something else
    scores = running.result()

A ``Strategy`` splits arguments and joins results; ``register`` adds a custom strategy. A call ends
when all ranks have answered. If a rank fails, the error names the first rank that did. Values that
several ranks get are put into Ray's object store once.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from . import strategies
from .settings import free_port
from .strategies import Arguments, Mesh, Strategy, register, strategy, validate

__all__ = ["Call", "DispatchError", "Group", "Mesh", "RankLost", "register", "strategy"]


PLACE_S = 300.0


class Team:
    """Actors that a group has started, and may restart."""

    def __init__(self, size: int, resources: Mapping[str, float]) -> None:
        self._resources = dict(resources)
        self._actors: list[Any] = []
        self._placement = placement_group([self._resources] * size, strategy="PACK")

    def placed(self) -> bool:
        """Wait for Ray to place all actors; return whether it did within PLACE_S."""
        return self._placement.wait(PLACE_S)

    def start(self) -> list[Any]:
        """Start actors without an object; return them in the order of ranks."""
        self._actors = [
            ray.remote(_Worker)
            .options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=rank
                ),
            )
            .remote()
            for rank in range(len(self._placement.bundle_specs))
        ]
        return list(self._actors)

    def make(
        self,
        meeting: tuple[str, int],
        kind: type,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> list[Any]:
        """Make each actor create its object; return the pending calls."""
        address, port = meeting
        common = {
            **environment,
            "WORLD_SIZE": str(len(self._actors)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # Ray gives each actor its own GPU.
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        packed = ray.put((kind, tuple(arguments), dict(named)))
        return [
            actor.make.remote({**common, "RANK": str(rank)}, packed)
            for rank, actor in enumerate(self._actors)
        ]

    def end(self) -> None:
        """End the actors; their resources stay reserved."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def close(self) -> None:
        """End the actors, and release their resources."""
        self.end()
        remove_placement_group(self._placement)


class _Worker:
    """An actor that creates an object of the user's class after setting its environment."""

    def __init__(self) -> None:
        self._object: Any = None

    def meeting_place(self) -> tuple[str, int]:
        """Return rank 0's meeting place: this machine's address, and a free port."""
        return ray.util.get_node_ip_address(), free_port()

    def make(self, environment: Mapping[str, str], packed: tuple[Any, ...]) -> None:
        kind, arguments, named = packed
        os.environ.update(environment)
        self._object = kind(*arguments, **named)

    def call(self, method: str, packed: tuple[Any, ...]) -> Any:
        arguments, named = packed
        own = [fetched(value) for value in arguments]
        return getattr(self._object, method)(*own, **{n: fetched(v) for n, v in named.items()})


def fetched(value: Any) -> Any:
    """Return the value of an ObjectRef; any other value unchanged."""
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


CALL_S = 3600.0


class DispatchError(Exception):
    """A call failed on a rank, timed out, or its results do not fit together."""


class RankLost(DispatchError):
    """A rank's actor is gone, or did not answer in time. A restart may help."""


class Call:
    """A call that is running on all ranks."""

    def __init__(
        self, method: str, refs: Sequence[Any], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._method = method
        self._join = join
        self.refs = list(refs)
        """Ray's ObjectRef of each rank's result, in the order of ranks."""

    def result(self, limit_s: float = CALL_S) -> Any:
        """Wait for all ranks, and join their results.

        Raises:
            RankLost: a rank was lost, or did not answer within ``limit_s``.
            DispatchError: a rank raised, or the results do not fit together.
        """
        results = answers(self.refs, self._method, limit_s)
        try:
            return self._join(results)
        except ValueError as error:
            raise DispatchError(f"{self._method}: {error}") from error


class Group:
    """Actors in the order of ranks. Not thread-safe."""

    def __init__(self, actors: Sequence[Any], mesh: Mesh) -> None:
        """Make a group of existing actors.

        Raises:
            ValueError: the number of actors differs from the number of ranks.
        """
        if len(actors) != mesh.size:
            raise ValueError(f"{len(actors)} actors for a mesh of {mesh.size} ranks")
        self.actors = list(actors)
        self.mesh = mesh
        self.restarts = 0
        """Number of restarts of the actors."""
        self._team: Team | None = None
        self._make: Callable[..., list[Any]] | None = None
        self._may_restart = 0
        self._restore: Callable[[Group], None] | None = None

    @classmethod
    def start(
        cls,
        kind: type,
        mesh: Mesh,
        *arguments: Any,
        cpus: float = 1.0,
        gpus: float = 0.0,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        restore: Callable[[Group], None] | None = None,
        **named: Any,
    ) -> Group:
        """Create an actor of this class for each rank, all with these arguments.

        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before the object is created:
        ``torch.distributed.init_process_group`` needs nothing else.

        Args:
            cpus: Ray's resources per actor, like ``gpus``.
            environment: more variables for all actors.
            max_restarts: how often calls may restart all actors and be repeated after a rank was
                lost.
            restore: called with the group after a restart, to load its state.

        Raises:
            DispatchError: Ray lacks resources for them, or an actor could not be created.
        """
        resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        team = Team(mesh.size, resources)
        if not team.placed():
            raise DispatchError(f"Ray found no room for {mesh.size} x {resources}")
        group = cls([None] * mesh.size, mesh)
        group._team, group._may_restart, group._restore = team, max_restarts, restore
        group._make = partial(
            team.make, kind=kind, arguments=arguments, named=named, environment=environment or {}
        )
        try:
            group._start_actors()
        except BaseException:
            group.close()
            raise
        return group

    def _start_actors(self) -> None:
        assert self._team is not None and self._make is not None
        self.actors = self._team.start()
        meeting = answers([self.actors[0].meeting_place.remote()], "start", CALL_S)[0]
        answers(self._make(meeting), "start", CALL_S)

    def restart(self) -> None:
        """End the actors of ``start``, create them anew, and ``restore`` them.

        Raises:
            DispatchError: they were not created by ``start``, or could not be created again.
        """
        if self._team is None:
            raise DispatchError("a group of the caller's own actors cannot be restarted")
        self._team.end()
        self._start_actors()
        self.restarts += 1
        if self._restore is not None:
            self._restore(self)

    def start_call(
        self, method: str, *arguments: Any, by: str = "data", pad: bool = False, **named: Any
    ) -> Call:
        """Start a call of a method on every rank, without waiting.

        A rank runs its calls in the order in which they were started. See ``call``.

        Raises:
            ValueError: there is no such strategy, or it cannot split the arguments.
        """
        how = strategy(by)
        given = Arguments(arguments, named)
        if not getattr(how, "passes_whole", False):
            given = given.each(fetched)
        padded = None
        if pad:
            given, padded = _padded(given, self.mesh.data)
        validate(how, self.mesh, given)
        cut = how.cut(self.mesh, given)
        if len(cut) != self.mesh.size:
            raise ValueError(
                f"the strategy {by!r} made {len(cut)} parts for {self.mesh.size} ranks"
            )
        return Call(method, self._send(method, cut), partial(_joined, how, self.mesh, padded))

    def call(
        self,
        method: str,
        *arguments: Any,
        by: str = "data",
        pad: bool = False,
        limit_s: float = CALL_S,
        check: Callable[[Any], None] | None = None,
        **named: Any,
    ) -> Any:
        """Call a method on every rank, and join the results.

        Args:
            arguments: values, or ObjectRefs of values. With ``all`` and ``same``, ranks fetch the
                values.
            by: name of the strategy.
            pad: repeat the last row of a batch so that the data ranks divide it. The result has no
                rows for these repetitions.
            limit_s: time limit for all ranks.
            check: called with the joined result; may raise any error.

        Raises:
            ValueError: there is no such strategy, or it cannot split the arguments.
            RankLost: a rank was lost, or did not answer in time, more than ``max_restarts`` times.
            DispatchError: a rank raised, or the results do not fit together.
        """
        while True:
            try:
                running = self.start_call(method, *arguments, by=by, pad=pad, **named)
                joined = running.result(limit_s)
                break
            except RankLost:
                if self.restarts >= self._may_restart:
                    raise
                self.restart()
        if check is not None:
            check(joined)
        return joined

    def _send(self, method: str, cut: Sequence[Arguments]) -> list[Any]:
        """Start the calls. Arguments that several ranks get are put into the object store once."""
        ranks = collections.Counter(map(id, cut))
        sent: dict[int, Any] = {}
        calls = []
        for actor, own in zip(self.actors, cut, strict=True):
            if id(own) not in sent:
                once = ranks[id(own)] > 1
                if self._team is None:
                    sent[id(own)] = own.each(_put) if once else own
                else:
                    packed = (own.positional, dict(own.named))
                    sent[id(own)] = ray.put(packed) if once else packed
            ready = sent[id(own)]
            if self._team is None:
                calls.append(getattr(actor, method).remote(*ready.positional, **ready.named))
            else:
                calls.append(actor.call.remote(method, ready))
        return calls

    def close(self) -> None:
        """End the actors that ``start`` created."""
        if self._team is not None:
            self._team.close()
            self._team = None


def answers(calls: Sequence[Any], method: str, limit_s: float) -> list[Any]:
    """Return all answers. The first failure ends the wait, since others may wait for that rank.

    Raises:
        DispatchError: see ``Call.result``.
    """
    ranks = {ref: rank for rank, ref in enumerate(calls)}
    waiting, deadline = list(calls), time.monotonic() + limit_s
    results: dict[int, Any] = {}
    while waiting:
        left = deadline - time.monotonic()
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, left))
        if not done:
            silent = " ".join(str(ranks[ref]) for ref in waiting)
            raise RankLost(f"{method}: no answer within {limit_s:g} s of ranks {silent}")
        for ref in done:
            try:
                results[ranks[ref]] = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                text = f"{type(cause).__name__}: {cause}"
                raise DispatchError(f"{method}: rank {ranks[ref]} raised {text}") from error
            except ray.exceptions.RayActorError as error:
                raise RankLost(f"{method}: rank {ranks[ref]} was lost") from error
    return [results[rank] for rank in range(len(calls))]


def _put(value: Any) -> Any:
    return value if isinstance(value, ray.ObjectRef) else ray.put(value)


def _padded(arguments: Arguments, parts: int) -> tuple[Arguments, tuple[int, int]]:
    """Pad batches so that ``parts`` divides them; return also their rows before and after."""
    rows = strategies.rows(arguments.values())
    if rows == 0:
        raise ValueError("a batch without rows has none to repeat")
    missing = -rows % parts
    return arguments.each(partial(strategies.padded, missing=missing)), (rows, rows + missing)


def _joined(
    how: Strategy, mesh: Mesh, padded: tuple[int, int] | None, results: Sequence[Any]
) -> Any:
    joined = how.join(mesh, results)
    if padded is None or joined is None:
        return joined
    rows, with_padding = padded
    found = strategies.rows([joined])
    if found != with_padding:
        raise ValueError(f"the result has {found} rows for {with_padding}: it cannot be cut back")
    return strategies.on_columns(joined, lambda column: column[:rows])
