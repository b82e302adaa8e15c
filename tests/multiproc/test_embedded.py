"""Embedded mode: a job that names no scheduler starts its own, and leaves nothing behind. Also
torchrun's behaviour for a replica that gets SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.children import LAUNCHER_VARIABLES, free_ports
from tests.multiproc.cluster import (
    END_S,
    HERE,
    IMPORT_S,
    REPOSITORY,
    RUN_S,
    SECRET,
    Cluster,
    Late,
    Nursery,
    Process,
    Spawned,
    clean_environment,
    processes_with,
    wait_for_file,
)

MARK = "EMBEDDED_TEST_MARK"
CLUSTERS_OWN = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
TORCHRUN = ("--standalone",)


class Started:
    """A job started with torchrun. All its processes have a mark in their environment."""

    def __init__(self, folder: Path, nursery: Nursery, python: str) -> None:
        self.mark = uuid.uuid4().hex
        self._nursery = nursery
        self._python = python
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._launchers: list[Process] = []

    def start(
        self,
        mode: str,
        *torchrun: str,
        env: Mapping[str, str] | None = None,
        forked: bool = True,
    ) -> Process:
        """Start a rank or, with arguments of `torchrun`, its ranks. ``forked``: from a process that
        has imported torch, because the import takes seconds."""
        words = [*torchrun, str(HERE / "programs/keep.py"), "embedded", mode]
        return self.start_words(words, bool(torchrun), env=env, forked=forked)

    def start_words(
        self,
        words: Sequence[str],
        torchrun: bool = True,
        *,
        env: Mapping[str, str] | None = None,
        forked: bool = True,
    ) -> Process:
        """Start a program with its arguments, with torchrun or directly."""
        python = self._python if forked else sys.executable
        full = {"PYTHON_EXEC": python, **self._environment(env or {})}
        title = f"job {len(self._launchers)}"
        launcher: Process
        if torchrun and forked:
            args = {"words": list(words)}
            launcher = self._nursery.start(title, "keep:torchrun", full, self.folder, args)
        else:
            module = ("-m", "torch.distributed.run") if torchrun else ()
            launcher = Spawned(title, [python, *module, *words], full, self.folder)
        self._launchers.append(launcher)
        return launcher

    def start_program(
        self, program: str, args: dict[str, Any], *, env: Mapping[str, str]
    ) -> Process:
        """Start a program of the nursery, which starts the ranks itself."""
        full = self._environment(env)
        launcher = self._nursery.start("program", program, full, self.folder, args)
        self._launchers.append(launcher)
        return launcher

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        own = {MARK: self.mark, "JOB_FOLDER": str(self.folder)}
        full = {**clean_environment(self.temporary), **own, **env}
        # By default embedded mode creates a secret.
        if "BYTEPS_SECRET" not in env:
            del full["BYTEPS_SECRET"]
        return full

    def processes(self) -> dict[int, str]:
        return processes_with(MARK, self.mark)

    def nodes(self, role: str) -> list[int]:
        processes = self.processes().items()
        return [pid for pid, command in processes if f"--role {role}" in command]

    def demand_no_process(self, timeout_s: float = END_S) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > deadline:
                raise Late(f"processes still run after {timeout_s:g} s: {left}")
            time.sleep(0.05)

    def demand_nothing_left(self) -> None:
        self.demand_no_process(timeout_s=60)
        deadline = time.monotonic() + 60
        while left := self._ours():  # The process that removes files may end a little later.
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _ours(self) -> list[str]:
        """Return leftover files of BytePS. The folder may also have files of torchrun and torch."""
        return [path.name for path in self.temporary.iterdir() if "byteps" in path.name.lower()]

    def close(self) -> None:
        for launcher in self._launchers:
            if launcher.running:
                launcher.send(signal.SIGKILL)
                launcher.wait(END_S)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(run_dir: Path, nursery: Nursery, warm_python: str) -> Iterator[Started]:
    started = Started(run_dir / "job", nursery, warm_python)
    yield started
    started.close()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_torchrun_with_no_scheduler(job: Started) -> None:
    """The job works, works again after shutdown, and leaves no process or file behind."""
    before = shared_memory()
    env = {"BYTEPS_EMBEDDED_SERVERS": "2"}
    launcher = job.start("again", *TORCHRUN, "--nproc-per-node", "2", env=env, forked=False)
    assert launcher.wait(RUN_S) == 0, launcher.text
    for rank in range(2):
        assert f"rank {rank} of 2, 2 servers, sums are right" in launcher.text
    started = (
        r"INFO worker 0 .*embedded mode .*started the scheduler at 127\.0\.0\.1:\d+.* 2 in all"
    )
    assert len(re.findall(started, launcher.text)) == 2, "one line for each init"
    job.demand_nothing_left()
    assert not {name for name in shared_memory() - before if "byteps" in name.lower()}


def test_without_shutdown(job: Started) -> None:
    """A script that ends without shutdown, and an interpreter that ends as any does."""
    env = {"PYTHON_EXEC": sys.executable}
    launcher = job.start("no-shutdown", *TORCHRUN, "--nproc-per-node", "2", env=env)
    assert launcher.wait(RUN_S) == 0, launcher.text
    job.demand_nothing_left()


def test_the_example_of_the_documentation(job: Started) -> None:
    """Runs the script of docs/use/pytorch.md with the command given there."""
    page = (REPOSITORY / "docs/use/pytorch.md").read_text(encoding="utf-8")
    _, _, section = page.partition("\n## Operations\n")
    example = re.search(
        r"```python\n(.*?)```\n.*?^ {4}torchrun (.*? )try\.py$", section, re.S | re.M
    )
    assert example
    program = job.folder / "try.py"
    program.write_text(example[1], encoding="utf-8")
    launcher = job.start_words([*TORCHRUN, *example[2].split(), str(program)])
    assert launcher.wait(RUN_S) == 0, launcher.text
    assert "started the scheduler" in launcher.text
    job.demand_nothing_left()


SCRIPT_OF_USER = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(200, 200))
model(torch.ones(4, 200)).square().mean().backward()
dist.destroy_process_group()
"""


