"""Scheduler and servers: they outlive ranks that fail, and take those that are started again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from . import scraping
from .failures import FAILED, LOST, End
from .pool import Pool
from .settings import Settings

_CALL_S = 120.0
_BLAMED = re.compile(r"\b(scheduler|server \d+)\b.*\bwas lost\b")


class Servers:
    """Those of a job, over all its incarnations. Not for several threads.

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
        return scraping.of_server(environment, index - 1) if index else {}

    def metrics(self) -> list[str]:
        """Where each server's are, as ``address:port``; empty where they are off."""
        first = scraping.first_port(self._settings.forwarded())
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
        """An incarnation has ended so, after so many steps: stop them unless they are above doubt.

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
