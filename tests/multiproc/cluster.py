"""Starts clusters of processes. Every process writes a log to the test's folder, and listens on
ports that the kernel chooses. The test waits for it with a deadline, and ends it by its pid."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from scripts import children
from scripts.children import LAUNCHER_VARIABLES, Late, Spawned, last_lines

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

LOOPBACK = "127.0.0.1"
SERVER_VARIABLE = "MEGATRON_BYTEPS_TEST_SERVER"
# These limits only end hangs. A busy machine with two cores, or an emulated CPU, must meet them.
START_S = 150.0
RUN_S = 400.0
IMPORT_S = 500.0
"""Limit for the import of torch, which takes more than a minute on an emulated CPU."""
END_S = 150.0

_OURS = ("DMLC_", "BYTEPS_", "TORCHELASTIC_")

SECRET = secrets.token_hex(32)
"""Secret of every job in this test session."""


def server_executable() -> str:
    """Return the path of byteps-server: the installed one, or one that a variable names."""
    if os.environ.get(SERVER_VARIABLE):
        return os.environ[SERVER_VARIABLE]
    return children.server_executable()


def clean_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without variables that configure a job, except the
    secret."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OURS) and name not in LAUNCHER_VARIABLES
    }
    # Each process gets one thread, because the processes of a cluster share few cores.
    plain = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return {**env, **plain, "BYTEPS_SECRET": SECRET}


class Process(Protocol):
    """A process of a test, whichever process its parent is."""

    title: str
    pid: int
    log: Path

    def wait(self, timeout_s: float) -> int: ...
    def send(self, number: signal.Signals) -> None: ...
    @property
    def running(self) -> bool: ...
    @property
    def text(self) -> str: ...


class Nursed:
    """A worker forked by the nursery."""

    def __init__(self, title: str, log: Path) -> None:
        self.title = title
        self.log = log
        self.pid = -1
        self.status: int | None = None
        self.started = threading.Event()
        self.ended = threading.Event()

    def wait(self, timeout_s: float) -> int:
        if not self.ended.wait(timeout_s):
            raise Late(f"{self.title} still runs after {timeout_s:g} s:\n{last_lines(self.log)}")
        assert self.status is not None
        return self.status

    def send(self, number: signal.Signals) -> None:
        # The pid cannot belong to another process, because the nursery reaps the process only after
        # it has reported the end.
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.send(signal.SIGKILL)
        self.wait(END_S)

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Nursery:
    """The process that forks workers (see nursery.py)."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = folder / "nursery.log"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            env={**clean_environment(folder), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            start_new_session=True,
        )
        self._workers: dict[int, Nursed] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                worker = self._workers[answer["id"]]
            if "pid" in answer:
                worker.pid = answer["pid"]
                worker.started.set()
            else:
                worker.status = answer["status"]
                worker.ended.set()

    def start(
        self, title: str, program: str, env: Mapping[str, str], folder: Path, args: dict[str, Any]
    ) -> Nursed:
        worker = Nursed(title, folder / f"{title.replace(' ', '-')}.log")
        with self._lock:
            identity = len(self._workers)
            self._workers[identity] = worker
        request = {
            "id": identity,
            "program": program,
            "folder": str(folder),
            "log": str(worker.log),
            "env": dict(env),
            "args": args,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        if not worker.started.wait(IMPORT_S):  # The first fork waits for the import of torch.
            raise Late(f"the nursery did not start {title}:\n{last_lines(self._log)}")
        return worker

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)
        self._process.stdout.close()


