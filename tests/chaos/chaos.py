#!/usr/bin/env python3
"""Breaks real jobs on emulated hosts, at random, and demands that they end well or by name.

A seed is one job: its sizes, and what breaks when. Scheduler, servers and workers (sum_worker,
which checks every value of every sum) run each on a host of its own, a network namespace with a
limited link. Demanded of each job: no sum is wrong; within a limit every process has ended; each
ended well, or with an error that names what broke; no process, listening socket or file is left,
and the hosts go with the last job. Needs root, and iproute2.

Seeds above 1000 also draw whether the job is kept (--keep): then workers that failed are started
again, and a server in the place of one that ended, until the job ends well; and whether its
connections are encrypted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from scripts.children import Late, Spawned
from scripts.progress import Progress
from tests import native

LINK_BITS = 200_000_000
HOSTS = 6
LIMIT_S = 180.0
"""For a machine on which others work as well; the timeouts below are what ends a job."""
TIMEOUTS = {
    "BYTEPS_PEER_TIMEOUT_S": "5",
    "BYTEPS_START_TIMEOUT_S": "10",
    "BYTEPS_OP_TIMEOUT_S": "12",
    "BYTEPS_RECONNECT_TIMEOUT_S": "4",
}
KINDS = ("kill", "stop", "cut", "reset", "slow", "lossy", "descriptors", "disk")
FROM_THE_START = ("descriptors", "disk")
PLAIN_SEEDS = 1000
"""Seeds up to this one are of jobs that are neither kept nor encrypted."""
MOST_LIVES = 8
"""Of a kept job's workers: a fault lasts no longer than some of them."""
DISK_BYTES = 16 << 10
"""Of the file system that is full, for a node's timeline."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    """One of KINDS; those of FROM_THE_START take neither time below."""
    node: str
    """``scheduler``, ``server 0``, ``worker 1``, ..."""
    at_s: float
    """After the last process was started."""
    seconds: float
    """How long it lasts, where it ends."""
    limit: int = 0
    """Of open files."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that a seed decides."""

    seed: int
    workers: int
    servers: int
    rounds: int
    tensors: int
    size: int
    faults: tuple[Fault, ...]
    keep: bool = False
    """Scheduler and servers take the next incarnation of the job."""
    tls: bool = False

    @property
    def nodes(self) -> list[str]:
        return [
            "scheduler",
            *(f"server {i}" for i in range(self.servers)),
            *(f"worker {i}" for i in range(self.workers)),
        ]


@dataclass(frozen=True, kw_only=True)
class Result:
    script: Script
    ended: dict[str, int]
    """Exit status, by node; -n: by signal n. Of a kept job: of those that were started last."""
    seconds: float
    wrong: list[str]
    """What did not hold."""
    lives: int = 1
    """How often the workers were started."""

    @property
    def survived(self) -> bool:
        return all(status == 0 for status in self.ended.values())