def test_two_hosts_on_one_machine(job: Started) -> None:
    """Runs the lines of docs/use/quick-start.md."""
    page = (REPOSITORY / "docs/use/quick-start.md").read_text(encoding="utf-8")
    _, _, section = page.partition("\n## Two hosts on one machine\n")
    lines = re.findall(r"^    (.*torchrun.*) train\.py( &)?$", section.split("\n## ")[0], re.M)
    exported = re.findall(r"^    export (.*)$", section, re.M)[0]
    assert [end for _, end in lines] == [" &", ""]
    program, port = job.folder / "train.py", str(free_ports())
    program.write_text(SCRIPT_OF_USER, encoding="utf-8")
    launchers = []
    for line, _ in lines:
        variables, _, words = line.partition(" torchrun ")
        env = dict(variable.split("=") for variable in f"{exported} {variables}".split())
        words = [*words.split(), "--master-port", port, str(program)]
        launchers.append(job.start_words(words, env=env))
    for launcher in launchers:
        assert launcher.wait(RUN_S) == 0, launcher.text
    said = launchers[0].text
    assert "servers, 2 in all on 2 host(s)" in said
    assert "sent as int8 over 2 ranks on 2 host(s): BytePS" in said
    job.demand_nothing_left()


def test_single_process(job: Started) -> None:
    """A single process works without a launcher and without torch.distributed."""
    launcher = job.start("again")
    assert launcher.wait(RUN_S) == 0, launcher.text
    assert "rank 0 of 1, 1 servers, sums are right" in launcher.text
    job.demand_nothing_left()


