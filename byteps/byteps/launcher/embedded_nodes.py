"""The scheduler and the servers that this process has started for one job."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from byteps.launcher.child import Child, find_executable, wait_all

REST_S = 5.0
"""Seconds in which the rest of a job that failed may end by itself."""
GRACE_S = 5.0
"""Seconds in which a process may end after a signal."""


class EmbeddedNodes:
    """Processes and variables of one start, to be undone.

    Their logs are in a folder that goes with the last of them, unless one has failed: then they say
    why.
    """

    def __init__(self, rank: int, settings: Mapping[str, str] | None = None) -> None:
        """
        Args:
            settings: of this job, which go before the environment's.
        """
        self.settings = dict(settings or {})
        self.children: list[Child] = []
        self.is_left = False
        """This rank has left the job in order; other ranks may not have."""
        self.ends_at_exit = False
        """The C library ends them with this process."""
        self._rank, self._pid = rank, os.getpid()
        self._folder: Path | None = None
        self._environment_before: dict[str, str | None] = {}

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

    def set_address(self, environment: Mapping[str, str]) -> None:
        """Have this process's variables name the cluster."""
        self._environment_before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)

    def forget_address(self) -> None:
        """Put the variables back."""
        for name, value in self._environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment_before = {}

    def leave(self) -> None:
        """This rank has left: they serve the others, and end by themselves once all have."""
        self.forget_address()
        self.is_left = True
        self._clean_up()

    def end(self, deadline: float) -> None:
        """Wait for their end until `deadline`, of time.monotonic(), or a moment after one has
        failed; end those that are left."""
        self.forget_address()
        try:
            wait_all(self.running, deadline, REST_S)
        finally:  # an interrupt ends the waiting, not the ending
            for number in (signal.SIGTERM, signal.SIGKILL):
                left: Sequence[Child] = self.running
                for child in left:
                    child.signal(number)
                wait_all(left, time.monotonic() + GRACE_S, GRACE_S)
            self.is_left = True
            self._clean_up()

    def _clean_up(self) -> None:
        if self.is_left and self.is_own and not self.running and not self.any_failed:
            shutil.rmtree(self._folder or "", ignore_errors=True)