class Cluster:
    """`workers` workers and `servers` servers around one scheduler, as a context manager.

    All listen on ``host``, an address of this machine. The nursery forks workers; without a nursery
    the test starts them in another way.
    """

    def __init__(
        self,
        folder: Path,
        nursery: Nursery | None,
        *,
        workers: int,
        servers: int = 1,
        env: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self.folder = folder
        self.host = host
        self.workers_wanted = workers
        self.servers_wanted = servers
        self.port = 0
        self._scheduler: Spawned | None = None
        self.servers: list[Spawned] = []
        self.workers: dict[str, Nursed] = {}
        self._nursery = nursery
        self._env = {**clean_environment(folder), **(env or {})}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.everyone():
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(END_S)

    def everyone(self) -> list[Process]:
        nodes: list[Process] = [*self.workers.values(), *self.servers]
        return [*nodes, self._scheduler] if self._scheduler is not None else nodes

    @property
    def scheduler(self) -> Spawned:
        assert self._scheduler is not None, "it was not started"
        return self._scheduler

    def set_env(self, env: Mapping[str, str]) -> None:
        """Add variables for processes that start from now on."""
        self._env.update(env)

    def node_environment(self) -> dict[str, str]:
        return {
            **self._env,
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(self.workers_wanted),
            "DMLC_NUM_SERVER": str(self.servers_wanted),
        }

    def start_scheduler(self) -> Spawned:
        port_file = self.folder / "scheduler.port"
        command = [server_executable(), "--role", "scheduler", "--port-file", str(port_file)]
        started = Spawned("scheduler", command, self.node_environment(), self.folder)
        self._scheduler = started
        self.port = int(wait_for_file(port_file, START_S, [started]).split()[1])
        return started

    def start_server(self) -> Spawned:
        """Start a server. Its address is in the file ``server N.port`` once the job is complete."""
        title = f"server {len(self.servers)}"
        port_file = str(self.folder / f"{title}.port")
        command = [server_executable(), "--role", "server", "--port-file", port_file]
        server = Spawned(title, command, self.node_environment(), self.folder)
        self.servers.append(server)
        return server

    def start_nodes(self) -> None:
        """Start the scheduler and all servers."""
        self.start_scheduler()
        for _ in range(self.servers_wanted):
            self.start_server()

    def start_worker(
        self,
        rank: int,
        program: str,
        *,
        title: str | None = None,
        world_size: int | None = None,
        env: Mapping[str, str | None] | None = None,
        **args: Any,
    ) -> Nursed:
        """Run `programs.<module>:<function>` as the worker of this rank. None in `env` unsets a
        variable."""
        size = str(world_size if world_size is not None else self.workers_wanted)
        ranks = {"RANK": str(rank), "WORLD_SIZE": size}
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
        full = {**self.node_environment(), "DMLC_NUM_WORKER": size, **ranks, **local, **(env or {})}
        title = title or f"worker {rank}"
        present = {name: value for name, value in full.items() if value is not None}
        assert self._nursery is not None, "made without one"
        worker = self._nursery.start(title, program, present, self.folder, args)
        self.workers[title] = worker
        return worker

    def start(self, program: str, **args: Any) -> list[Nursed]:
        """Start the scheduler, all servers and all workers."""
        self.start_nodes()
        return [self.start_worker(rank, program, **args) for rank in range(self.workers_wanted)]

    def run(self, program: str, timeout_s: float = RUN_S, **args: Any) -> None:
        """Start everything. Require that every check passes and every process exits with 0."""
        self.start(program, **args)
        self.finish(timeout_s)

    def finish(self, timeout_s: float = RUN_S) -> None:
        """Wait for all processes, workers first. All must exit with status 0, and no check may have
        failed."""
        wait_all(self.workers.values(), timeout_s)
        self.demand_checks()
        bad = {w.title: w.status for w in self.workers.values() if w.status != 0}
        assert not bad, f"exit status: {bad}"
        nodes = [process for process in self.everyone() if isinstance(process, Spawned)]
        wait_all(nodes, END_S)
        bad = {node.title: node.wait(0) for node in nodes if node.wait(0) != 0}
        assert not bad, f"exit status: {bad}"

    def finish_with(self, workers: Iterable[Nursed], lost: Sequence[Spawned] = ()) -> None:
        """Require that these workers, the scheduler and all servers except the lost ones
        end well."""
        for worker in workers:
            assert worker.wait(RUN_S) == 0, worker.text[-3000:]
        self.demand_checks()
        for node in (self.scheduler, *self.servers):
            if node not in lost:
                assert node.wait(RUN_S) == 0, node.text[-3000:]

    def demand_checks(self) -> None:
        """Raise with every failed check of every worker, by name."""
        failed = []
        for result in sorted(self.folder.glob("checks.*.json")):
            checks = json.loads(result.read_text())
            rank = result.name.split(".")[1]
            failed += [f"worker {rank}: {name}: {error}" for name, error in checks.items() if error]
        assert not failed, f"{len(failed)} failed checks\n" + "\n".join(failed[:40])

    def wait_mark(self, name: str, ranks: Iterable[int], timeout_s: float = START_S) -> None:
        """Wait until the workers of these ranks have called job.mark(name)."""
        for rank in ranks:
            wait_for_file(self.folder / f"mark.{name}.{rank}", timeout_s, self.workers.values())

    def go(self, name: str) -> None:
        """Let workers that called job.wait_go(name) continue."""
        (self.folder / f"go.{name}").touch()


def wait_for_file(path: Path, timeout_s: float, alive: Iterable[Process] = ()) -> str:
    """Wait for a file and return its text. Fail early if a process that should write it has
    ended."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        dead = [process for process in alive if not process.running]
        if dead and not path.exists():
            tails = "\n".join(f"{process.title}:\n{last_lines(process.log)}" for process in dead)
            raise Late(f"{[p.title for p in dead]} ended before {path.name} was there\n{tails}")
        if time.monotonic() > deadline:
            raise Late(f"{path.name} was not there within {timeout_s:g} s")
        time.sleep(0.01)
    return path.read_text()


def wait_all(processes: Iterable[Process], timeout_s: float) -> None:
    """Wait for all processes within one deadline. The error names every process that is late."""
    deadline = time.monotonic() + timeout_s
    late = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except Late as error:
            late.append(str(error))
    if late:
        raise Late("\n".join(late))


def stop(process: Process) -> None:
    """Send SIGSTOP and wait until every thread has stopped, because kill() returns earlier."""
    process.send(signal.SIGSTOP)
    deadline = time.monotonic() + END_S
    while not _stopped(process.pid):
        if time.monotonic() > deadline:
            raise Late(f"{process.title} was not stopped by SIGSTOP:\n{last_lines(process.log)}")
        time.sleep(0.001)


def _stopped(pid: int) -> bool:
    """Return whether all threads of the process have stopped, according to /proc. False if there is
    no such process."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            # The name, in brackets, may contain any character.
            states.append(task.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has ended meanwhile.
    return bool(states) and all(state in "TtZX" for state in states)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Return pids and command lines of the processes with this environment variable."""
    wanted = f"{variable}={value}".encode()
    commands = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # Zombies have no command line.
                    commands[int(folder.name)] = command
        except OSError:
            continue
    return commands


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
