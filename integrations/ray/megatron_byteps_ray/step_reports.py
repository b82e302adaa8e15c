"""Steps as ranks report them, of which the job records one rank's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

Step = dict[str, Any]


class StepReports:
    """Chooses which reports are recorded: those of the first rank that was heard, the reporter.

    The driver asks ranks a few times a second. A machine that is lost takes along the steps that it
    was not asked for; another rank that made them knows them as well. Every rank reports the same
    steps in the same order.
    """

    def __init__(self) -> None:
        self._reporter: int | None = None
        self._recorded = 0
        self._counts: dict[int, int] = {}
        """Reports of each rank but the reporter."""
        self._ahead: dict[int, deque[tuple[int, Step]]] = {}
        """Steps, by rank, that the reporter has not made yet, with their numbers."""

    def take(self, rank: int, step: Step) -> bool:
        """Whether this report is to be recorded."""
        if self._reporter is None:
            self._reporter = rank
        if rank == self._reporter:
            self._recorded += 1
            for ahead in self._ahead.values():
                while ahead and ahead[0][0] <= self._recorded:
                    ahead.popleft()
            return True
        number = self._counts[rank] = self._counts.get(rank, 0) + 1
        if number > self._recorded:
            self._ahead.setdefault(rank, deque()).append((number, step))
        return False

    def missing(self) -> Iterator[tuple[int, Step]]:
        """Reports that the reporter, which is lost, did not make, each with its rank."""
        if self._ahead:
            rank = max(self._ahead, key=lambda rank: (len(self._ahead[rank]), -rank))
            yield from ((rank, step) for _, step in self._ahead[rank])
