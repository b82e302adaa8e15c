"""A job on emulated hosts that its script breaks, and the checks of its end."""

from __future__ import annotations

import errno
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from bench.kit.emulation import Host
from scripts.children import Late, Spawned
from tests.chaos.seeds import FROM_THE_START, Fault, Script
from tests.multiproc.cluster import Nursed

LINK_BITS = 200_000_000
LIMIT_S = 180.0
"""Time limit of a run, for a busy machine; the timeouts below normally end a job."""
TIMEOUTS = {
    "BYTEPS_PEER_TIMEOUT_S": "5",
    "BYTEPS_START_TIMEOUT_S": "10",
    "BYTEPS_OP_TIMEOUT_S": "12",
    "BYTEPS_RECONNECT_TIMEOUT_S": "4",
    "BYTEPS_STOP_TIMEOUT_S": "1",
}
MOST_LIVES = 8
"""Largest number of starts of a kept job's workers. One fault causes fewer starts."""
DISK_BYTES = 16 << 10
"""Size of the full file system, for a node's timeline."""


ENDED_BY = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
"""Signals by the kind of fault."""
Process = Spawned | Nursed


@dataclass(frozen=True, kw_only=True)
class Result:
    script: Script
    ended: dict[str, int]
    """Exit status of each node, -n for signal n. In a kept job this is the status of the node's
    last process."""
    seconds: float
    wrong: list[str]
    """Failed checks."""
    lives: int = 1
    """Number of starts of the workers."""

    replaced: int = 0
    """Number of replaced servers."""

    @property
    def survived(self) -> bool:
        # A replica may return after the other replicas have ended. Then it cannot join, and its
        # status is not 0.
        lasts = self.script.spares > 0 or self.script.returns
        return all(status == 0 for status in self.ended.values()) or (lasts and not self.wrong)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _statuses_of(faults: Sequence[Fault], node: str) -> set[int]:
    """Get the statuses with which a node may end after a signal."""
    kinds = {fault.kind for fault in faults if fault.node == node}
    # A node without a rank in the job does not catch SIGTERM yet.
    given = {"kill": {-signal.SIGKILL}, "term": {-signal.SIGTERM, 128 + signal.SIGTERM}}
    return {status for kind in kinds & given.keys() for status in given[kind]}


