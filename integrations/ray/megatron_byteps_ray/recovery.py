"""Causes of a generation's end; and scheduler and servers, which outlive failing ranks."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from .cluster import Pool
from .settings import Settings, first_metrics_port, metrics_of_server

# Kinds of ends, the likeliest cause first: a lost machine makes ranks fail, but not the reverse.
LOST, KILLED, HUNG, LEFT, FAILED = "lost", "killed", "hung", "left", "failed"
_ORDER = (LOST, KILLED, HUNG, LEFT, FAILED)
LEFT_STATUS = 128 + signal.SIGTERM
"""Exit status of a rank whose replica was asked to end, and has left the other replicas."""

# Texts by which BytePS and torch.distributed report the failure of another process.
_CONSEQUENCES = ("was lost", "BytePSError", "gloo", "NCCL", "Connection reset", "DistNetworkError")


@dataclass(frozen=True, kw_only=True)
class End:
    """End of a process, or of the actor that owned it."""

    who: str
    """Name of the process: "rank 3", "server 0" or "scheduler"."""
    kind: str
    """Kind of the end. ``lost``: the actor is gone. ``killed``: by a signal. ``hung``: the driver
    has ended it for lack of progress. ``left``: its replica was asked to end. ``failed``: by its
    exit status."""
    at: float
    """Seconds since the epoch, on the clock of the process's machine."""
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    """Last lines of its log."""

    @classmethod
    def reported(cls, who: str, report: dict[str, Any], *, may_leave: bool = False) -> End:
        """Build it from an actor's report. ``may_leave``: whether the process is a rank of a
        replica."""
        status = report["status"]
        kind = KILLED if status is not None and status < 0 else FAILED
        if status == LEFT_STATUS and may_leave:
            kind = LEFT
        return cls(who=who, kind=kind, at=report["at"], status=status, lines=report["lines"])

    @classmethod
    def lost(cls, who: str) -> End:
        """Build it for an actor that is gone."""
        return cls(who=who, kind=LOST, at=time.time())

    @property
    def rank(self) -> int | None:
        role, _, number = self.who.partition(" ")
        return int(number) if role == "rank" else None

    @property
    def is_consequence(self) -> bool:
        """Return whether the last lines blame another process."""
        if self.kind != FAILED:
            return False
        if self.rank is None:
            return True  # scheduler and servers fail by themselves only when a node was lost
        return any(word in line for line in self.lines[-3:] for word in _CONSEQUENCES)

    def __str__(self) -> str:
        if self.kind == LOST:
            return f"{self.who} was lost with its actor"
        if self.kind == KILLED:
            return f"{self.who} was killed by signal {-(self.status or 0)}"
        if self.kind == LEFT:
            return f"{self.who} was told to end, and has left"
        last = f": {self.lines[-1]}" if self.lines else ""
        if self.kind == HUNG:
            return f"{self.who} hung{last}"
        return f"{self.who} ended with exit status {self.status}{last}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason for the end of a generation."""

    causes: list[End]
    """Ends that caused the failure."""
    others: list[End]
    """Ends that are consequences."""

    @classmethod
    def of(cls, ends: Sequence[End]) -> Failure:
        """Separate causes from consequences; ``ends`` is not empty."""
        first = min(ends, key=lambda end: (_ORDER.index(end.kind), end.is_consequence, end.at))
        rank_of = (first.kind, first.is_consequence)
        # If processes failed by themselves, only the first one counts, because later failures may
        # be consequences.
        alone = first.kind == FAILED
        causes = [
            end
            for end in ends
            if (end is first if alone else (end.kind, end.is_consequence) == rank_of)
        ]
        return cls(causes=causes, others=[end for end in ends if end not in causes])

    def __str__(self) -> str:
        return "; ".join(str(end) for end in self.causes)

    def record(self) -> dict[str, Any]:
        """Return a record for the state file."""
        return {"causes": [asdict(end) for end in self.causes], "text": str(self)}


_CALL_S = 120.0
_BLAMED = re.compile(r"\b(scheduler|server \d+)\b.*\bwas lost\b")


