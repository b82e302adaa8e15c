"""What ended an incarnation, and who is to blame."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """Why an incarnation ended."""

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
