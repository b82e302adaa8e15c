"""The benchmark as users start it, with quick sizes: its exit status and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.kit.emulation import started_at
from bench.kit.plan import Plan
from bench.pushpull_bench import make_plan, parse
from scripts.children import captured

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOOL = BENCH / "pushpull_bench.py"
NETNS = Path("/run/netns")
LIMIT_S = 500.0

# Variables of the tests' caller, which the tool must ignore.
FOREIGN = {"RANK", "WORLD_SIZE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"}


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def namespaces_of(pid: int) -> list[str]:
    return [entry.name for entry in NETNS.glob(f"bps-bench-{pid}-*")] if NETNS.exists() else []


def run_tool(folder: Path, *arguments: str, command: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run the tool; get exit status and stdout. stderr goes to a log of the test."""
    with (folder / "tool.log").open("wb") as log:
        process = subprocess.Popen(
            [*(command or (sys.executable,)), str(TOOL), *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    assert namespaces_of(process.pid) == []
    return process.returncode, output


def lines_of(output: str, backend: str) -> list[list[str]]:
    table = output.split("\n\n")[0].splitlines()
    return [line.split() for line in table if not line.startswith("#") and backend in line.split()]


@pytest.mark.requires("root")
@pytest.mark.usefixtures("warm_ranks")
def test_two_workers_and_a_server_on_emulated_hosts(run_dir: Path) -> None:
    status, output = run_tool(
        run_dir,
        *("--sizes", "64KiB", "--emulate", "3@200mbit", "--iters", "2", "--warmup", "1"),
        *("--max-busy", "1", "--min-ratio", "0.0001", "--max-ratio", "1000"),
    )
    assert status == 0, output
    (line,) = lines_of(output, "byteps")
    assert float(line[10]) > 0  # of-limit
    assert "3 network namespaces" in output
    assert "speed over that of gloo" in output


@pytest.mark.thorough
@pytest.mark.requires("root")
def test_a_missed_bar_is_an_exit_status(run_dir: Path) -> None:
    status, output = run_tool(
        run_dir,
        *("--sizes", "64KiB", "--emulate", "2@200mbit", "--colocate", "--backends", "byteps"),
        *("--servers", "2", "--iters", "1", "--warmup", "0", "--min-of-limit", "100"),
        *("--max-busy", "1"),
    )
    assert status == 1
    assert output.rstrip().endswith("MISS")


@pytest.mark.thorough
def test_a_job_that_torchrun_started(run_dir: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    status, output = run_tool(
        run_dir,
        *("--sizes", "4KiB", "--iters", "2", "--launches", "2"),
        command=(*launcher, "--nproc-per-node", "2"),
    )
    assert status == 0, output
    (line,) = lines_of(output, "byteps")
    assert line[4:6] == ["2", "1"]
    assert output.split("\n\n")[1].splitlines()[1].split()[-1] == "2"


def test_a_server_that_cannot_start_ends_the_run_with_its_error(run_dir: Path) -> None:
    log = run_dir / "tool.log"
    os.environ["BYTEPS_PARTITION_BYTES"] = "many"
    try:
        status, _ = run_tool(run_dir, "--sizes", "4KiB", "--iters", "1")
    finally:
        del os.environ["BYTEPS_PARTITION_BYTES"]
    assert status == 1
    assert "BYTEPS_PARTITION_BYTES" in log.read_text()


@pytest.mark.requires("root")
def test_a_terminated_run_takes_everything_down(run_dir: Path) -> None:
    with (run_dir / "tool.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(TOOL), "--emulate", "3@1mbit", "--sizes", "64MiB"],
            env=environment(),
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 60
    while len(namespaces_of(process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2.0)  # its processes are starting, or wait for each other
    names = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    children = {int(pid): started_at(int(pid)) for pid in names}
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert namespaces_of(process.pid) == []
    assert children
    # An orphan exists until init reaps it, and its pid may be reused.
    deadline = time.monotonic() + 60
    while [pid for pid, start in children.items() if start and started_at(pid) == start]:
        assert time.monotonic() < deadline, children
        time.sleep(0.1)


def test_idle_costs(run_dir: Path) -> None:
    record = run_dir / "idle.json"
    done = captured(
        [
            *(sys.executable, str(BENCH / "idle/run.py"), "--keys", "20", "--seconds", "0.5"),
            *("--json", str(record)),
        ],
        LIMIT_S,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    idle = json.loads(record.read_text())
    assert idle["accumulator_bytes_per_key"] == 4096
    assert idle["server_core"] < 1.0


# Command lines of users.


def plan_of(*arguments: str, **environment: str) -> Plan:
    return make_plan(parse(arguments, ""), environment)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backends", "byteps,mpi"], "backend 'mpi' is none of"),
        (["--backends", "gloo,gloo"], "each backend once"),
        (["--backends", "nccl"], "--device cuda"),
        (["--backends", "sockets", "--flows", "0"], "at least one flow"),
        (["--dtype", "float8"], "dtype 'float8' is none of"),
        (["--sizes", "6B"], "no whole number of float32"),
        (["--sizes", "8B", "--tensors", "3"], "cannot be split"),
        (["--min", "4KiB"], "--min and --max together"),
        (["--emulate", "500mbit"], "like 8@500mbit"),
        (["--emulate", "4@1gbit", "--workers", "4", "--servers", "4"], "need 8 hosts"),
        (["--nics-per-host", "2"], "--nics-per-host .* needs --emulate"),
        (["--nics-per-host", "0"], "--nics-per-host must be at least 1"),
        (["--uneven", "4"], "--uneven .* needs --ranks-per-host"),
        (["--iters", "0"], "at least 1"),
        (["--workers", "0"], "at least one worker"),
    ],
)
def test_bad_use_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_of(*arguments)
