"""Calls to a group of actors, one for each rank, with arguments cut over the mesh of ranks.

    mesh = Mesh(data=4, tensor=2)
    group = Group.start(Scorer, mesh, gpus=1)
    scores = group.call("score", prompts)          # cut over the data ranks, joined again
    group.call("load", path, by="all")             # the same to all

How arguments are cut, and results joined, is a ``Strategy``; ``register`` adds one of your own. A
call ends when all ranks have answered, and fails with the name of the rank that failed first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .mesh import Mesh
from .ports import free_port
from .strategies import Arguments, register, strategy

__all__ = ["DispatchError", "Group", "Mesh", "register", "strategy"]

PLACE_S = 300.0
CALL_S = 3600.0


class DispatchError(Exception):
    """A call failed on a rank, was not answered in time, or its results do not fit together."""


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
        return ray.util.get_node_ip_address(), free_port()

    def make(
        self,
        environment: Mapping[str, str],
        kind: type,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        os.environ.update(environment)
        self._object = kind(*arguments, **named)

    def call(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return getattr(self._object, method)(*arguments, **named)
