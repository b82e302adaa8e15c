"""worker.sh: embedded mode, the Python that runs the ranks, restarts, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.children import captured, free_ports
from tests.multiproc.cluster import HERE, LOOPBACK, RUN_S, START_S, wait_all, wait_for_file
from tests.multiproc.scripted import SCRIPTED, SCRIPTS, Scripted, ask, environment, scripted

__all__ = ["scripted"]  # pytest finds this fixture by its name here.


@pytest.mark.thorough
def test_servers_beside_the_workers(scripted: Scripted) -> None:
    """One server runs on a machine of its own, and worker.sh starts two others."""
    port_file = scripted.folder / "port"
    sizes = ["--workers", "2", "--servers", "3"]
    where = ["--host", LOOPBACK, "--port", "0", "--port-file", str(port_file)]
    scheduler = scripted.start("scheduler", *where, *sizes)
    port = int(wait_for_file(port_file, START_S, [scheduler]).split()[1])
    address = ["--scheduler", f"{LOOPBACK}:{port}"]
    server = scripted.start("server", *address, *sizes)
    worker = scripted.start(
        "worker",
        *(*address, "--servers", "3", "--local-servers", "2", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0"),
        *("--", *SCRIPTED, "once", str(scripted.folder)),
    )
    wait_all([worker, server, scheduler], RUN_S)
    for process in (worker, server, scheduler):
        assert process.wait(0) == 0, process.text
    assert "rank 1 of 2: sums are right" in worker.text
    scripted.demand_no_process()


def test_local_servers_need_a_scheduler(run_dir: Path) -> None:
    said = ask(run_dir, "worker", "--local-servers", "1", "--", "script.py")
    assert said.returncode == 2
    assert "--local-servers needs --scheduler" in said.stderr


def test_embedded_mode_of_worker_sh(scripted: Scripted) -> None:
    """Without --scheduler, worker.sh starts a scheduler and servers. A single rank needs no
    torch.distributed."""
    worker = scripted.start(
        "worker",
        *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0"),
        *("--servers", "2", "--", *SCRIPTED, "once", str(scripted.folder)),
    )
    assert worker.wait(RUN_S) == 0, worker.text
    assert "rank 0 of 1: sums are right" in worker.text
    scripted.demand_no_process()


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_restarts_with_torchs_own_groups(scripted: Scripted, nodes: int) -> None:
    """torchrun restarts the ranks (with --master-addr, as documented), and gloo's groups
    are new."""
    port = str(free_ports())
    env = {"LIVES": "2", "JOB_FOLDER": str(scripted.folder), "BYTEPS_EMBEDDED_SERVERS": "1"}
    workers = [
        scripted.start(
            "worker",
            *("--nnodes", str(nodes), "--node-rank", str(node)),
            *("--nproc-per-node", str(2 // nodes), "--max-restarts", "1"),
            *("--master-addr", LOOPBACK, "--master-port", port),
            *("--", str(HERE / "programs/keep.py"), "embedded", "restarts-gloo"),
            env={**env, "BYTEPS_HOST_ID": f"host {node}"},
        )
        for node in range(nodes)
    ]
    wait_all(workers, RUN_S)
    text = "".join(worker.text for worker in workers)
    assert [worker.wait(0) for worker in workers] == nodes * [0], text
    for life in range(2):
        for rank in range(2):
            assert f"rank {rank} of life {life}: sums inside the host are right" in text
    scripted.demand_no_process()


def test_worker_sh_that_is_told_to_end(scripted: Scripted) -> None:
    worker = scripted.start(
        "worker",
        *("--nproc-per-node", "1", "--", *SCRIPTED, "forever", str(scripted.folder)),
    )
    wait_for_file(scripted.folder / "ready.0", RUN_S, [worker])
    worker.send(signal.SIGTERM)
    assert worker.wait(RUN_S) == 143, worker.text
    assert "torchrun got SIGTERM" in worker.text
    scripted.demand_no_process()


# The Python that runs the ranks, and how torchrun's machines meet.


def make_python(folder: Path, *, has_byteps: bool) -> Path:
    """Make an environment's Python: this Python, with or without byteps and torch."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin/python"
    isolated = "" if has_byteps else " -S"
    python.write_text(f'#!/bin/sh\nexec {sys.executable}{isolated} "$@"\n')
    python.chmod(0o755)
    return python


def ask_worker(
    run_dir: Path, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return captured(
        ["bash", str(SCRIPTS / "worker.sh"), "--dry-run", *words, "--", "script.py"],
        START_S,
        env={**environment(run_dir), **(env or {})},
    )


def test_the_active_environment_runs_the_ranks(run_dir: Path) -> None:
    active = make_python(run_dir / "active", has_byteps=True)
    bare = make_python(run_dir / "bare", has_byteps=False)
    said = ask_worker(run_dir, env={"VIRTUAL_ENV": str(active.parents[1])})
    assert f"{active} -m byteps.launcher.leaving" in said.stdout
    assert f"worker.sh: {active} runs the ranks" in said.stderr
    path = f"{active.parent}:{os.environ['PATH']}"
    said = ask_worker(run_dir, env={"PATH": path, "VIRTUAL_ENV": ""})
    assert f"{active} -m byteps.launcher.leaving" in said.stdout
    # An environment without byteps is reported and skipped.
    said = ask_worker(run_dir, env={"VIRTUAL_ENV": str(bare.parents[1])})
    assert said.returncode == 0 and str(bare) not in said.stdout
    assert f"the active environment, {bare.parents[1]}, has no torch, or no byteps" in said.stderr


RESTARTS = ("--max-restarts", "2")
AT = ("--master-addr", "127.0.0.1", "--master-port", "2345")
FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), None),
        ((*RESTARTS, "--rdzv-backend", "etcd-v2"), None),
        (RESTARTS, "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 "),
        (
            (*RESTARTS, *AT, "--nnodes", "2", "--node-rank", "1", "--rdzv-id", "7"),
            "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:2345 --rdzv-id=7 "
            "--rdzv-conf=is_host=0 --local-addr=127.0.0.1 ",
        ),
        ((*RESTARTS, "--rdzv-backend", "c10d"), "--rdzv-backend=c10d script.py"),
    ],
)
def test_a_restart_has_a_store_of_its_own(
    run_dir: Path, words: tuple[str, ...], wanted: str | None
) -> None:
    said = ask_worker(run_dir, *words)
    assert said.returncode == 0, said.stderr
    assert (FRESH in said.stdout) == (wanted is not None)
    assert (wanted or " script.py") in said.stdout
    assert ("rendezvous" in said.stderr) == (wanted is not None and wanted[-1] == " ")


def test_check_finds_typos(run_dir: Path) -> None:
    """The check works without a scheduler, too."""
    command = ["bash", str(SCRIPTS / "worker.sh"), "--check"]
    for name, status in (("BYTEPS_PARTITION_BYTE", 2), ("BYTEPS_OF_MINE", 0)):
        said = captured(command, START_S, env={**environment(run_dir), name: "1"})
        assert said.returncode == status, said.stdout
        mark = "WRONG" if status else "note "
        assert f"{mark} unknown variable {name} is ignored" in said.stdout
        assert "ok    the settings of a worker" in said.stdout and "embedded mode" in said.stdout
