"""Servers that are killed while replicas train, and others that wait for their places."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from bench.kit.emulation import LOOPBACK
from bench.kit.launch import start_server
from bench.kit.processes import Processes

REPLACED = "has taken the place of the server that was lost"
WAITS = "waiting for the place of a server that is lost"


class Servers:
    """The servers of a job on this machine, and the spares.

    Args:
        count: how many have places; they are started already.
        environment: what leads to the job.
    """

    def __init__(self, processes: Processes, count: int, environment: Mapping[str, str]) -> None:
        self._processes, self._environment = processes, environment
        self._titles = [f"server-{index}" for index in range(count)]
        self._started = count

    def start(self) -> None:
        """Start one more, which waits for a place."""
        start_server(self._started, LOOPBACK, self._processes, self._environment)
        self._titles.append(f"server-{self._started}")
        self._started += 1

    def have_spare(self) -> bool:
        texts = map(self._processes.text_of, self._titles)
        return any(WAITS in text and "this is server" not in text for text in texts)

    def kill(self, rank: int) -> None:
        """Kill the one that has this rank, by SIGKILL."""
        mine = f"this is server {rank},"
        (title,) = (one for one in self._titles if mine in self._processes.text_of(one))
        self._titles.remove(title)
        self._processes.kill(title)

    def replaced(self) -> int:
        """How many have been replaced by now."""
        return self._processes.text_of("scheduler").count(REPLACED)


class ServerDeaths:
    """Kills one server after the other, at intervals, while another one waits for its place."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.all: list[dict[str, Any]] = []
        self._due: float | None = None

    def __call__(self, job: Any, now: float) -> None:
        options, servers = self.options, job.servers
        if self.all and "back_s" not in self.all[-1] and servers.replaced() == len(self.all):
            self.all[-1]["back_s"] = now - self.all[-1]["at"]
        if self._due is None and job.lives and len(job.lives[0].ends) >= options.spare:
            for _ in range(options.spare_servers):
                servers.start()
            self._due = now
        done = len(self.all) == options.kills or (self.all and "back_s" not in self.all[-1])
        if self._due is None or now < self._due or done or not servers.have_spare():
            return
        rank = len(self.all) % options.servers
        servers.kill(rank)
        self.all.append({"killed": f"server {rank}", "at": now})
        servers.start()
        self._due = now + options.kill_every
