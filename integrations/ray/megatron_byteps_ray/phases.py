"""How long a recovery took, part by part."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

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
"""What ends each part, in the order in which they come."""


@dataclass
class Phases:
    """One recovery: when the failure was, and when each part ended, in seconds since the epoch."""

    failed_at: float
    ends: dict[str, float] = field(default_factory=dict)

    def end(self, name: str, at: float | None = None) -> None:
        """A part is done; of several ranks the last counts."""
        self.ends[name] = max(self.ends.get(name, 0.0), time.time() if at is None else at)

    @property
    def done(self) -> bool:
        return "step" in self.ends

    def seconds(self) -> dict[str, float]:
        """Each part's own length, and ``total``. A part that did not occur is left out."""
        result, before = {}, self.failed_at
        for name in ORDER:
            if name in self.ends:
                result[name] = max(0.0, self.ends[name] - before)
                before = max(before, self.ends[name])
        result["total"] = max(0.0, before - self.failed_at)
        return result

    def table(self) -> str:
        """For the driver's output."""
        lines = [
            f"  {ORDER.get(name, 'training again'):30s} {spent:7.2f} s"
            for name, spent in self.seconds().items()
        ]
        return "\n".join(lines)
