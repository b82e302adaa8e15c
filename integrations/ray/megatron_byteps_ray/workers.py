"""The actors of a group, each in a bundle of one placement group, and how they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .ports import free_port

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
