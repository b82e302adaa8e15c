"""Calls to a group of actors, one for each rank, with arguments cut over the mesh of ranks.

    mesh = Mesh(data=4, tensor=2)
    group = Group.start(Scorer, mesh, gpus=1)
    scores = group.call("score", prompts)          # cut over the data ranks, joined again
    group.call("load", path, by="all")             # the same to all
    running = group.start_call("score", prompts)   # goes on with something else
    scores = running.result()

How arguments are cut, and results joined, is a ``Strategy``; ``register`` adds one of your own. A
call ends when all ranks have answered, and fails with the name of the rank that failed first. What
several ranks get is put into Ray's object store once.
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
    """Actors that a group started, and may start anew."""

    def __init__(self, size: int, resources: Mapping[str, float]) -> None:
        self._resources = dict(resources)
        self._actors: list[Any] = []
        self._placement = placement_group([self._resources] * size, strategy="PACK")

    def placed(self) -> bool:
        """Whether Ray found room for them all, for which it is given a while."""
        return self._placement.wait(PLACE_S)

    def start(self) -> list[Any]:
        """Actors without an object, in the order of ranks."""
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
        """Have each make its object: the calls that do."""
        address, port = meeting
        common = {
            **environment,
            "WORLD_SIZE": str(len(self._actors)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # Each has its GPU for itself, as Ray hands it out.
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        packed = ray.put((kind, tuple(arguments), dict(named)))
        return [
            actor.make.remote({**common, "RANK": str(rank)}, packed)
            for rank, actor in enumerate(self._actors)
        ]

    def end(self) -> None:
        """End the actors; their room stays."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def close(self) -> None:
        """End them, and give their room back."""
        self.end()
        remove_placement_group(self._placement)


class _Worker:
    """An actor that makes an object of the user's class once its environment is set."""

    def __init__(self) -> None:
        self._object: Any = None

    def meeting_place(self) -> tuple[str, int]:
        """Of rank 0: this machine's address, and a port that nobody listens at."""
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
    """The value of an ObjectRef; any other as it is."""
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


CALL_S = 3600.0


class DispatchError(Exception):
    """A call failed on a rank, was not answered in time, or its results do not fit together."""


class RankLost(DispatchError):
    """A rank's actor is gone, or did not answer in time: what a restart may help against."""


class Call:
    """A call that runs on all ranks."""

    def __init__(
        self, method: str, refs: Sequence[Any], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._method = method
        self._join = join
        self.refs = list(refs)
        """Ray's ObjectRef of each rank's result, in the order of ranks."""

    def result(self, limit_s: float = CALL_S) -> Any:
        """Wait for all ranks, and join what they return.

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
        self.restarts = 0
        """How often the actors were made anew."""
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
        """Make an actor of this class for each rank, all of them with these arguments.

        Each has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment before its object
        is made: ``torch.distributed.init_process_group`` needs nothing else.

        Args:
            cpus: Ray's resources of each actor, like ``gpus``.
            environment: further variables of all.
            max_restarts: how often a call may make all actors anew where a rank was lost, and be
                made again.
            restore: called with the group after that, to load what they had.

        Raises:
            DispatchError: Ray has no room for them, or one could not be made.
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
        """End the actors that ``start`` made, make them anew, and ``restore`` them.

        Raises:
            DispatchError: they were not made by ``start``, or could not be made again.
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
        """Call a method on every rank, and do not wait.

        A rank runs its calls in the order in which they were started. See ``call``.

        Raises:
            ValueError: no such strategy, or arguments that it cannot cut.
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
        """Call a method on every rank, and join what they return.

        Args:
            arguments: values, or ObjectRefs of values. By ``all`` and ``same``, ranks fetch these.
            by: name of the strategy.
            pad: repeat the last row of batches that the data ranks do not divide. The result has
                no row for these.
            limit_s: how long to wait for all ranks.
            check: called with the joined result; raises what it likes.

        Raises:
            ValueError: no such strategy, or arguments that it cannot cut.
            RankLost: a rank was lost, or did not answer in time, ``max_restarts`` times more than
                it may.
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
        """Start the calls; what several ranks get is put into the object store once."""
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
        """End the actors that ``start`` made."""
        if self._team is not None:
            self._team.close()
            self._team = None


def answers(calls: Sequence[Any], method: str, limit_s: float) -> list[Any]:
    """All of them; the first failure ends the wait, since others may wait for that rank.

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
    """Batches that ``parts`` divide; their rows before and after."""
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
