"""Step reports of all ranks. The job records those of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

Step = dict[str, Any]


class StepReports:
    """Chooses the reports to record: those of the reporter, the first rank from which the driver
    hears."""

    def __init__(self) -> None:
        self._reporter: int | None = None
        self._recorded = 0
        self._counts: dict[int, int] = {}
        """Number of reports of each rank, except the reporter."""
        self._ahead: dict[int, deque[tuple[int, Step]]] = {}
        """Steps that the reporter has not reported yet, by rank, with their numbers."""

    def take(self, rank: int, step: Step) -> bool:
        """Return whether to record this report."""
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
        """Yield the reports that a lost reporter has not made, each with its rank."""
        if self._ahead:
            rank = max(self._ahead, key=lambda rank: (len(self._ahead[rank]), -rank))
            yield from ((rank, step) for _, step in self._ahead[rank])
