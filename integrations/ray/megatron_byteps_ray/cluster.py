"""A Ray cluster that a job joins or starts on this machine; the job's actors, each in a bundle of a
placement group; and the job's metrics in Ray."""

from __future__ import annotations

import collections
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import services, state
from ray.util.metrics import Counter, Gauge
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .rank_actor import BytePSActor, RankActor
from .settings import Settings


def draining_nodes() -> set[str]:
    """Return Ray's ids of nodes that are being drained. Ray has only an internal call for this.
    Return an empty set if this version of Ray lacks it."""
    ask = getattr(state.state, "get_draining_nodes", None)
    return set(ask()) if ask is not None else set()


_NODE_S = 30.0
"""Time limit in seconds of each of Ray's requests for its node."""
_OBJECT_STORE_BYTES = 100 << 20  # no large object goes through it


@contextmanager
def cluster(
    settings: Settings,
    *,
    address: str | None = None,
    temp_dir: str | None = None,
    dashboard: bool = False,
    metrics_port: int | None = None,
    gpus: int | None = None,
) -> Iterator[None]:
    """Return the context of a driver of the cluster at ``address`` ("auto": this machine's). None
    starts a cluster here.

    A cluster that was started here offers as many cores as the job asks for, whatever the machine
    has. It ends with the context.

    Args:
        temp_dir: folder for Ray's sockets and logs. Its path must be short. None: Ray's default.
        dashboard: whether to start Ray's dashboard.
        metrics_port: port of the metrics for Prometheus; None: Ray chooses.
        gpus: number of GPUs that a cluster started here offers; None: as many as Ray finds.
    """
    # By default Ray starts actors with nice 15, so other processes of this machine would slow
    # training down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if address is not None:
        ray.init(address=address, **quiet)
    else:
        options: dict[str, Any] = {} if temp_dir is None else {"_temp_dir": temp_dir}
        if metrics_port is not None:
            options["_metrics_export_port"] = metrics_port
        actors = settings.ranks + settings.spares * settings.replicas
        cpus = actors * settings.cpus_per_rank + (settings.servers + 1) * settings.server_cpus
        own = {settings.server_resource: settings.servers + 1} if settings.server_resource else None
        _start(
            settings.limits.place,
            num_cpus=math.ceil(cpus),
            num_gpus=gpus,
            resources=own,
            include_dashboard=dashboard,
            _node_ip_address="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            **quiet,
            **options,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _start(limit_s: float, **options: Any) -> None:
    """Start a node here. Repeat if necessary.

    Ray gives a node 30 s to start, and the node gives its agents 15 s and then ends. A busy machine
    exceeds these limits, and there are no settings for them.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with _patience():
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                raise


@contextmanager
def _patience() -> Iterator[None]:
    """Return a context in which Ray waits longer for a node that starts here. It patches a function
    of Ray."""
    ask = services.get_node

    def ask_for_long(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + _NODE_S
        while True:
            try:
                return ask(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    services.get_node = ask_for_long
    try:
        yield
    finally:
        services.get_node = ask


_THREADS = 8
_ATTEMPTS = 3
_ANSWER_S = 60.0
"""Time limit in seconds for a spare to answer. After it the spare is replaced."""


class JobError(Exception):
    """Error if the job cannot go on. The text has the reason."""


@dataclass
class Slot:
    """Actor that is a rank, or may become one."""

    bundle: int
    actor: Any
    facts_ref: Any
    warm_ref: Any
    attempt: int
    facts: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    gone: bool = False
    strikes: int = 0
    """Number of times that the actor's rank has failed by itself."""


def resources(settings: Settings) -> tuple[dict[str, float], dict[str, float]]:
    """Return Ray's resources of the scheduler or a server, and of a rank's actor."""
    server = {"CPU": settings.server_cpus}
    if settings.server_resource:
        server[settings.server_resource] = 1.0
    rank = {"CPU": settings.cpus_per_rank}
    if settings.gpus_per_rank:
        rank["GPU"] = settings.gpus_per_rank
    return server, rank


class Pool:
    """Actors of a job (see the module). Not thread-safe."""

    def __init__(self, settings: Settings, *, of_ranks: bool = True) -> None:
        """``of_ranks``: whether the pool also has actors for ranks, not only for BytePS."""
        self._settings = settings
        self._count = settings.ranks + settings.spares if of_ranks else 0
        self._slots: list[Slot] = []
        self.assigned: list[Slot] = []
        """Actors of the ranks, in the order of ranks."""
        self.byteps: list[Any] = []
        """The scheduler's actor, then the servers'; empty without BytePS."""
        self._byteps_bundles = settings.servers + 1 if settings.servers else 0
        self._group: Any = None
        self._draining: set[str] = set()
        """Nodes that are being drained, on which no rank is started."""

    # ----------------------------------------------------------------- opening and closing

    def open(self) -> None:
        """Reserve resources for all actors, start them, and wait until ranks have imported
        everything.

        Raises:
            JobError: resources are missing, or an actor fails to import a module.
        """
        settings = self._settings
        server, rank = resources(settings)
        count = self._count
        bundles = [server] * self._byteps_bundles + [rank] * count
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(settings.limits.place):
            raise JobError(
                f"Ray found no room within {settings.limits.place:g} s for {count} ranks and "
                f"spares with {rank} each, scheduler and servers with {server} each; "
                f"the cluster has {ray.cluster_resources()}, free are {ray.available_resources()}"
            )
        self.byteps = [self._new_byteps(index) for index in range(self._byteps_bundles)]
        for index in range(count):
            self._slots.append(self._new_slot(self._byteps_bundles + index, attempt=0))
        self.wait_warm(min(settings.ranks, count), settings.limits.warm)

    def close(self) -> None:
        """End all actors and the processes that they own."""
        for actor in [*(slot.actor for slot in self._slots), *self.byteps]:
            ray.kill(actor)
        self._slots, self.assigned, self.byteps = [], [], []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )

    def _new_byteps(self, bundle: int) -> Any:
        settings = self._settings
        resources = {settings.server_resource: 1.0} if settings.server_resource else None
        name = "scheduler" if bundle == 0 else f"server{bundle - 1}"
        return (
            ray.remote(BytePSActor)
            .options(
                num_cpus=settings.server_cpus,
                resources=resources,
                max_concurrency=_THREADS,
                scheduling_strategy=self._strategy(bundle),
            )
            .remote(folder=str(settings.folder / "logs"), name=name)
        )

    def _new_slot(self, bundle: int, attempt: int) -> Slot:
        settings = self._settings
        environment = settings.forwarded()
        # The GPU's number must be the local rank, so a process must see all GPUs of its node.
        actor_environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=settings.cpus_per_rank,
                num_gpus=settings.gpus_per_rank,
                max_concurrency=_THREADS,
                scheduling_strategy=self._strategy(bundle),
                runtime_env={"env_vars": actor_environment} if settings.gpus_per_rank else None,
            )
            .remote(
                folder=str(settings.folder / "logs"),
                preload=settings.preload,
                python_path=settings.python_path,
                environment=environment,
            )
        )
        return Slot(
            bundle=bundle,
            actor=actor,
            facts_ref=actor.facts.remote(),
            warm_ref=actor.warm.remote(settings.limits.warm),
            attempt=attempt,
        )

    # ----------------------------------------------------------------- state of the actors

    def refresh(self) -> None:
        """Update which actors have become warm, and which were lost.

        Raises:
            JobError: actors in the same bundle repeatedly fail to import modules.
        """
        self._draining = draining_nodes()
        pending = [slot for slot in self._slots if not slot.warm]
        refs = [slot.warm_ref for slot in pending]
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        for slot in pending:
            if slot.warm_ref not in done:
                continue
            try:
                problem = ray.get(slot.warm_ref)
                slot.facts = slot.facts or ray.get(slot.facts_ref)
            except ray.exceptions.RayActorError as error:
                problem = f"its actor was lost: {error}"
            if not problem:
                slot.warm = True
            elif slot.attempt + 1 < _ATTEMPTS:
                self.lose(slot)
            else:
                raise JobError(f"an actor cannot be a rank: {problem}")

    def wait_warm(self, count: int, limit_s: float) -> bool:
        """Wait until `count` actors are warm. Return whether they are."""
        deadline = time.monotonic() + limit_s
        while True:
            self.refresh()
            if len(self.warm()) >= count:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pending = [slot.warm_ref for slot in self._slots if not slot.warm]
            ray.wait(pending, num_returns=1, timeout=min(1.0, left))

    def warm(self) -> list[Slot]:
        """Return the actors that are ranks, or could be ranks at once."""
        return [
            slot for slot in self._slots if slot.warm and slot.facts["node"] not in self._draining
        ]

    def spares(self) -> list[Slot]:
        """Return the warm actors that are not ranks."""
        return [slot for slot in self.warm() if slot not in self.assigned]

    def drop_dead_spares(self) -> None:
        """Replace spares that were lost while waiting."""
        limit_s = min(self._settings.limits.beat, _ANSWER_S)
        slot_of = {slot.actor.facts.remote(): slot for slot in self.spares()}
        if not slot_of:
            return
        answered, silent = ray.wait(list(slot_of), num_returns=len(slot_of), timeout=limit_s)
        for ref in silent:
            self.lose(slot_of[ref])
        for ref in answered:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError:
                self.lose(slot_of[ref])

    def lose(self, slot: Slot) -> None:
        """Give an actor up, and start another one in its place, which becomes a spare."""
        slot.gone = True
        ray.kill(slot.actor)
        self._slots.remove(slot)
        # If the actor was warm, its imports were not the cause, so the next one begins at attempt
        # 0.
        self._slots.append(self._new_slot(slot.bundle, 0 if slot.warm else slot.attempt + 1))

    def replace_byteps(self, index: int) -> None:
        """Replace the lost actor of the scheduler or a server."""
        ray.kill(self.byteps[index])
        self.byteps[index] = self._new_byteps(index)

    def assign(self, ranks: int) -> list[Slot]:
        """Return the actors of the ranks. Remaining ranks keep theirs, and spares replace lost
        actors.

        ``ranks`` must not exceed the number of warm actors. If it changes, all ranks are assigned
        anew.
        """
        live = self.warm()
        if len(self.assigned) != ranks:
            # Ranks of the same machine are adjacent.
            staying = [slot for slot in self.assigned if slot in live]
            chosen = (staying + [slot for slot in live if slot not in staying])[:ranks]
            self.assigned = sorted(chosen, key=lambda slot: (slot.facts["node"], slot.bundle))
        else:
            spares = self.spares()
            self.assigned = [
                slot if slot in live else _take(spares, slot) for slot in self.assigned
            ]
        return list(self.assigned)