def make_script(seed: int, kinds: Sequence[str] = KINDS) -> Script:
    draw = random.Random(seed)
    workers, servers = draw.randint(2, 3), draw.randint(1, 2)
    script = Script(
        seed=seed,
        workers=workers,
        servers=servers,
        rounds=draw.choice([60, 200, 500]),
        tensors=draw.randint(1, 5),
        size=draw.choice([4_000, 40_000, 200_000]),
        faults=(),
    )
    # A job that no worker joins waits for one: the last worker is left alone.
    victims = script.nodes[:-1]
    faults = [
        Fault(
            kind=draw.choice(list(kinds)),
            node=draw.choice(victims),
            at_s=round(draw.choice([0.3, 1.0, 3.0]) * draw.random(), 3),
            seconds=draw.choice([0.2, 1.0, 9.0]),
            limit=draw.randint(10, 40),
        )
        for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    kept = seed > PLAIN_SEEDS and draw.random() < 0.7
    encrypted = seed > PLAIN_SEEDS and draw.random() < 0.4
    chosen = {"faults": tuple(faults), "keep": kept, "tls": encrypted}
    return Script(**{**vars(script), **chosen})


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Job:
    """One run of a script on hosts that outlive it."""

    def __init__(
        self, script: Script, hosts: Sequence[Host], switch: str, programs: Path, folder: Path
    ) -> None:
        self.script = script
        self.folder = folder
        self._hosts = dict(zip(script.nodes, hosts, strict=False))
        self._ports = {node: f"port{i}" for i, node in enumerate(script.nodes)}
        self._switch = switch
        self._programs = programs
        self._processes: dict[str, Spawned] = {}
        self._timers: list[threading.Timer] = []
        self._wrong: list[str] = []
        self._lock = threading.Lock()
        self._full_disks: list[Path] = []
        self._env: dict[str, str] = {}
        self._earlier: list[tuple[str, Spawned]] = []
        self._lives = 1

    def run(self) -> Result:
        begin = time.monotonic()
        try:
            self._start()
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
                _run("umount", str(disk))
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
        )

    # ----- processes

    def _start(self) -> None:
        script, port_file = self.script, self.folder / "scheduler.port"
        server = str(self._programs / "byteps-server")
        env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder),
            **TIMEOUTS,
            "BYTEPS_SECRET": secrets.token_hex(32),
            "BYTEPS_PARTITION_BYTES": "65536",
            "DMLC_PS_ROOT_URI": self._hosts["scheduler"].address,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": str(script.workers),
            "DMLC_NUM_SERVER": str(script.servers),
        }
        if script.keep:
            # Should the last life's end have been missed, this ends what waits for another one.
            env |= {"BYTEPS_KEEP": "1", "BYTEPS_KEEP_TIMEOUT_S": "30"}
        if script.tls:
            env["BYTEPS_TLS"] = "1"
        scheduler = [server, "--role", "scheduler", "--port-file", str(port_file)]
        self._spawn("scheduler", scheduler, env)
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            if not self._processes["scheduler"].running:
                return  # it could not begin, and has said why
            if time.monotonic() > deadline:
                raise RuntimeError("the scheduler did not begin to listen")
            time.sleep(0.01)
        env["DMLC_PS_ROOT_PORT"] = port_file.read_text().split()[1]
        self._env = env
        for index in range(script.servers):
            self._spawn(f"server {index}", [server, "--role", "server"], env)
        self._start_workers(0)

    def _start_workers(self, life: int) -> None:
        script = self.script
        arguments = {"rounds": script.rounds, "tensors": script.tensors, "bytes": script.size}
        worker = [str(self._programs / "sum_worker"), "--pause-ms", "5"]
        worker += ["--salt", str(life)] if life else []
        worker += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        for rank in range(script.workers):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(script.workers)}
            self._spawn(f"worker {rank}", worker, {**self._env, **ranks}, life)

    def _workers(self) -> list[Spawned]:
        """Those of the present life."""
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
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk))
        self._full_disks.append(disk)
        try:
            (disk / "filler").write_bytes(bytes(2 * DISK_BYTES))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        return str(disk)

    def _play_launcher(self) -> None:
        """Start a kept job's workers again until they end well, or nobody can take them."""
        deadline = time.monotonic() + LIMIT_S
        # A scheduler that is short of descriptors stays so.
        faults = self.script.faults
        lasting = any(f.kind == "descriptors" and f.node == "scheduler" for f in faults)
        while self.script.keep and self._lives < (2 if lasting else MOST_LIVES):
            try:
                statuses = [worker.wait(deadline - time.monotonic()) for worker in self._workers()]
            except Late:
                return  # it is said of all
            if all(status == 0 for status in statuses) or not self._processes["scheduler"].running:
                return
            for index in range(self.script.servers):
                if not self._processes[f"server {index}"].running:
                    server = [str(self._programs / "byteps-server"), "--role", "server"]
                    self._spawn(f"server {index}", server, self._env, self._lives)
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
        if fault.kind == "kill":
            process.send(signal.SIGKILL)
        elif fault.kind == "stop":
            process.send(signal.SIGSTOP)
            self._later(fault.seconds, lambda: process.send(signal.SIGCONT))
        elif fault.kind == "cut":
            link = ("ip", "-n", self._switch, "link", "set", port)
            _run(*link, "down")
            self._later(fault.seconds, lambda: _run(*link, "up"))
        elif fault.kind == "reset":
            _run("ip", "netns", "exec", namespace, "ss", "-K", "state", "established")
        else:
            # A queue that holds a packet or two drops most of each burst.
            rate, queue = ("2mbit", 4 << 20) if fault.kind == "slow" else ("100mbit", 20_000)
            self._shape(namespace, rate, queue)
            whole = f"{LINK_BITS}bit"
            self._later(fault.seconds, lambda: self._shape(namespace, whole, 16 << 20))

    def _shape(self, namespace: str, rate: str, queue: int) -> None:
        tbf = ["tbf", "rate", rate, "burst", "256kb", "limit", str(queue)]
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *tbf)

    def _mend(self) -> None:
        for node, process in self._processes.items():
            process.send(signal.SIGCONT)
            _run("ip", "-n", self._switch, "link", "set", self._ports[node], "up")
            self._shape(str(self._hosts[node].namespace), f"{LINK_BITS}bit", 16 << 20)

    # ----- what must hold

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
            if status == -signal.SIGKILL and node in killed:
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
        # To a scheduler that was cut off, or slept, all others were silent.  And the later lives of
        # a kept job meet what is left of the one before.
        if "scheduler" in victims or self.script.keep:
            return bool(re.search(r"scheduler|server \d|worker \d", said))
        patterns = [r"cannot be joined: it closed the connection"]
        for node in victims:
            patterns.append(re.escape(self._hosts[node].address) + r"[):]")
            # Which server is called 0 is settled by who registers first.
            role, _, rank = node.partition(" ")
            patterns.append(rf"worker {rank}\b" if role == "worker" else r"missing: .*server")
        return re.search("|".join(patterns), said) is not None

    def _look_for_remains(self) -> None:
        processes = [*self._processes.values(), *(process for _, process in self._earlier)]
        expected = {process.log.name for process in processes} | {"scheduler.port"}
        left = {path.name for path in self.folder.iterdir()} - expected
        if left:
            self._wrong.append(f"files were left: {sorted(left)}")
        for node, host in self._hosts.items():
            pids = _run("ip", "netns", "pids", str(host.namespace)).split()
            if pids:
                self._wrong.append(f"processes were left on the host of {node}: {pids}")
            ports = _run("ip", "netns", "exec", str(host.namespace), "ss", "-Htln").strip()
            if ports:
                self._wrong.append(f"a socket on the host of {node} still listens: {ports}")


