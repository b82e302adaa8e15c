"""What ended a generation, and what the next one finds: scheduler and servers, which outlive
ranks that fail, and the training state, in actors' memory or in the checkpoint.
"""

from __future__ import annotations

import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from .cluster import Pool, Slot
from .settings import Settings, first_metrics_port, metrics_of_server

# The first is the likeliest cause: a lost machine makes others fail, and never the other way round.
LOST, KILLED, HUNG, LEFT, FAILED = "lost", "killed", "hung", "left", "failed"
_ORDER = (LOST, KILLED, HUNG, LEFT, FAILED)
LEFT_STATUS = 128 + signal.SIGTERM
"""The exit status of a rank whose replica was told to end, and has left the others."""

# How BytePS and torch.distributed say that somebody else failed.
_CONSEQUENCES = ("was lost", "BytePSError", "gloo", "NCCL", "Connection reset", "DistNetworkError")


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one process, or of the actor that owned it."""

    who: str
    """"rank 3", "server 0" or "scheduler"."""
    kind: str
    """``lost``: its actor is gone. ``killed``: by a signal. ``hung``: it was ended for lack of
    progress. ``left``: its replica was told to end. ``failed``: its exit status."""
    at: float
    """Seconds since the epoch, by the clock of its machine."""
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    """The last of its log."""

    @classmethod
    def told(cls, who: str, report: dict[str, Any], *, may_leave: bool = False) -> End:
        """What its actor reports. ``may_leave``: it is a rank of a replica."""
        status = report["status"]
        kind = KILLED if status is not None and status < 0 else FAILED
        if status == LEFT_STATUS and may_leave:
            kind = LEFT
        return cls(who=who, kind=kind, at=report["at"], status=status, lines=report["lines"])

    @classmethod
    def lost(cls, who: str) -> End:
        """Its actor is gone."""
        return cls(who=who, kind=LOST, at=time.time())

    @property
    def rank(self) -> int | None:
        role, _, number = self.who.partition(" ")
        return int(number) if role == "rank" else None

    @property
    def is_consequence(self) -> bool:
        """Whether its last words blame another process."""
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
    """Why a generation ended."""

    causes: list[End]
    """Those to blame."""
    others: list[End]
    """Those that failed because of them."""

    @classmethod
    def of(cls, ends: Sequence[End]) -> Failure:
        """Tell causes from consequences; ``ends`` has at least one."""
        first = min(ends, key=lambda end: (_ORDER.index(end.kind), end.is_consequence, end.at))
        rank_of = (first.kind, first.is_consequence)
        # Of those that failed by themselves only the first: the others may have failed for it.
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
        """For the state file."""
        return {"causes": [asdict(end) for end in self.causes], "text": str(self)}


_CALL_S = 120.0
_BLAMED = re.compile(r"\b(scheduler|server \d+)\b.*\bwas lost\b")


class Servers:
    """Those of a job, over all its generations. Not for several threads.

    They run with ``--keep``, and are started anew only where a failure may have been theirs.
    """

    def __init__(self, settings: Settings, pool: Pool, secret: str, *, keep: bool = True) -> None:
        """``keep``: they outlive ranks that fail."""
        self._settings = settings
        self._keep = keep
        self._pool = pool
        self._secret = secret
        self._known: dict[str, str] = {}
        self._hosts: dict[int, str] = {}
        self.watched: dict[Any, str] = {}
        """Calls that return when a process has ended, and whose it is. `take` what has."""

    def start(self, ranks: int) -> tuple[dict[str, str], End | None]:
        """Start them, unless they run.

        Returns:
            what the ranks must know of them, and what kept them from starting.
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
        """Of scheduler and servers."""
        environment = self._settings.forwarded()
        environment |= {"BYTEPS_SECRET": self._secret} if self._secret else {}
        environment |= self._settings.profile.of_byteps() if self._settings.profile else {}
        kept = {"BYTEPS_KEEP": "1"} if self._keep else {"DMLC_NUM_WORKER": str(ranks)}
        return environment | kept

    @staticmethod
    def _port(environment: Mapping[str, str], index: int) -> dict[str, str]:
        """Of a server's metrics; the scheduler, which is the first, has none."""
        return metrics_of_server(environment, index - 1) if index else {}

    def metrics(self) -> list[str]:
        """Where each server's are, as ``address:port``; empty where they are off."""
        first = first_metrics_port(self._settings.forwarded())
        servers = sorted(self._hosts.items())[1:] if first else []
        return [f"{host}:{first + index - 1}" for index, host in servers]

    def replace(self, who: str) -> bool:
        """Start a server in the place of one that was lost, while the ranks wait for it.

        Returns:
            False where BYTEPS_REPLACE_SERVERS_S does not say that they do, or it cannot start.
        """
        environment = self._environment(self._settings.ranks)
        try:
            waits = float(environment.get("BYTEPS_REPLACE_SERVERS_S", "0")) > 0
        except ValueError:  # the scheduler has said so
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
        """Who has ended, and how; None: with its actor, which is replaced."""
        who = self.watched.pop(ref)
        try:
            return who, ray.get(ref)
        except ray.exceptions.RayError:
            self._pool.replace_byteps(0 if who == "scheduler" else int(who.split()[1]) + 1)
            return who, None

    def after(self, ends: Sequence[End], steps: int) -> None:
        """A generation has ended so, after so many steps: stop them unless they are above doubt.

        They are where ranks failed by themselves, after a step. A machine that was lost may still
        be a member of the job for them, and a server that hangs is named by the ranks.
        """
        doubted = any(end.rank is None or end.kind == LOST for end in ends) or any(
            _BLAMED.search(line) for end in ends for line in end.lines
        )
        if doubted or not ends or not steps:
            self.stop()

    def wait_end(self, limit_s: float) -> None:
        """After a job that ended well: wait until they have ended by themselves, their files
        written."""
        refs = list(self.watched)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=limit_s)

    def stop(self) -> None:
        """End them all, and wait for that; actors that do not answer are left to the pool."""
        calls = [actor.stop.remote() for actor in self._pool.byteps]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_CALL_S)
        self.watched.clear()
        self._known = {}


