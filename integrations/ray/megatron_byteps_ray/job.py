"""Driver: runs generations one after the other until training is done, for one job or for several
replicas.

The events of a job go to a listener. ``Console`` prints them as lines.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from .cluster import JobError, Metrics, Pool, Slot
from .generation import Generation, Phases
from .memory import Memory
from .recovery import FAILED, HUNG, LEFT, LOST, End, Failure, Servers
from .settings import Layout, Settings, metrics_of_ranks, option, write_metrics_list

PROGRESS_S = 2.0


class Console:
    """Prints events, and from time to time a step."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or (lambda text: print(text, flush=True))
        self._shown = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        text = getattr(self, f"_{event['event']}")(event)
        if text:
            self._write(text)

    def _opened(self, event: dict[str, Any]) -> str:
        return f"{event['actors']} actors are there, all imports done"

    def _generation(self, event: dict[str, Any]) -> str:
        return (
            f"generation {event['number']}: {event['ranks']} ranks on {event['nodes']} "
            f"{'machine' if event['nodes'] == 1 else 'machines'}, {event['spares']} warm spares"
        )

    def _step(self, event: dict[str, Any]) -> str:
        if time.monotonic() - self._shown < PROGRESS_S:
            return ""
        self._shown = time.monotonic()
        values = "  ".join(f"{name} {value:.4f}" for name, value in event["values"].items())
        return f"  step {event['step']:6d}  {values}  {event['tokens_per_s']:,.0f} tokens/s"

    def _failure(self, event: dict[str, Any]) -> str:
        failure = event["failure"]
        lines = [f"generation {event['generation']} failed: {failure}"]
        for end in failure.causes:
            lines += [f"  {end.who}: {line}" for line in end.lines[-12:]]
        return "\n".join(lines)

    def _recovered(self, event: dict[str, Any]) -> str:
        self._shown = 0.0
        return f"training again, after the failure:\n{event['phases'].table()}"

    def _waiting(self, event: dict[str, Any]) -> str:
        return f"{event['available']} of {event['wanted']} ranks are ready: waiting for the others"

    def _fewer(self, event: dict[str, Any]) -> str:
        return f"going on with {event['ranks']} ranks instead of {event['wanted']}"

    def _done(self, event: dict[str, Any]) -> str:
        count = event["generations"]
        return f"done, after {count} {'generation' if count == 1 else 'generations'}"


SCHEMA = 1
_STRIKES = 2
"""Number of times that a rank may fail by itself on an actor. Then a spare replaces the actor."""

_WRITE_S = 60.0
"""Time in seconds that servers have to write their timelines."""

Listener = Callable[[dict[str, Any]], None]


