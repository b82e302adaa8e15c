"""A job whose servers keep an optimizer's state and have copies of it, of which some are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

from tests.chaos.broken_job import LIMIT_S
from tests.chaos.lasting_job import LastingJob
from tests.chaos.seeds import Fault

PACE_S = 0.03
FOUND_S = 8.0
"""Within these the scheduler knows of a server that is lost."""
COPIED = "has a copy of this server's state"


class CopyingJob(LastingJob):
    """Loses a server only while each one's state is copied: then no loss ends the job."""

    settings: ClassVar[Mapping[str, str]] = {**LastingJob.settings, "BYTEPS_BACKUP_STATE": "1"}

    def _start_worker(self, rank: int) -> None:
        size = str(self.script.workers)
        ranks = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._fork(rank, "with_copies", ranks, PACE_S)

    def _await_begin(self) -> None:
        self._one_loss = threading.Lock()
        super()._await_begin()
        for node in self.script.server_nodes[: self.script.servers]:
            self._await_text(node, COPIED)

    # ----- one loss after the other

    def _break(self, fault: Fault) -> None:
        if not fault.loses:
            return super()._break(fault)
        with self._one_loss:
            if not self._await(self._all_copied, LIMIT_S):
                return
            lost = self._lost()
            super()._break(fault)
            # It may have waited for a place: then nothing is lost.
            self._await(lambda: self._lost() > lost, fault.seconds + FOUND_S)

    def _await(self, holds: Callable[[], bool], seconds: float) -> bool:
        """False: it does not hold in time, or the job has ended."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or not self._processes["scheduler"].running:
                return False
            time.sleep(0.05)
        return True

    def _lost(self) -> int:
        return self._processes["scheduler"].text.count("another server has")

    def _all_copied(self) -> bool:
        replaced = self._processes["scheduler"].text.count("has taken the place of")
        everyone = [*self._processes.values(), *(process for _, process in self._earlier)]
        copied = sum(process.text.count(COPIED) for process in everyone)
        # Two say so when one has come: itself, and that whose copy it has.
        return self._lost() == replaced and copied >= self.script.servers + 2 * replaced