class Job:
    """A run of a script on hosts that survive it."""

    limits: ClassVar[Mapping[str, str]] = TIMEOUTS
    settings: ClassVar[Mapping[str, str]] = {}
    """Additional environment variables of all nodes."""

    def __init__(
        self, script: Script, hosts: Sequence[Host], switch: str, programs: Path, folder: Path
    ) -> None:
        self.script = script
        self.folder = folder
        self._hosts = dict(zip(script.nodes, hosts, strict=False))
        self._ports = {node: f"port{i}" for i, node in enumerate(script.nodes)}
        self._switch = switch
        self._programs = programs
        self._processes: dict[str, Process] = {}
        self._timers: list[threading.Timer] = []
        self._wrong: list[str] = []
        self._lock = threading.Lock()
        self._full_disks: list[Path] = []
        self._env: dict[str, str] = {}
        self._earlier: list[tuple[str, Process]] = []
        self._lives = 1

    def run(self) -> Result:
        begin = time.monotonic()
        try:
            self._start()
            self._await_begin()
            for fault in self.script.faults:
                if fault.kind not in FROM_THE_START:
                    self._later(fault.at_s, partial(self._break, fault))
            self._await_end()
        finally:
            for timer in self._timers:
                timer.cancel()
                timer.join()
            self._mend()
            for process in [*self._processes.values(), *(old for _, old in self._earlier)]:
                process.kill()
            for disk in self._full_disks:
                run("umount", str(disk))
                disk.rmdir()
        ended = {node: process.wait(0) for node, process in self._processes.items()}
        self._judge(ended)
        seconds = round(time.monotonic() - begin, 2)
        return Result(
            script=self.script,
            ended=ended,
            seconds=seconds,
            wrong=self._wrong,
            lives=self._lives,
            replaced=self._processes["scheduler"].text.count("has taken the place of"),
        )

    # ----- processes

    def _start(self) -> None:
        script, port_file = self.script, self.folder / "scheduler.port"
        env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder),
            **self.limits,
            **self.settings,
            "BYTEPS_SECRET": secrets.token_hex(32),
            "BYTEPS_PARTITION_BYTES": "65536",
            "DMLC_PS_ROOT_URI": self._hosts["scheduler"].address,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": str(script.workers),
            "DMLC_NUM_SERVER": str(script.servers),
        }
        if script.keep:
            # A process may miss the end of the last generation, and wait for another generation.
            # This limit ends it.
            env |= {"BYTEPS_KEEP": "1", "BYTEPS_KEEP_TIMEOUT_S": "30"}
        if script.tls:
            env["BYTEPS_TLS"] = "1"
        server = str(self._programs / "byteps-server")
        scheduler = [server, "--role", "scheduler", "--port-file", str(port_file)]
        self._spawn("scheduler", scheduler, env)
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            if not self._processes["scheduler"].running:
                return  # the job could not begin, and its messages say why
            if time.monotonic() > deadline:
                raise RuntimeError("the scheduler did not begin to listen")
            time.sleep(0.01)
        env["DMLC_PS_ROOT_PORT"] = port_file.read_text().split()[1]
        self._env = env
        for index in range(script.servers):
            self._start_server(f"server {index}")
        self._start_workers(0)

    def _start_server(self, node: str, life: int = 0) -> None:
        command = [str(self._programs / "byteps-server"), "--role", "server"]
        self._spawn(node, command, self._env, life)

    def _start_workers(self, life: int) -> None:
        script = self.script
        arguments = {"rounds": script.rounds, "tensors": script.tensors, "bytes": script.size}
        worker = [str(self._programs / "sum_worker"), "--pause-ms", "5"]
        worker += ["--salt", str(life)] if life else []
        worker += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        for rank in range(script.workers):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(script.workers)}
            self._spawn(f"worker {rank}", worker, {**self._env, **ranks}, life)

    def _await_begin(self) -> None:
        """Wait until faults may begin."""

    def _workers(self) -> list[Process]:
        """Return the workers of the current generation."""
        return [self._processes[f"worker {rank}"] for rank in range(self.script.workers)]

    def _spawn(self, node: str, command: list[str], env: dict[str, str], life: int = 0) -> None:
        for fault in () if life else self.script.faults:
            if fault.kind == "descriptors" and fault.node == node:
                command = ["prlimit", f"--nofile={fault.limit}", *command]
            if fault.kind == "disk" and fault.node == node and not env.get("BYTEPS_TRACE_DIR"):
                env = {**env, "BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": self._fill_disk(node)}
        command = self._hosts[node].command(command)
        if life:
            self._earlier.append((node, self._processes[node]))
        title = f"{node} again {life}" if life else node
        self._processes[node] = Spawned(title, command, env, self.folder)

    def _fill_disk(self, node: str) -> str:
        disk = self.folder / f"{node.replace(' ', '-')}.full"
        disk.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk))
        self._full_disks.append(disk)
        try:
            (disk / "filler").write_bytes(bytes(2 * DISK_BYTES))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        return str(disk)

    def _play_launcher(self) -> None:
        """Start a kept job's workers again until they end well or no scheduler is left."""
        deadline = time.monotonic() + LIMIT_S
        # A scheduler that lacks descriptors never gets more of them.
        faults = self.script.faults
        lasting = any(f.kind == "descriptors" and f.node == "scheduler" for f in faults)
        while self.script.keep and self._lives < (2 if lasting else MOST_LIVES):
            try:
                statuses = [worker.wait(deadline - time.monotonic()) for worker in self._workers()]
            except Late:
                return  # the processes' errors are checked later
            if all(status == 0 for status in statuses) or not self._processes["scheduler"].running:
                return
            for index in range(self.script.servers):
                if not self._processes[f"server {index}"].running:
                    self._start_server(f"server {index}", self._lives)
            self._start_workers(self._lives)
            self._lives += 1

    def _await_end(self) -> None:
        self._play_launcher()
        deadline = time.monotonic() + LIMIT_S
        for node, process in self._processes.items():
            try:
                process.wait(deadline - time.monotonic())
            except Late:
                self._wrong.append(f"{node} still ran after {LIMIT_S:g} s")

    # ----- faults

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        with self._lock:
            self._timers.append(timer)
        timer.start()

    def _break(self, fault: Fault) -> None:
        host, process = self._hosts[fault.node], self._processes.get(fault.node)
        if process is None or not process.running:
            return
        namespace, port = str(host.namespace), self._ports[fault.node]
        if fault.kind in ENDED_BY:
            process.send(ENDED_BY[fault.kind])
        elif fault.kind == "stop":
            process.send(signal.SIGSTOP)
            self._later(fault.seconds, lambda: process.send(signal.SIGCONT))
        elif fault.kind == "cut":
            link = ("ip", "-n", self._switch, "link", "set", port)
            run(*link, "down")
            self._later(fault.seconds, lambda: run(*link, "up"))
        elif fault.kind == "reset":
            # Connections inside the host, for example between ranks, stay.
            network = host.address.rpartition(".")[0] + ".0/24"
            established = ("state", "established", "dst", network)
            run("ip", "netns", "exec", namespace, "ss", "-K", *established)
        else:
            # A queue of a packet or two drops most of each burst.
            rate, queue = ("2mbit", 4 << 20) if fault.kind == "slow" else ("100mbit", 20_000)
            self._shape(namespace, rate, queue)
            whole = f"{LINK_BITS}bit"
            self._later(fault.seconds, lambda: self._shape(namespace, whole, 16 << 20))

    def _shape(self, namespace: str, rate: str, queue: int) -> None:
        tbf = ["tbf", "rate", rate, "burst", "256kb", "limit", str(queue)]
        run("tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *tbf)

    def _mend(self) -> None:
        for node, process in self._processes.items():
            process.send(signal.SIGCONT)
            run("ip", "-n", self._switch, "link", "set", self._ports[node], "up")
            self._shape(str(self._hosts[node].namespace), f"{LINK_BITS}bit", 16 << 20)

    # ----- checks

    def _judge(self, ended: dict[str, int]) -> None:
        victims = {fault.node for fault in self.script.faults}
        killed = {fault.node for fault in self.script.faults if fault.kind == "kill"}
        all_ended = [(node, self._processes[node], status) for node, status in ended.items()]
        for node, process in self._earlier:
            all_ended.append((node, process, process.wait(0)))
        for node, process, status in all_ended:
            said = process.text.strip()
            if "the invariant '" in said:
                self._wrong.append(f"{node} broke an invariant: {said[-2000:]}")
            if status in _statuses_of(self.script.faults, node):
                continue
            if status not in (0, 1):
                self._wrong.append(f"{node} ended with {status}: {said[-2000:]}")
            elif status == 1 and node not in victims and not self._names_any(said, victims):
                self._wrong.append(f"{node} does not name {sorted(victims)}: {said[-600:]}")
        if self.script.keep and "scheduler" not in victims:
            bad = {node: status for node, status in ended.items() if status != 0}
            bad = {n: s for n, s in bad.items() if not (n in killed and s == -signal.SIGKILL)}
            if bad:
                self._wrong.append(f"kept, it did not end well after {self._lives} lives: {bad}")
        self._look_for_remains()

    def _names_any(self, said: str, victims: set[str]) -> bool:
        # A scheduler that was cut off or stopped may name any node, because all others were silent
        # to it. In a kept job, errors may name nodes of an earlier generation.
        if "scheduler" in victims or self.script.keep:
            return bool(re.search(r"scheduler|server \d|worker \d", said))
        patterns = [r"cannot be joined: it closed the connection"]
        for node in victims:
            patterns.append(re.escape(self._hosts[node].address) + r"[):]")
            # The first server to register becomes server 0.
            role, _, rank = node.partition(" ")
            patterns.append(rf"worker {rank}\b" if role == "worker" else r"missing: .*server")
        return re.search("|".join(patterns), said) is not None

    def _look_for_remains(self) -> None:
        processes = [*self._processes.values(), *(process for _, process in self._earlier)]
        expected = {process.log.name for process in processes} | {"scheduler.port"}
        expected |= {process.log.parent.name for process in processes}
        left = {path.name for path in self.folder.iterdir()} - expected
        if left:
            self._wrong.append(f"files were left: {sorted(left)}")
        for node, host in self._hosts.items():
            pids = run("ip", "netns", "pids", str(host.namespace)).split()
            if pids:
                self._wrong.append(f"processes were left on the host of {node}: {pids}")
            ports = run("ip", "netns", "exec", str(host.namespace), "ss", "-Htln").strip()
            if ports:
                self._wrong.append(f"a socket on the host of {node} still listens: {ports}")