class Servers:
    """Scheduler and servers of a job, over all its generations. Not thread-safe.

    They run with ``--keep``, and are restarted only if they may have caused a failure.
    """

    def __init__(self, settings: Settings, pool: Pool, secret: str, *, keep: bool = True) -> None:
        """``keep``: whether they outlive failing ranks."""
        self._settings = settings
        self._keep = keep
        self._pool = pool
        self._secret = secret
        self._known: dict[str, str] = {}
        self._hosts: dict[int, str] = {}
        self.watched: dict[Any, str] = {}
        """Calls that return when a process has ended, by the process's name; see `take`."""

    def start(self, ranks: int) -> tuple[dict[str, str], End | None]:
        """Start scheduler and servers, unless they are running.

        Returns:
            the variables for ranks, and the End that has prevented the start, if any.
        """
        if not self._pool.byteps:
            return {}, None
        refs = list(self.watched)
        if refs and not ray.wait(refs, num_returns=1, timeout=0)[0]:
            return {**self._known, "DMLC_NUM_WORKER": str(ranks)}, None
        self.stop()
        environment = self._environment(ranks)
        self._known = {"DMLC_NUM_SERVER": str(len(self._pool.byteps) - 1)}
        limit = self._settings.limits.start
        for index, actor in enumerate(self._pool.byteps):
            who = "scheduler" if index == 0 else f"server {index - 1}"
            role = "scheduler" if index == 0 else "server"
            own = {**environment, **self._known, **self._port(environment, index)}
            try:
                host, port = ray.get(actor.start.remote(role, own, limit), timeout=limit + _CALL_S)
            except ray.exceptions.RayActorError:
                self._pool.replace_byteps(index)
                return {}, End(who=who, kind=LOST, at=time.time())
            except ray.exceptions.RayError as error:
                lines = str(error).splitlines()
                return {}, End(who=who, kind=FAILED, at=time.time(), lines=lines)
            self._hosts[index] = host
            if index == 0:
                self._known |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
            self.watched[actor.wait_end.remote()] = who
        return {**self._known, "DMLC_NUM_WORKER": str(ranks)}, None

    def _environment(self, ranks: int) -> dict[str, str]:
        """Return the environment of scheduler and servers."""
        environment = self._settings.forwarded()
        environment |= {"BYTEPS_SECRET": self._secret} if self._secret else {}
        environment |= self._settings.profile.of_byteps() if self._settings.profile else {}
        size = {"BYTEPS_KEEP": "1"} if self._keep else {"DMLC_NUM_WORKER": str(ranks)}
        return environment | size

    @staticmethod
    def _port(environment: Mapping[str, str], index: int) -> dict[str, str]:
        """Return the variable for a server's metrics port. The scheduler, which is the first
        process, has none."""
        return metrics_of_server(environment, index - 1) if index else {}

    def metrics(self) -> list[str]:
        """Return the metrics address of each server, ``address:port``; empty if metrics are off."""
        first = first_metrics_port(self._settings.forwarded())
        servers = sorted(self._hosts.items())[1:] if first else []
        return [f"{host}:{first + index - 1}" for index, host in servers]

    def replace(self, who: str) -> bool:
        """Start a replacement for a lost server. The ranks wait for it.

        Returns:
            whether the replacement was started. False if BYTEPS_REPLACE_SERVERS_S is 0, or if the
            start fails.
        """
        environment = self._environment(self._settings.ranks)
        try:
            waits = float(environment.get("BYTEPS_REPLACE_SERVERS_S", "0")) > 0
        except ValueError:  # the scheduler has reported the invalid value
            waits = False
        if not waits or not who.startswith("server") or not self._known:
            return False
        limit = self._settings.limits.start
        index = int(who.split()[1]) + 1
        actor = self._pool.byteps[index]
        try:
            own = {**environment, **self._known, **self._port(environment, index)}
            call = actor.start.remote("server", own, limit)
            self._hosts[index], _ = ray.get(call, timeout=limit + _CALL_S)
        except ray.exceptions.RayError:
            return False
        self.watched[actor.wait_end.remote()] = who
        return True

    def take(self, ref: Any) -> tuple[str, dict[str, Any] | None]:
        """Return the name of a process that has ended, and its actor's report. None: the actor is
        lost, and is replaced."""
        who = self.watched.pop(ref)
        try:
            return who, ray.get(ref)
        except ray.exceptions.RayError:
            self._pool.replace_byteps(0 if who == "scheduler" else int(who.split()[1]) + 1)
            return who, None

    def after(self, ends: Sequence[End], steps: int) -> None:
        """Handle the end of a generation after `steps` steps. Stop the servers if they may be at
        fault.

        The servers are not at fault if ranks failed by themselves after a step. After the loss of a
        machine, servers may still count it as a member. If a server hangs, the ranks' errors name
        it.
        """
        doubted = any(end.rank is None or end.kind == LOST for end in ends) or any(
            _BLAMED.search(line) for end in ends for line in end.lines
        )
        if doubted or not ends or not steps:
            self.stop()

    def wait_end(self, limit_s: float) -> None:
        """Wait until the servers of a successful job have ended by themselves and written their
        files."""
        refs = list(self.watched)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=limit_s)

    def stop(self) -> None:
        """End all of them, and wait for their ends. Actors that do not answer are left to the
        pool."""
        calls = [actor.stop.remote() for actor in self._pool.byteps]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_CALL_S)
        self.watched.clear()
        self._known = {}
