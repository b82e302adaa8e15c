"""Generation of the job: starts its processes, watches them, ends them, and times a recovery."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from .cluster import Slot, draining_nodes
from .recovery import FAILED, HUNG, LEFT, LOST, End, Failure, Servers
from .settings import (
    Settings,
    first_metrics_port,
    local_variables,
    metrics_of_ranks,
    write_metrics_list,
)
from .step_reports import StepReports

ORDER = {
    "noticed": "failure noticed",
    "ended": "old processes ended",
    "replaced": "lost ranks replaced",
    "servers": "scheduler and servers listen",
    "started": "ranks started",
    "groups": "process groups made",
    "byteps": "BytePS joined",
    "loaded": "state loaded",
    "step": "first step done",
}
"""Events, in order. Each ends a phase of a recovery."""


@dataclass
class Phases:
    """Times of a recovery, in seconds since the epoch: the failure, and the end of each phase."""

    failed_at: float
    ends: dict[str, float] = field(default_factory=dict)

    def end(self, name: str, at: float | None = None) -> None:
        """Record the end of a phase. Of several ranks, the last one counts."""
        self.ends[name] = max(self.ends.get(name, 0.0), time.time() if at is None else at)

    @property
    def done(self) -> bool:
        return "step" in self.ends

    def seconds(self) -> dict[str, float]:
        """Return the duration of each phase, and ``total``. Phases that have not occurred are left
        out."""
        result, before = {}, self.failed_at
        for name in ORDER:
            if name in self.ends:
                result[name] = max(0.0, self.ends[name] - before)
                before = max(before, self.ends[name])
        result["total"] = max(0.0, before - self.failed_at)
        return result

    def table(self) -> str:
        """Format the phases for the driver's output."""
        lines = [
            f"  {ORDER.get(name, 'training again'):30s} {spent:7.2f} s"
            for name, spent in self.seconds().items()
        ]
        return "\n".join(lines)


POLL_S = 0.25
SETTLE_S = 1.0
"""Time to wait after the first failure for reports of others, because all of them together show the
cause."""
SILENT_S = 10.0
"""Seconds of silence after which a rank counts as hanging, if other ranks report it as lost."""
_DRAINS_S = 1.0
"""Interval between two checks for draining nodes."""
_CALL_S = 120.0
_MARKS = ("groups", "byteps", "loaded")


