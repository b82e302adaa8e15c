"""A job of replicas: each is restarted alone, while the others go on.

Replicas meet only at the BytePS servers. So each is a :class:`.job.Job` with actors of its own, and
a thread that drives it: a lost rank restarts its replica, which takes its state from the others.
Scheduler and servers are of all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import ray

from . import scraping
from .failures import End
from .job import Job, Listener
from .pool import JobError, Pool
from .servers import Servers
from .settings import Settings

_POLL_S = 0.25
_END_S = 60.0
"""For scheduler and servers to end by themselves after the replicas."""


class Replicas:
    """Trains on the cluster that ``ray.init`` joined."""

    def __init__(self, settings: Settings, listener: Callable[[int], Listener]) -> None:
        """``listener`` makes the listener of a replica, by its number; see :class:`.job.Job`."""
        if "BYTEPS_START_TIMEOUT_S" not in settings.forwarded():
            # The actors of one replica may be there long before those of another one.
            waits = {"BYTEPS_START_TIMEOUT_S": f"{settings.limits.start:g}"}
            settings = replace(settings, environment={**settings.environment, **waits})
        self._settings = settings
        self._listener = listener
        self._secret = settings.secret()
        self.pool = Pool(settings, of_ranks=False)
        """The actors of scheduler and servers."""
        self._servers = Servers(settings, self.pool, self._secret, keep=False)
        self._done = threading.Event()
        """A replica has trained to the end, or none can."""
        self._errors: dict[int, BaseException] = {}
        self.jobs: list[Job] = []

    def run(self) -> None:
        """Train to the end. Also where some replicas are given up, as long as one gets there.

        Raises:
            JobError: none did, or there is no room.
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
                # Daemons: what ends this thread ends the driver, and its actors with it.
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
        """Write where Prometheus finds the servers; each replica does so for its ranks."""
        if servers := self._servers.metrics():
            folder = self._settings.folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            scraping.write_list(folder, 0, servers, [])

    def _job(self, number: int, known: dict[str, str]) -> Job:
        settings = self._settings
        own = {**known, "BYTEPS_REPLICA": f"{number}/{settings.replicas}"}
        own |= {"BYTEPS_SECRET": self._secret} if self._secret else {}
        # After the servers' ports those of a replica's ranks, and then those of the next one's.
        before = settings.servers + number * (settings.ranks // settings.replicas)
        own |= scraping.of_ranks(settings.forwarded(), before)
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
        """Replace servers until all replicas have ended. What of BytePS was lost for good."""
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
                lost = str(End.lost(who) if end is None else End.told(who, end))
                self._done.set()  # no replica can go on without it
        return lost