@dataclass(frozen=True, kw_only=True)
class Launcherless:
    """Ranks without a launcher, and how they meet (programs/launcherless.py)."""

    how: str
    c10d: bool = False
    hosts: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of another launcher."""
    quick: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.how, *(name for name in ("c10d", "hosts") if getattr(self, name))])


LAUNCHERLESS = (
    Launcherless(how="file"),
    Launcherless(how="file", c10d=True, quick=True),
    Launcherless(how="tcp", quick=True, env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
    Launcherless(how="tcp", c10d=True),
    Launcherless(how="store", c10d=True),
    Launcherless(how="env"),
    Launcherless(how="env", c10d=True, quick=True),
    Launcherless(how="store", hosts=True, quick=True),
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.thorough)
        for row in LAUNCHERLESS
    ],
)
@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_without_a_launcher(
    job: Started, make_cluster: Callable[..., Cluster], row: Launcherless, cluster: bool
) -> None:
    """Rank and size are those given to init_process_group; local ranks are found by host names."""
    env = {"BYTEPS_C10D_BACKEND": "flat", "MASTER_ADDR": "127.0.0.1", **row.env}
    if cluster:
        nodes = make_cluster(workers=2, servers=1)
        nodes.start_nodes()
        known = {name: nodes.node_environment()[name] for name in CLUSTERS_OWN[:3]}
        env |= known | {"BYTEPS_SECRET": SECRET}
        # In a cluster with a name, the cluster's variables have priority over torch.distributed.
        if not row.c10d:
            env = {name: value for name, value in env.items() if name not in LAUNCHER_VARIABLES}
    # If RANK and WORLD_SIZE are set, ranks do not compare their hosts either.
    alone = cluster and row.how == "env" and not row.c10d
    program = {"how": row.how, "c10d": row.c10d, "hosts": row.hosts, "alone": alone}
    launcher = job.start_program("launcherless:spawned", program, env=env)
    assert launcher.wait(RUN_S) == 0, launcher.text
    assert [(job.folder / f"rank {rank} has left").exists() for rank in range(2)] == [True, True]
    job.demand_nothing_left()


@pytest.mark.parametrize(
    ("rendezvous", "lives"),
    [("standalone", 2), pytest.param("master-addr", 3, marks=pytest.mark.thorough)],
    ids=["standalone", "master-addr"],
)
def test_restarts(job: Started, rendezvous: str, lives: int) -> None:
    """torchrun shares a store between all generations of a job, so the store contains values of
    earlier generations."""
    launcher: tuple[str, ...] = TORCHRUN
    if rendezvous == "master-addr":
        port = str(free_ports())
        launcher = ("--master-addr", "127.0.0.1", "--master-port", port)
    options = ("--nproc-per-node", "2", "--max-restarts", str(lives - 1))
    started = job.start("restarts", *launcher, *options, env={"LIVES": str(lives)})
    assert started.wait(RUN_S) == 0, started.text
    for life in range(lives):
        for rank in range(2):
            assert f"rank {rank} of life {life}: sums inside the host are right" in started.text
    job.demand_nothing_left()


def test_killed_ranks_leave_no_server(job: Started) -> None:
    launcher = job.start("forever", *TORCHRUN, "--nproc-per-node", "2")
    pids = [int(wait_for_file(job.folder / f"pid.{rank}", RUN_S, [launcher])) for rank in range(2)]
    assert len(job.nodes("scheduler")) == 1
    assert len(job.nodes("server")) == 1
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait(RUN_S) != 0
    job.demand_nothing_left()


def test_killed_rank_is_named(job: Started) -> None:
    """If rank 0 is killed with its scheduler and servers, the other ranks' error names rank 0."""
    port = str(free_ports())
    ranks = []
    for rank in range(2):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {**numbers, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(job.start("forever", env=env))
    pids = [int(wait_for_file(job.folder / f"pid.{rank}", RUN_S, ranks)) for rank in range(2)]
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while not (said := re.findall("BytePSError: .*", ranks[1].text)):
        assert time.monotonic() < deadline and ranks[1].running, ranks[1].text
        time.sleep(0.01)
    assert re.search(r"worker 0\b.* was lost", said[0]), said
    assert "stopped by SIG" not in said[0]
    os.kill(pids[1], signal.SIGKILL)
    job.demand_nothing_left()


@pytest.mark.parametrize("role", ["server", pytest.param("scheduler", marks=pytest.mark.thorough)])
def test_lost_node_ends_the_job(job: Started, role: str) -> None:
    """Every rank ends with an error that names the node; the rank that started it reports
    its end."""
    launcher = job.start("forever", *TORCHRUN, "--nproc-per-node", "2")
    for rank in range(2):
        wait_for_file(job.folder / f"pid.{rank}", RUN_S, [launcher])
    [pid] = job.nodes(role)
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(RUN_S) != 0
    job.demand_no_process()
    assert re.search(rf"BytePSError: .*{role}\b.*lost", launcher.text)
    assert re.search(rf"embedded {role}.* ended with signal 9", launcher.text)


def test_rank_that_does_not_join(job: Started) -> None:
    env = {"BYTEPS_START_TIMEOUT_S": "3"}
    launcher = job.start("absent", *TORCHRUN, "--nproc-per-node", "2", env=env)
    assert launcher.wait(RUN_S) != 0
    wanted = r"ranks \[1\] of 2 did not start BytePS within 3 s \(BYTEPS_START_TIMEOUT_S\)"
    assert re.search(wanted, launcher.text)
    job.demand_nothing_left()


def test_interrupt_ends_everything(job: Started) -> None:
    """Ctrl-C at torchrun ends everything."""
    launcher = job.start("forever", *TORCHRUN, "--nproc-per-node", "2")
    for rank in range(2):
        wait_for_file(job.folder / f"pid.{rank}", RUN_S, [launcher])
    launcher.send(signal.SIGINT)
    assert launcher.wait(END_S * 2) != 0
    job.demand_no_process()


# torchrun for a replica that gets SIGTERM: it does not restart the ranks, and its exit status says
# why.


SCRIPT = """
import os, signal, sys, time
from byteps.launcher import leaving

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
with open(sys.argv[2], "a") as lives:
    lives.write("life\\n")
# torchrun ends the other rank with the first one that fails: it may not have begun.
while open(sys.argv[2]).read().count("life") % 2:
    time.sleep(0.01)
if sys.argv[1] == "told":
    os.kill(os.getpid(), signal.SIGTERM)
while sys.argv[1] in ("told", "torchrun is told", "no replica") and not told:
    time.sleep(0.01)
if sys.argv[1] == "no replica":  # it has saved, as Megatron does, and ends well
    sys.exit(0)
sys.exit(leaving.status() if told else int(sys.argv[1]))
"""


def start(folder: Path, what: str, python: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [
            *(python, "-m", "byteps.launcher.leaving", "--standalone"),
            *("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"),
            *(str(script), what, str(folder / "lives")),
        ],
        env={**clean_environment(folder), "PYTHON_EXEC": python},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("what", "status", "lives"),
    [
        ("told", 143, 2),
        ("torchrun is told", 143, 2),
        ("no replica", 143, 2),
        ("0", 0, 2),
        ("3", 1, 4),
    ],
)
def test_status(run_dir: Path, warm_python: str, what: str, status: int, lives: int) -> None:
    """The status of a job of two ranks has two lines for each of its generations."""
    process = start(run_dir, what, warm_python)
    written = run_dir / "lives"
    try:
        deadline = time.monotonic() + IMPORT_S
        while what in ("torchrun is told", "no replica") and process.poll() is None:
            if written.exists() and len(written.read_text().splitlines()) == 2:
                process.send_signal(signal.SIGTERM)
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        text = process.communicate(timeout=IMPORT_S)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, text
    assert len(written.read_text().splitlines()) == lives, text
    said = "replica" if what != "no replica" else "torchrun"
    assert (f"{said} got SIGTERM" in text) == (status == 143)
    assert ("Traceback" in text) == (status == 1)