class Generation:
    """Generation: the ranks from their start until all of them have ended, and the servers that
    they use."""

    def __init__(
        self,
        *,
        number: int,
        settings: Settings,
        servers: Servers,
        slots: Sequence[Slot],
        arguments: Sequence[Sequence[str]],
        secret: str,
        phases: Phases | None,
        emit: Callable[..., None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``arguments``: arguments of the script, for each rank. ``is_over``: function that says
        whether ranks without a step have nothing left to do."""
        self.number = number
        self._settings = settings
        self._servers = servers
        self._slots = list(slots)
        self._arguments = arguments
        self._secret = secret
        self._phases = phases
        self._emit = emit
        self._ends: list[End] = []
        self._watched: dict[Any, str] = {}
        self._progress: dict[Any, int] = {}
        self._heard = [time.monotonic()] * len(slots)
        self._seen: list[dict[str, Any]] = [{} for _ in slots]
        self._first: dict[int, float] = {}
        """End time of each rank's first step."""
        self._reports = StepReports()
        self._is_over = is_over
        self._finished: set[int] = set()
        self._notified: list[int] = []
        """Ranks that were told to end, because their machines will be removed."""
        self._metrics_port = 0
        """First metrics port of the ranks; 0: metrics are off."""
        self._drains_due = 0.0
        self.steps = 0
        """Steps of rank 0."""
        self.noticed_at = 0.0
        """Time at which the failure was noticed, in seconds since the epoch."""

    def run(self) -> Failure | None:
        """Train. Return None if all ranks have ended well. All ranks' processes have then ended."""
        try:
            if self._start():
                self._watch()
            if not self._ends and not self._settings.is_replica:
                # All ranks of the job have saved a checkpoint and ended in order.
                self._ends = [
                    End(who=f"rank {rank}", kind=LEFT, at=time.time()) for rank in self._notified
                ]
            if not self._ends:
                return None
            self.noticed_at = self.noticed_at or time.time()
            self._take_last_steps()
            self._blame_the_silent()
            return Failure.of(self._ends)
        finally:
            self._stop()

    # ----------------------------------------------------------------- starting

    def _start(self) -> bool:
        """Start all processes. Return whether that has succeeded. If not, ``_ends`` has the
        reason."""
        environment = self._settings.forwarded()
        environment |= {"BYTEPS_SECRET": self._secret} if self._secret else {}
        environment |= self._settings.profile.of_ranks() if self._settings.profile else {}
        cluster, refused = self._servers.start(len(self._slots))
        if refused is not None:
            self._ends.append(refused)
            return False
        self._mark("servers")
        try:
            port = ray.get(self._slots[0].actor.free_port.remote(), timeout=_CALL_S)
        except ray.exceptions.RayError:
            self._lost("rank 0")
            return False
        environment |= cluster
        environment |= metrics_of_ranks(environment, self._settings.servers)
        environment |= {
            "WORLD_SIZE": str(len(self._slots)),
            "MASTER_ADDR": self._slots[0].facts["address"],
            "MASTER_PORT": str(port),
            "MEGATRON_BYTEPS_GENERATION": str(self.number),
        }
        started = {}
        places = [slot.facts for slot in self._slots]
        for rank, slot in enumerate(self._slots):
            own = {**environment, "RANK": str(rank), **local_variables(places, rank)}
            order = {
                "environment": own,
                "folder": str(Path.cwd()),
                "log": str(self._settings.folder.absolute() / "logs" / f"rank{rank}.log"),
                "entry": self._settings.entry,
                "arguments": list(self._arguments[rank]),
            }
            started[slot.actor.start.remote(order)] = rank
        for ref, rank in started.items():
            try:
                ray.get(ref, timeout=_CALL_S)
            except ray.exceptions.RayError:
                self._lost(f"rank {rank}")
        if self._ends:
            return False
        self._metrics_port = first_metrics_port(environment)
        self._list_metrics()
        self._mark("started")
        for rank, slot in enumerate(self._slots):
            self._watched[slot.actor.wait_end.remote()] = f"rank {rank}"
            self._heard[rank] = time.monotonic()
            self._progress[slot.actor.progress.remote()] = rank
        return True

    def _list_metrics(self) -> None:
        """Write the addresses of all processes' metrics, for Prometheus."""
        if self._metrics_port:
            places = [slot.facts for slot in self._slots]
            folder = self._settings.folder.absolute()
            write_metrics_list(folder, self._metrics_port, self._servers.metrics(), places)

    def _replaced(self, who: str) -> bool:
        """Replace the server `who`, which has ended, if that is possible. Return whether it was
        replaced; the generation then goes on."""
        if self._ends or not self._servers.replace(who):
            return False
        self._list_metrics()
        return True

    # ----------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Watch until all ranks have ended well, or a process has failed."""
        settle = 0.0
        while len(self._finished) < len(self._slots):
            watched = [*self._watched, *self._servers.watched]
            done, _ = ray.wait(watched, num_returns=1, timeout=POLL_S)
            for ref in done:
                self._take_end(ref)
            self._take_progress()
            if not self._ends:
                self._look_for_hangs()
            if self._settings.leaves_when_told and not self._notified:
                self._tell_draining()
            if not (self._ends or self._first or self._finished) and self._is_over():
                why = "the others had trained to the end before it joined them"
                self._ends.append(End(who="rank 0", kind=FAILED, at=time.time(), lines=[why]))
            if self._ends:
                if not settle:
                    settle, self.noticed_at = time.monotonic() + SETTLE_S, time.time()
                if time.monotonic() >= settle or not self._watched:
                    return
        self._take_progress(last=True)
        if not self._ends:
            self._recovered()  # also if no step was left to do

    def _take_end(self, ref: Any) -> None:
        who, end = self._watched.pop(ref, ""), None
        if not who:
            who, end = self._servers.take(ref)
        else:
            with contextlib.suppress(ray.exceptions.RayError):
                end = ray.get(ref)
        if end is None:
            return None if self._replaced(who) else self._lost(who)
        status = end["status"]
        if status != 0 and self._replaced(who):
            return None
        if who.startswith("rank") and status == 0:
            self._finished.add(int(who.split()[1]))
        elif status == 0 and not self._ends:
            return None  # a scheduler or server ends after all ranks have left
        else:
            self._ends.append(End.reported(who, end, may_leave=self._settings.is_replica))
        return None

    def _lost(self, who: str) -> None:
        self._ends.append(End.lost(who))

    def _take_progress(self, *, last: bool = False) -> None:
        """Read the ranks' answers, and ask again. ``last``: whether to ask once more, and wait for
        all answers."""
        self._hear(0.0 if not last else _CALL_S, again=not last)
        if last:
            # Earlier requests were answered before, so an answer has the steps since the last
            # answer.
            self._progress = {s.actor.progress.remote(): rank for rank, s in enumerate(self._slots)}
            self._hear(_CALL_S, again=False)
        if all(seen.get("step") for seen in self._seen):
            self._recovered()

    def _hear(self, limit_s: float, *, again: bool) -> None:
        refs = list(self._progress)
        if not refs:
            return
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        # Answers are read in the order of ranks. So the lowest rank that knows of the loss reports
        # it.
        for ref in sorted(done, key=self._progress.__getitem__):
            rank = self._progress.pop(ref)
            try:
                seen = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # the other call notices its end
            self._heard[rank] = time.monotonic()
            self._seen[rank] = seen
            self._show(rank, seen)
            if again:
                self._progress[self._slots[rank].actor.progress.remote()] = rank

    def _show(self, rank: int, seen: dict[str, Any]) -> None:
        for name in _MARKS:
            if name in seen["marks"]:
                self._mark(name, seen["marks"][name])
        for step in seen["steps"]:
            self.steps += rank == 0
            self._first.setdefault(rank, step["time"])
            if step["values"] and self._reports.take(rank, step):
                self._emit_step(rank, step)

    def _take_last_steps(self) -> None:
        """Collect all steps that ranks have made, after a failure. If a rank was lost, another one
        reports its steps."""
        lost = {end.who for end in self._ends if end.kind == LOST}
        left = [rank for rank in range(len(self._slots)) if f"rank {rank}" not in lost]
        self._progress = {ref: rank for ref, rank in self._progress.items() if rank in left}
        for rank in left:
            self._progress[self._slots[rank].actor.progress.remote()] = rank
        # The wait is limited, because Ray may not know yet that a machine is gone.
        self._hear(SETTLE_S, again=False)
        for rank, step in self._reports.missing():
            self._emit_step(rank, step)

    def _emit_step(self, rank: int, step: Mapping[str, Any]) -> None:
        own = {name: step[name] for name in ("step", "tokens", "time", "values")}
        self._emit("step", generation=self.number, rank=rank, **own)

    def _mark(self, name: str, at: float | None = None) -> None:
        if self._phases is not None and not self._phases.done:
            self._phases.end(name, at)

    def _recovered(self) -> None:
        """Handle the end of a recovery, when every rank has finished a step or has ended well."""
        phases, self._phases = self._phases, None
        if phases is not None:
            if self._first:
                phases.end("step", max(self._first.values()))
            self._emit("recovered", generation=self.number, phases=phases)

    def _tell_draining(self) -> None:
        """Make the replica or the job leave if one of its machines is being drained."""
        if time.monotonic() < self._drains_due:
            return
        self._drains_due = time.monotonic() + _DRAINS_S
        away = draining_nodes()
        self._notified = [
            rank for rank, slot in enumerate(self._slots) if slot.facts["node"] in away
        ]
        for rank in self._notified:
            self._slots[rank].actor.tell_to_end.remote()

    # ----------------------------------------------------------------- hangs

    def _look_for_hangs(self) -> None:
        limits, now = self._settings.limits, time.monotonic()
        running = [rank for rank in range(len(self._slots)) if rank not in self._finished]
        for rank in running:
            if now - self._heard[rank] > limits.beat:
                self._lost(f"rank {rank}")  # Neither its process nor its actor answers.
        if self._ends:
            return
        frozen = [rank for rank in running if self._seen[rank].get("silent_s", 0.0) > limits.beat]
        if frozen:
            self._hung(frozen, f"no sign of life for {limits.beat:g} s")
            return
        # While any rank makes progress, no rank hangs: the others rightly wait for that rank.
        seen = [self._seen[rank] for rank in running]
        if not seen or not all(seen):
            return
        newest = min(seen, key=lambda progress: progress["unchanged_s"])
        name = _LIMITS.get(newest["doing"], "start")
        limit = getattr(limits, name)
        if newest["unchanged_s"] > limit:
            self._hung(self._laggards(running), f"no {_EXPECTED[name]} for {limit:g} s")

    def _blame_the_silent(self) -> None:
        """If all ended ranks report another rank as lost, blame the rank that has neither ended nor
        reported.

        BytePS notices missing heartbeats of a stopped process before this driver's limit.
        """
        if not all(end.is_consequence for end in self._ends):
            return
        ended = {end.who for end in self._ends}
        silent = [
            rank
            for rank, seen in enumerate(self._seen)
            if f"rank {rank}" not in ended
            and rank not in self._finished
            and seen.get("silent_s", 0.0) > SILENT_S
        ]
        if silent:
            self._hung(silent, "no sign of life, and the others lost it")

    def _laggards(self, running: Sequence[int]) -> list[int]:
        """Return the ranks for which the others wait: those with the least progress. If no rank is
        behind, return all."""
        done = {rank: (self._seen[rank]["step"], self._seen[rank]["pushed"]) for rank in running}
        least = min(done.values())
        return [rank for rank in running if done[rank] == least]

    def _hung(self, ranks: Sequence[int], why: str) -> None:
        """Blame these ranks; every rank writes its stacks to its log, since the blamed ones may
        wait for another."""
        stacks = [slot.actor.stacks.remote() for slot in self._slots]
        ray.wait(stacks, num_returns=len(stacks), timeout=_CALL_S)
        for rank in ranks:
            try:
                lines = ray.get(stacks[rank], timeout=0)
            except ray.exceptions.RayError:
                lines = []
            at = time.time() - self._seen[rank].get("unchanged_s", 0.0)
            self._ends.append(End(who=f"rank {rank}", kind=HUNG, at=at, lines=[*lines, why]))

    # ----------------------------------------------------------------- ending

    def _stop(self) -> None:
        """End every rank, and servers that may have caused the failure. The pool replaces dead
        actors."""
        calls = [slot.actor.stop.remote() for slot in self._slots]
        ray.wait(calls, num_returns=len(calls), timeout=_CALL_S)
        self._servers.after(self._ends, self.steps)


_LIMITS = {
    **dict.fromkeys(("step", "saved", "evaluated"), "step"),
    **dict.fromkeys(("saving", "evaluating", "trained", "leaving"), "save"),
}
"""Limit of the next report, by the last report."""
_EXPECTED = {"start": "first step", "step": "further step", "save": "end of it"}