def play(
    scripts: Sequence[Script],
    programs: Path,
    folder: Path,
    tell: Callable[[Result], None] = lambda result: None,
    jobs: int = 1,
) -> list[Result]:
    """Run the scripts, ``jobs`` at a time; logs go to folders of ``folder``, one for each seed."""
    left = deque(scripts)

    def some(emulation: Emulation) -> list[Result]:
        return _play_on(emulation, left, programs, folder, tell)

    # Made here: an emulation's name is that of the process and a number.
    emulations = [_emulation() for _ in range(min(jobs, len(scripts)))]
    with ThreadPoolExecutor(len(emulations)) as pool:
        try:
            results = [result for part in pool.map(some, emulations) for result in part]
        finally:
            left.clear()  # after an interruption no further job begins
    return sorted(results, key=lambda result: result.script.seed)


def _emulation() -> Emulation:
    topology = Topology(
        workers=HOSTS - 1,
        servers=1,
        emulated_hosts=HOSTS,
        link_bits=LINK_BITS,
        fair_queue=False,
        mtu=1500,
    )
    return Emulation(topology)


def _play_on(
    emulation: Emulation,
    scripts: deque[Script],
    programs: Path,
    folder: Path,
    tell: Callable[[Result], None],
) -> list[Result]:
    results = []
    with emulation:
        switch = str(emulation.hosts[0].namespace).rpartition("-")[0] + "-switch"
        names = [switch, *(str(host.namespace) for host in emulation.hosts)]
        while True:
            try:
                script = scripts.popleft()
            except IndexError:
                break
            own = folder / f"seed-{script.seed}"
            own.mkdir(parents=True)
            results.append(Job(script, emulation.hosts, switch, programs, own).run())
            tell(results[-1])
    left = set(names) & set(_run("ip", "netns", "list").split())
    if left:
        raise RuntimeError(f"network namespaces were left: {sorted(left)}")
    return results


def find_programs(sanitize: str) -> Path:
    """The folder of byteps-server and sum_worker. Raises BuildError."""
    if sanitize:
        return native.build("byteps-server", "sum_worker", sanitize=sanitize)
    return native.build("byteps-server", "sum_worker")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many jobs (default 20)")
    parser.add_argument("--from", dest="first", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default 1)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these faults")
    parser.add_argument("--sanitize", choices=native.SANITIZED, default="", help="build with this")
    parser.add_argument("--logs", type=Path, help="keep all logs in this folder")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds takes some of {','.join(KINDS)}")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs take positive numbers")
    scripts = [make_script(options.first + i, kinds) for i in range(options.seeds)]

    def tell(result: Result) -> None:
        what = "; ".join(
            f"{f.kind} {f.node} at {f.at_s:g} s for {f.seconds:g} s" for f in result.script.faults
        )
        how = "WRONG" if result.wrong else "went on" if result.survived else "ended by name"
        shown.step()
        what += ", kept" * result.script.keep + ", encrypted" * result.script.tls
        how += f" in life {result.lives}" if result.lives > 1 and not result.wrong else ""
        seed = f"seed {result.script.seed:5}"
        shown.say(f"{seed}  {how:23}  {result.seconds:6.1f} s  {what}", stream=sys.stdout)
        for line in result.wrong:
            shown.say(f"    {line}", stream=sys.stdout)

    programs = find_programs(options.sanitize)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as scratch,
        Progress("chaos", total=len(scripts), unit="jobs") as shown,
    ):
        results = play(scripts, programs, options.logs or Path(scratch), tell, options.jobs)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    wrong = sum(bool(result.wrong) for result in results)
    went_on = sum(result.survived and not result.wrong for result in results)
    print(
        f"{len(results)} jobs: {went_on} went on, {len(results) - went_on - wrong} ended by name, "
        f"{wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    # Terminated or interrupted: hosts, processes and file systems go either way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
