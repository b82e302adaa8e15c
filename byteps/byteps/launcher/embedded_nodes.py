"""The scheduler and the servers that this process has started for one job."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from byteps.launcher.child import Child, end_all, find_executable, port_of
from byteps.launcher.host_servers import HostServers

REST_S = 5.0
"""Seconds in which the rest of a job that failed may end by itself."""
GRACE_S = 5.0
"""Seconds in which a process may end after a signal."""


class EmbeddedNodes:
    """Processes of one start.

    Their logs are in a folder that goes with the last of them, unless one has failed: then they say
    why.
    """

    def __init__(self, rank: int, settings: Mapping[str, str] | None = None) -> None:
        """
        Args:
            settings: of this job, which go before the environment's.
        """
        self.settings = dict(settings or {})
        self.address: dict[str, str] = {}
        """Settings that name the cluster: its scheduler, its numbers of nodes, its secret."""
        self.children: list[Child] = []
        self.is_left = False
        """This rank has left the job in order; other ranks may not have."""
        self.ends_at_exit = False
        """The C library ends them with this process."""
        self._rank, self._pid = rank, os.getpid()
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the logs."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="byteps-embedded-"))
        return self._folder

    @property
    def is_own(self) -> bool:
        """Whether this process has started them: a forked copy owns nothing."""
        return self._pid == os.getpid()

    @property
    def running(self) -> list[Child]:
        """Children that have not ended; none in a forked copy."""
        return [child for child in self.children if child.running] if self.is_own else []

    @property
    def any_failed(self) -> bool:
        return any(child.failed for child in self.children)

    def start(
        self,
        title: str,
        role: str,
        environment: Mapping[str, str],
        *arguments: str,
        cores: Collection[int] = (),
    ) -> Child:
        """Start a node that ends with this process, and tells the others that this rank was lost.

        Raises:
            BytePSError: it cannot be started.
        """
        log = self.folder / f"{title.replace(' ', '-')}.log"
        options = ("--role", role, f"--die-with-parent=worker {self._rank}", "--log", str(log))
        child = Child(
            title,
            [find_executable(), *options, *arguments],
            {**os.environ, **self.settings, **environment, "DMLC_ROLE": role},
            log,
            cores=cores,
            on_end=self._clean_up,
        )
        self.children.append(child)
        return child

    def start_scheduler(self, environment: Mapping[str, str], deadline: float) -> int:
        """Start the scheduler, wait until it listens, and return its port.

        Raises:
            BytePSError: it does not by `deadline`, of time.monotonic().
        """
        file = self.folder / "scheduler.port"
        environment = {**environment, "DMLC_PS_ROOT_PORT": "0"}
        scheduler = self.start("scheduler", "scheduler", environment, "--port-file", str(file))
        return port_of(scheduler, file, deadline)

    def start_servers(self, servers: HostServers, ranks: int) -> None:
        """Start this host's servers, next to so many ranks."""
        for number in range(servers.count):
            # After the workers of this host, so that all have metrics at ports of their own.
            local = {"BYTEPS_LOCAL_RANK": str(ranks + number), "BYTEPS_LOCAL_SIZE": str(ranks)}
            environment = {**self.address, **servers.environment, **local}
            self.start(f"server {number}", "server", environment, cores=servers.cores)

    def leave(self) -> None:
        """This rank has left: they serve the others, and end by themselves once all have."""
        self.is_left = True
        self._clean_up()

    def end(self, deadline: float) -> None:
        """Wait for their end until `deadline`, of time.monotonic(), or a moment after one has
        failed; end those that are left."""
        try:
            end_all(self.running, deadline, REST_S, GRACE_S)
        finally:
            self.leave()

    def _clean_up(self) -> None:
        if self.is_left and self.is_own and not self.running and not self.any_failed:
            shutil.rmtree(self._folder or "", ignore_errors=True)
