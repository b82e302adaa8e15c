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
"""Time in seconds that the other processes of a failed job have to end by themselves."""
GRACE_S = 5.0
"""Time in seconds that a process has to end after a signal."""


class EmbeddedNodes:
    """Scheduler and servers that this process has started for one job.

    Each process has a log in a common folder. The folder is removed when the last process has
    ended. If a process has failed, the folder is kept, because its logs have the reason.
    """

    def __init__(self, rank: int, settings: Mapping[str, str] | None = None) -> None:
        """
        Args:
            settings: settings of this job; they override the environment.
        """
        self.settings = dict(settings or {})
        self.address: dict[str, str] = {}
        """Settings with which nodes join the cluster: scheduler, numbers of nodes, secret."""
        self.children: list[Child] = []
        self.is_left = False
        """Whether this rank has left the job without a failure. Other ranks may still be in it."""
        self.keeps_logs = False
        """Whether the logs are kept even if no child has failed by itself."""
        self.ends_at_exit = False
        """Whether a C exit handler of this process ends the children."""
        self._rank, self._pid = rank, os.getpid()
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of the logs."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="byteps-embedded-"))
        return self._folder

    @property
    def is_own(self) -> bool:
        """Whether this process has started the nodes. A forked process has not."""
        return self._pid == os.getpid()

    @property
    def running(self) -> list[Child]:
        """Children that have not ended. Empty in a forked process."""
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
        """Start a node. It ends with this process, and then tells the other nodes that this rank
        was lost.

        Raises:
            BytePSError: the node cannot be started.
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
            BytePSError: the scheduler does not listen by `deadline` (a time.monotonic()).
        """
        file = self.folder / "scheduler.port"
        environment = {**environment, "DMLC_PS_ROOT_PORT": "0"}
        scheduler = self.start("scheduler", "scheduler", environment, "--port-file", str(file))
        return port_of(scheduler, file, deadline)

    def start_servers(self, servers: HostServers, ranks: int) -> None:
        """Start this host's servers. `ranks`: number of ranks on this host."""
        for number in range(servers.count):
            # Servers' local ranks follow those of workers, so that each process has a metrics port
            # of its own.
            local = {"BYTEPS_LOCAL_RANK": str(ranks + number), "BYTEPS_LOCAL_SIZE": str(ranks)}
            environment = {**self.address, **servers.environment, **local}
            self.start(f"server {number}", "server", environment, cores=servers.cores)

    def leave(self) -> None:
        """Record that this rank has left. The nodes serve the other ranks, and end once all have
        left."""
        self.is_left = True
        self._clean_up()

    def end(self, deadline: float) -> None:
        """Wait until all nodes have ended, or until `deadline` (a time.monotonic()), or REST_S
        after a failure. Then end the others."""
        try:
            end_all(self.running, deadline, REST_S, GRACE_S)
        finally:
            self.leave()

    def _clean_up(self) -> None:
        keeps_folder = self.keeps_logs or self.any_failed
        if self.is_left and self.is_own and not self.running and not keeps_folder:
            shutil.rmtree(self._folder or "", ignore_errors=True)
