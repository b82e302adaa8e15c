"""A job that goes on when servers and replicas are lost; and what must hold of it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from bench.kit.emulation import Host
from scripts.children import Late
from tests.chaos.broken_job import LIMIT_S, Job
from tests.chaos.seeds import LONG_S, Fault, Script
from tests.multiproc.cluster import Nursery

REPLICA_PACE_S = 0.05


class LastingJob(Job):
    """Starts another server for each that is lost, and a killed replica again.

    Args:
        nursery: forks the workers, where they are Python's.
    """

    # Nothing but a peer's silence is found out by a limit.
    settings: ClassVar[Mapping[str, str]] = {
        "BYTEPS_REPLACE_SERVERS_S": "60",
        "BYTEPS_OP_TIMEOUT_S": "90",
        "BYTEPS_START_TIMEOUT_S": "20",
    }

    def __init__(
        self,
        script: Script,
        hosts: Sequence[Host],
        switch: str,
        programs: Path,
        folder: Path,
        nursery: Nursery | None,
    ) -> None:
        super().__init__(script, hosts, switch, programs, folder)
        self._nursery = nursery
        self._gone: deque[str] = deque()
        """Nodes that are to be started again."""

    # ----- processes

    def _start_workers(self, life: int) -> None:
        for index in range(self.script.servers):
            self._await_text(f"server {index}", "has taken this server")
        for index in range(self.script.spares):
            self._start_server(f"spare {index}")
        if not self.script.forks:
            return super()._start_workers(life)
        for rank in range(self.script.workers):
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        """A replica."""
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        number = {"BYTEPS_REPLICA": f"{rank}/{self.script.workers}"}
        self._fork(rank, "train", {**ranks, **number}, REPLICA_PACE_S)

    def _fork(self, rank: int, program: str, env: Mapping[str, str], pace: float) -> None:
        """Start a program of on_host.py as this worker."""
        node, folder = f"worker {rank}", self.folder / "workers"
        folder.mkdir(exist_ok=True)
        args = {
            "namespace": self._hosts[node].namespace,
            "steps": self.script.rounds,
            "pace": pace,
        }
        assert self._nursery is not None
        title = self._title_of_next(node)
        self._processes[node] = self._nursery.start(
            title, f"on_host:{program}", {**self._env, **env}, folder, args
        )

    def _title_of_next(self, node: str) -> str:
        """Of the node's next process."""
        if node not in self._processes:
            return node
        self._earlier.append((node, self._processes[node]))
        return f"{node} again {sum(one == node for one, _ in self._earlier)}"

    def _start_gone(self) -> None:
        while self._gone:
            node = self._gone.popleft()
            if node == "scheduler":
                life = 1 + sum(one == node for one, _ in self._earlier)
                command = [str(self._programs / "byteps-server"), "--role", node]
                self._spawn(node, command, self._env, life)
                continue
            if node.startswith("worker"):
                self._start_worker(int(node.split()[1]))
                continue
            self._start_server(node, 1 + sum(one == node for one, _ in self._earlier))

    # ----- the run

    def _await_begin(self) -> None:
        """Until all have come: none may be missing at the start."""
        self._await_text("scheduler", "the job is complete")

    def _await_text(self, node: str, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self._processes[node].text:
            if not self._processes[node].running or time.monotonic() > deadline:
                said = self._processes[node].text[-2000:]
                return self._wrong.append(f"{node} does not say '{text}': {said}")
            time.sleep(0.01)

    def _break(self, fault: Fault) -> None:
        was_there = self._processes[fault.node].running
        super()._break(fault)
        if not fault.loses or not was_there:
            return
        lasts = fault.kind in ("stop", "cut")
        # A replica that stood still is there, and has to find out.
        if not lasts or not fault.node.startswith("worker"):
            again = partial(self._gone.append, fault.node)
            away = lasts or fault.node == "scheduler"
            self._later(fault.seconds if away else 0.0, again)

    def _await_end(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(worker.running for worker in self._workers()) and time.monotonic() < deadline:
            # By this thread, and by no timer's: children end with the thread that started them.
            self._start_gone()
            time.sleep(0.02)
        self._mend()
        for node, process in [*self._processes.items(), *self._earlier]:
            try:
                process.wait(deadline - time.monotonic())
            except Late:
                self._wrong.append(f"{process.title} of {node} still ran after {LIMIT_S:g} s")

    def _mend(self) -> None:
        super()._mend()
        for _, process in self._earlier:
            process.send(signal.SIGCONT)

    def _judge(self, ended: dict[str, int]) -> None:
        super()._judge(ended)
        for node, process in [*self._processes.items(), *self._earlier]:
            if "AssertionError" in process.text:
                self._wrong.append(f"{node} has seen what is wrong: {process.text[-2000:]}")
        may_fail = {fault.node for fault in self.script.faults if fault.loses}
        for node, status in ended.items():
            if status != 0 and node not in may_fail:
                said = self._processes[node].text.strip()
                self._wrong.append(f"{node} did not go on, and ended with {status}: {said[-600:]}")


class ReturningJob(LastingJob):
    """Starts the scheduler again each time that it is killed."""

    settings: ClassVar[Mapping[str, str]] = {
        "BYTEPS_SCHEDULER_RETURN_S": "60",
        "BYTEPS_OP_TIMEOUT_S": "120",
        "BYTEPS_START_TIMEOUT_S": "20",
    }

    def _await_begin(self) -> None:
        super()._await_begin()
        for node in self.script.server_nodes:
            self._await_text(node, "the job is complete")

    def _await_end(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        others = [one for node, one in self._processes.items() if node != "scheduler"]
        while any(one.running for one in others) and time.monotonic() < deadline:
            self._start_gone()
            time.sleep(0.02)
        # One that comes when the job is over waits for another one.
        with contextlib.suppress(Late):
            self._processes["scheduler"].wait(LONG_S)
        self._processes["scheduler"].send(signal.SIGKILL)
        super()._await_end()