class Job:
    """Trains on the cluster that ``ray.init`` has joined.

    Each event, which is a dict, is passed to ``listener``. Its ``event`` is ``opened``,
    ``generation``, ``step``, ``failure``, ``recovered``, ``waiting``, ``fewer`` or ``done``.
    """

    def __init__(
        self,
        settings: Settings,
        listener: Listener,
        pool: Pool | None = None,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_over``: function that is called after a failure. If it returns true, the job does
        not go on."""
        self._settings = settings
        self._is_over = is_over
        self._listener = listener
        self._layout = Layout.of(settings.arguments, settings.rank_multiple)
        if not self._layout.fits(settings.ranks):
            raise ValueError(
                f"{settings.ranks} ranks do not fit the arguments: the number must be a multiple "
                f"of {self._layout.model} (model parallelism), and the copies of the model, each "
                "with its micro-batch, must divide the global batch"
            )
        self._folder = settings.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._state_file = self._folder / "job.json"
        self._generation, self._restarts, self._fruitless = 0, 0, 0
        self._failures: list[dict[str, Any]] = []
        if settings.resume:
            self._read_state()
        else:
            (self._folder / "steps.jsonl").unlink(missing_ok=True)
        if settings.profile is not None:
            settings.profile.clear()
        # the caller's pool stays open for the next job
        self._owns_pool = pool is None
        self.pool = pool or Pool(settings)
        self._metrics = Metrics(self._folder.name)
        self._secret = settings.secret()
        self._servers = Servers(settings, self.pool, self._secret)
        interval = settings.memory_save_interval
        self._memory = Memory(interval) if interval is not None else None

    def run(self) -> None:
        """Train to the end.

        Raises:
            JobError: the job failed too often, or resources are missing.
        """
        try:
            if self._owns_pool:
                self.pool.open()
            self._emit("opened", actors=len(self.pool.warm()))
            phases = None
            while True:
                slots = self._gather()
                if phases is not None:
                    phases.end("replaced")
                failure, steps, phases = self._live(slots, phases)
                if failure is None:
                    if self._settings.profile is not None:
                        self._servers.wait_end(_WRITE_S)
                    self._write_state("done", slots)
                    self._emit("done", generations=self._generation + 1)
                    return
                if self._is_over():
                    raise JobError(f"the job is over, and this was its last failure: {failure}")
                self._after(failure, slots, steps)
        finally:
            self._servers.stop()
            if self._owns_pool:
                self.pool.close()

    def _live(
        self, slots: Sequence[Slot], phases: Phases | None
    ) -> tuple[Failure | None, int, Phases | None]:
        """Run a generation. Return its failure, its number of steps, and the beginning of the next
        recovery."""
        self._write_state("running", slots)
        self._metrics.ranks(len(slots), len(self.pool.spares()), self._generation)
        self._emit(
            "generation",
            number=self._generation,
            ranks=len(slots),
            spares=len(self.pool.spares()),
            nodes=len({slot.facts["node"] for slot in slots}),
        )
        life = Generation(
            number=self._generation,
            settings=self._settings,
            servers=self._servers,
            slots=slots,
            arguments=self._arguments(slots),
            secret=self._secret,
            phases=phases,
            emit=self._emit,
            is_over=self._is_over,
        )
        failure = life.run()
        if failure is None:
            return None, life.steps, None
        failed = any(end.kind == FAILED for end in failure.causes)
        if self._memory is not None and failed and not life.steps:
            self._memory.start_anew()  # the state in memory may have caused the failure
        recovery = Phases(failed_at=min(end.at for end in failure.causes))
        recovery.end("noticed", life.noticed_at)
        recovery.end("ended")
        return failure, life.steps, recovery

    def _arguments(self, slots: Sequence[Slot]) -> list[list[str]]:
        """Return the script's arguments for each rank. After a restart they load the job's
        checkpoints, even without --load."""
        arguments = list(self._settings.arguments)
        saved = option(arguments, "--save")
        if self._generation > 0 and saved and option(arguments, "--load") is None:
            arguments += ["--load", saved]
        if self._memory is None:
            return [arguments] * len(slots)
        own = self._memory.arguments([slot.facts["node"] for slot in slots])
        return [[*arguments, *ours] for ours in own]

    # ----------------------------------------------------------------- after a failure

    def _after(self, failure: Failure, slots: Sequence[Slot], steps: int) -> None:
        """Decide whether to restart. Give up actors that must not be used again.

        Raises:
            JobError: the job failed too often.
        """
        self._restarts += 1
        self._fruitless = 0 if steps else self._fruitless + 1
        record = {"generation": self._generation, "time": time.time(), **failure.record()}
        self._failures.append(record)
        self._emit("failure", generation=self._generation, failure=failure, restarts=self._restarts)
        for end in [*failure.causes, *failure.others]:
            if end.rank is None or slots[end.rank].gone:
                continue
            slot = slots[end.rank]
            slot.strikes += end in failure.causes and end.kind == FAILED
            tired = slot.strikes >= _STRIKES and bool(self.pool.spares())
            if end.kind in (LOST, HUNG, LEFT) or tired:
                self.pool.lose(slot)
        self._generation += 1
        self._write_state("failed", slots)
        if self._fruitless >= self._settings.max_fruitless:
            raise JobError(
                f"failed {self._fruitless} times in a row without a step (max_fruitless): {failure}"
            )
        if self._restarts > self._settings.max_restarts:
            raise JobError(f"failed {self._restarts} times (max_restarts): {failure}")
        self._metrics.restart()

    def _gather(self) -> list[Slot]:
        """Return the actors of the next generation. Use spares; without enough spares use fewer
        ranks; otherwise wait.

        Raises:
            JobError: capacity was insufficient until the limit.
        """
        wanted, least = self._settings.ranks, self._settings.min_ranks
        self.pool.refresh()
        self.pool.drop_dead_spares()
        available = len(self.pool.warm())
        if available >= wanted:
            return self.pool.assign(wanted)
        if least is not None and self._generation > 0:
            ranks = self._layout.largest(min(available, wanted))
            if ranks >= least:
                self._emit("fewer", ranks=ranks, wanted=wanted)
                return self.pool.assign(ranks)
        self._emit("waiting", available=available, wanted=wanted)
        limit = self._settings.limits.wait if self._generation else self._settings.limits.warm
        if not self.pool.wait_warm(wanted, limit):
            raise JobError(
                f"{len(self.pool.warm())} of {wanted} ranks were ready after {limit:g} s; "
                "the cluster lacks capacity, or imports take longer"
            )
        return self.pool.assign(wanted)

    # ----------------------------------------------------------------- events

    def _emit(self, event: str, **values: Any) -> None:
        if event == "step":
            self._metrics.step(values)
            values["tokens_per_s"] = self._metrics.tokens_per_s
            with (self._folder / "steps.jsonl").open("a", encoding="utf-8") as record:
                record.write(json.dumps(values) + "\n")
        elif event == "recovered":
            spent = values["phases"].seconds()
            self._metrics.recovery(spent["total"])
            if self._failures:
                self._failures[-1]["phases"] = spent
        self._listener({"event": event, **values})

    def _write_state(self, state: str, slots: Sequence[Slot]) -> None:
        """Replace the state file, from which a lost driver is restarted."""
        content = {
            "schema": SCHEMA,
            "state": state,
            "generation": self._generation,
            "restarts": self._restarts,
            "fruitless": self._fruitless,
            "ranks": [
                {"rank": rank, **{k: slot.facts[k] for k in ("node", "address", "host", "pid")}}
                for rank, slot in enumerate(slots)
                if not slot.gone
            ],
            "failures": self._failures,
        }
        new = self._state_file.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(self._state_file)

    def _read_state(self) -> None:
        if not self._state_file.exists():
            return
        content = json.loads(self._state_file.read_text(encoding="utf-8"))
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{self._state_file} is of another version: {content.get('schema')!r}")
        self._restarts, self._failures = content["restarts"], content["failures"]
        self._fruitless = content["fruitless"]
        # The generation that ran when the driver was lost has ended with it, so it counts.
        self._generation = content["generation"] + (content["state"] == "running")


def record_of_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that a job has recorded in this folder, in the order in which they were
    made."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


_POLL_S = 0.25
_END_S = 60.0
"""Time in seconds that scheduler and servers have to end by themselves after the replicas."""


class Replicas:
    """Trains several replicas on the cluster that ``ray.init`` has joined."""

    def __init__(self, settings: Settings, listener: Callable[[int], Listener]) -> None:
        """``listener``: function that creates the listener of a replica from its number; see
        :class:`.job.Job`."""
        if "BYTEPS_START_TIMEOUT_S" not in settings.forwarded():
            # The actors of a replica may be ready long before those of another one.
            waits = {"BYTEPS_START_TIMEOUT_S": f"{settings.limits.start:g}"}
            settings = replace(settings, environment={**settings.environment, **waits})
        self._settings = settings
        self._listener = listener
        self._secret = settings.secret()
        self.pool = Pool(settings, of_ranks=False)
        """Actors of scheduler and servers."""
        self._servers = Servers(settings, self.pool, self._secret, keep=False)
        self._done = threading.Event()
        """Set when a replica has trained to the end, or when none can."""
        self._errors: dict[int, BaseException] = {}
        self.jobs: list[Job] = []

    def run(self) -> None:
        """Train to the end. Replicas may be given up, as long as one finishes.

        Raises:
            JobError: no replica finished, or resources are missing.
        """
        try:
            self.pool.open()
            known, refused = self._servers.start(self._settings.ranks)
            if refused is not None:
                raise JobError(f"BytePS does not start: {refused}")
            self._list_metrics()
            self.jobs = [self._job(number, known) for number in range(self._settings.replicas)]
            threads = []
            for number in range(len(self.jobs)):
                # The threads are daemons, so that this thread's end ends the driver and its actors.
                name = f"replica {number}"
                thread = threading.Thread(
                    target=self._drive, args=(number,), name=name, daemon=True
                )
                threads.append(thread)
                thread.start()
            lost = self._watch(threads)
            if len(self._errors) == len(self.jobs):
                why = "; ".join(f"replica {n}: {e}" for n, e in sorted(self._errors.items()))
                raise JobError(f"{lost}; {why}" if lost else why)
            self._servers.wait_end(_END_S)
        finally:
            self._servers.stop()
            self.pool.close()

    def _list_metrics(self) -> None:
        """Write the addresses of the servers' metrics, for Prometheus. Each replica writes those of
        its ranks."""
        if servers := self._servers.metrics():
            folder = self._settings.folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            write_metrics_list(folder, 0, servers, [])

    def _job(self, number: int, known: dict[str, str]) -> Job:
        settings = self._settings
        own = {**known, "BYTEPS_REPLICA": f"{number}/{settings.replicas}"}
        own |= {"BYTEPS_SECRET": self._secret} if self._secret else {}
        # Servers have the first ports. The ports of each replica's ranks follow.
        before = settings.servers + number * (settings.ranks // settings.replicas)
        own |= metrics_of_ranks(settings.forwarded(), before)
        of_replica = replace(
            settings,
            replicas=1,
            servers=0,
            ranks=settings.ranks // settings.replicas,
            folder=settings.folder / f"replica{number}",
            environment={**settings.environment, **own},
        )
        return Job(of_replica, self._listener(number), is_over=self._done.is_set)

    def _drive(self, number: int) -> None:
        try:
            self.jobs[number].run()
        except BaseException as error:
            self._errors[number] = error
        else:
            self._done.set()

    def _watch(self, threads: list[threading.Thread]) -> str:
        """Replace servers until all replicas have ended. Return the name of the BytePS process that
        was lost for good, if any."""
        lost = ""
        while any(thread.is_alive() for thread in threads):
            refs = list(self._servers.watched)
            if not refs:
                time.sleep(_POLL_S)
                continue
            for ref in ray.wait(refs, num_returns=1, timeout=_POLL_S)[0]:
                who, end = self._servers.take(ref)
                if end is not None and end["status"] == 0:
                    continue
                if self._servers.replace(who):
                    self._list_metrics()
                    continue
                lost = str(End.lost(who) if end is None else End.reported(who, end))
                self._done.set()  # no replica can go on without it
        return lost