_ASK_S = 60.0
_MOVE_S = 600.0


class Recovery:
    """Chooses peers for copies, and finds after a failure the newest state that all ranks have."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._job = secrets.token_hex(8)
        self._ranks = 0
        """Of the generation before; 0: there was none."""
        self._restored: int | None = None
        self._refused = ""
        self.where = ""
        """Where copies are, for a person."""

    def after(self, failure: Failure, steps: int) -> None:
        """A generation with so many steps failed. A state that does harm is not taken twice."""
        alone = any(end.kind == FAILED for end in failure.causes)
        if self._restored is not None and not steps and alone:
            self._refused = f"ranks that started from step {self._restored} of it failed"

    def prepare(self, slots: Sequence[Slot], pool: Sequence[Slot]) -> dict[str, Any] | None:
        """Bring each rank's state to its actor, if every rank's of one step is there.

        Returns:
            ``source`` (``memory`` or ``checkpoint``), ``seconds``, and ``step``, ``bytes``,
            ``moved`` (ranks whose state another actor had) and ``ranks``, or ``why`` not. None
            for the first generation.
        """
        before, self._restored = self._ranks, None
        self._ranks = len(slots)
        refused, self._refused = self._refused, ""
        if not before:
            return None
        began = time.monotonic()
        if not refused and before != len(slots):
            refused = f"{before} ranks became {len(slots)}"
        found = {} if refused else self._collect(slots, pool)
        event = {"source": "checkpoint", "why": refused} if refused else found
        return {**event, "seconds": time.monotonic() - began}

    def _collect(self, slots: Sequence[Slot], pool: Sequence[Slot]) -> dict[str, Any]:
        holders = self._ask(pool)
        steps = {step for _, step in holders}
        ranks = range(len(slots))
        whole = [step for step in steps if all((rank, step) in holders for rank in ranks)]
        if not whole:
            return {"source": "checkpoint", "why": _what_is_missing(holders, ranks)}
        step, size, moves = max(whole), 0, []
        for rank, slot in enumerate(slots):
            own = holders[rank, step]
            size += next(iter(own.values()))
            if slot.bundle not in own:
                holder = next(other for other in pool if other.bundle in own)
                moves.append(holder.actor.send_snapshot.remote(slot.actor, self._job, rank, step))
        try:
            ray.get(moves, timeout=_MOVE_S)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            return {
                "source": "checkpoint",
                "why": f"the state of step {step} did not arrive: {why}",
            }
        self._restored = step
        counts = {"bytes": size, "moved": len(moves), "ranks": len(slots)}
        return {"source": "memory", "step": step, **counts}

    def _ask(self, pool: Sequence[Slot]) -> dict[tuple[int, int], dict[int, int]]:
        """By rank and step: the bundles of the actors that have this state, with its bytes."""
        asked = {slot.actor.snapshots.remote(self._job): slot for slot in pool}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S)
        holders: dict[tuple[int, int], dict[int, int]] = {}
        for ref in answered:
            try:
                held = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # lost meanwhile
            for key, size in held.items():
                holders.setdefault(key, {})[asked[ref].bundle] = size
        return holders

    def orders(
        self, number: int, slots: Sequence[Slot], spares: Sequence[Slot]
    ) -> list[Mapping[str, Any]]:
        """For each rank of this generation: what its actor does with its state.

        Spares forget what is of no use any more, and may hold copies.
        """
        begun = [
            spare.actor.begin_snapshots.remote(self._job, number, self._restored)
            for spare in spares
        ]
        if begun:
            ray.wait(begun, num_returns=len(begun), timeout=_ASK_S)
        peers = [_peer(rank, slots, spares) for rank in range(len(slots))]
        apart = all(
            peer is not None and peer.facts["node"] != slot.facts["node"]
            for peer, slot in zip(peers, slots, strict=True)
        )
        self.where = (
            "copies are on another machine"
            if apart
            else "some copies are on the same machine"
            if all(peers)
            else "there is no other actor for a copy"
        )
        return [
            {
                "job": self._job,
                "number": number,
                "rank": rank,
                "peer": peer.actor if peer else None,
                "interval": self._interval,
                "restore": self._restored,
            }
            for rank, peer in enumerate(peers)
        ]


def _peer(rank: int, slots: Sequence[Slot], spares: Sequence[Slot]) -> Slot | None:
    """Who holds a copy of this rank's state: the next rank on another machine, else a spare there,
    else the next rank, else a spare."""
    others = [slots[(rank + far) % len(slots)] for far in range(1, len(slots))]
    # Not all ranks to the same spare.
    idle = [spares[(rank + far) % len(spares)] for far in range(len(spares))]
    node = slots[rank].facts["node"]
    apart = [slot for slot in [*others, *idle] if slot.facts["node"] != node]
    return next(iter([*apart, *others, *idle]), None)


def _what_is_missing(holders: Mapping[tuple[int, int], Any], ranks: Sequence[int]) -> str:
    """Why there is no step of which every rank's state is there."""
    steps = [step for _, step in holders]
    if not steps:
        return "no rank's state was kept yet, or all of it was lost"
    lost = [rank for rank in ranks if (rank, max(steps)) not in holders]
    names = ", ".join(map(str, lost))
    return (
        f"the state of step {max(steps)} is not there for rank {names}, nor is an older one whole"
    )