def _take(spares: list[Slot], lost: Slot) -> Slot:
    """Return a spare, on the lost actor's machine if possible."""
    near = [slot for slot in spares if slot.facts["node"] == lost.facts.get("node")]
    slot = (near or spares)[0]
    spares.remove(slot)
    return slot


_WINDOW = 20


class Metrics:
    """Gauges and counters, tagged with the job's name."""

    def __init__(self, job: str) -> None:
        self._tags = {"job": job}
        self._gauges: dict[str, Gauge] = {}
        self._restarts = Counter(
            "megatron_byteps_restarts_total", description="Restarts so far", tag_keys=("job",)
        )
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=_WINDOW)
        self.tokens_per_s = 0.0
        """Rate over the last 20 steps. 0 before the second step."""

    def _set(self, name: str, description: str, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(f"megatron_byteps_{name}", description=description, tag_keys=("job",))
            self._gauges[name] = gauge
        gauge.set(value, tags=self._tags)

    def ranks(self, ranks: int, spares: int, generation: int) -> None:
        self._recent.clear()
        self._set("ranks", "Ranks that train", ranks)
        self._set("spares", "Warm spares", spares)
        self._set("generation", "Generation of the job, from 0", generation)

    def step(self, step: dict[str, Any]) -> None:
        self._recent.append((step["time"], step["tokens"]))
        spent = self._recent[-1][0] - self._recent[0][0]
        if spent > 0:
            tokens = sum(count for _, count in list(self._recent)[1:])
            self.tokens_per_s = tokens / spent
        self._set("step", "Number of the last step", step["step"])
        for name, value in step["values"].items():
            self._set(name.replace(" ", "_").replace("lm_loss", "loss"), name, value)
        self._set("tokens_per_second", "Tokens a second over 20 steps", self.tokens_per_s)

    def restart(self) -> None:
        self._restarts.inc(tags=self._tags)

    def recovery(self, seconds: float) -> None:
        self._set("recovery_seconds", "From the last failure to training again", seconds)
