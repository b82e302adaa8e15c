"""The benchmark as users start it, with sizes that take no time; its options; and plain sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench import pushpull_bench
from bench.kit.emulation import started_at
from bench.kit.plan import Plan
from bench.kit.record import parse_size
from bench.pushpull.backends import Program, Sockets, build
from bench.pushpull_bench import make_gates, make_plan, parse

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOOL = BENCH / "pushpull_bench.py"
NETNS = Path("/run/netns")
LIMIT_S = 500.0

# Set for the tests by their caller; the tool must not take it for its own.
FOREIGN = {"RANK", "WORLD_SIZE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"}


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def namespaces_of(pid: int) -> list[str]:
    return [entry.name for entry in NETNS.glob(f"bps-bench-{pid}-*")] if NETNS.exists() else []


def run_tool(folder: Path, *arguments: str, command: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit status and stdout; stderr is a log of the test."""
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


@pytest.mark.thorough  # the next one has both, too
def test_both_backends_on_loopback(run_dir: Path) -> None:
    record = run_dir / "run.json"
    status, output = run_tool(
        run_dir,
        *("--sizes", "4KiB,96KiB", "--dtype", "float32,bfloat16", "--tensors", "3"),
        *("--iters", "3", "--warmup", "1", "--json", str(record), "--plot", str(run_dir / "plots")),
    )
    assert status == 0, output
    assert len(lines_of(output, "byteps")) == len(lines_of(output, "gloo")) == 4
    assert all(line[-1] == "0" for line in lines_of(output, "byteps"))
    content = json.loads(record.read_text())
    launches = content["runs"][0]["launches"]
    assert [launch["backend"] for launch in launches] == ["byteps", "gloo"]
    for launch in launches:
        for measured in launch["measured"]:
            assert len(measured["samples_s"]) == 3
            assert measured["worker_cpu_s"] > 0
    assert launches[0]["measured"][0]["node_cpu_s"] > 0
    assert {path.name for path in (run_dir / "plots").iterdir()} == {"time.png", "ratio.png"}


@pytest.mark.requires("root")
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
def test_hosts_of_two_nics(run_dir: Path) -> None:
    record = run_dir / "run.json"
    status, output = run_tool(
        run_dir,
        *("--sizes", "4MiB", "--emulate", "3@100mbit", "--nics-per-host", "2", "--iters", "2"),
        *("--warmup", "1", "--tensors", "2", "--max-busy", "1", "--json", str(record)),
        *("--backends", "byteps,byteps-one-nic,gloo"),
    )
    assert status == 0, output
    assert "2 NICs of 100" in output
    for backend in ("byteps", "byteps-one-nic", "gloo"):
        (line,) = lines_of(output, backend)
        assert line[-1] == "0"
    assert json.loads(record.read_text())["runs"][0]["plan"]["topology"]["nics_per_host"] == 2


@pytest.mark.thorough
@pytest.mark.requires("root")
def test_hosts_of_two_ranks_sum_in_pieces(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_NODE_PIECE_BYTES", "16384")
    status, output = run_tool(
        run_dir,
        *("--workers", "4", "--ranks-per-host", "2", "--emulate", "3@200mbit", "--sizes", "256KiB"),
        *("--backends", "byteps,gloo-nodes", "--iters", "1", "--warmup", "0", "--max-busy", "1"),
    )
    assert status == 0, output
    for backend in ("byteps", "gloo-nodes"):
        (line,) = lines_of(output, backend)
        assert line[4] == "4" and line[-1] == "0", line


@pytest.mark.thorough
@pytest.mark.requires("root")
def test_plain_sockets_beside_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the user has on PYTHONPATH reaches the ranks: this file is imported at their start.
    (run_dir / "sitecustomize.py").write_text(
        f"import pathlib; pathlib.Path({str(run_dir)!r}, 'seen').touch()"
    )
    monkeypatch.setenv("PYTHONPATH", str(run_dir))
    record = run_dir / "run.json"
    status, output = run_tool(
        run_dir,
        *("--sizes", "4KiB,1MiB", "--emulate", "4@200mbit", "--servers", "2", "--iters", "2"),
        *("--backends", "byteps,sockets", "--flows", "2", "--max-busy", "1"),
        *("--json", str(record)),
    )
    assert status == 0, output
    large = lines_of(output, "sockets")[1]
    assert large[4:6] == ["2", "2"] and large[11] == "1.000"
    rows = json.loads(record.read_text())["runs"][0]["rows"]
    assert all(row["of_sockets"] > 0 for row in rows)
    assert (run_dir / "seen").exists()


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
    # One whose parent is gone is there until init has reaped it, and its number may be another's.
    deadline = time.monotonic() + 60
    while [pid for pid, start in children.items() if start and started_at(pid) == start]:
        assert time.monotonic() < deadline, children
        time.sleep(0.1)


def test_idle_costs(run_dir: Path) -> None:
    record = run_dir / "idle.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "idle/run.py"), "--keys", "20", "--seconds", "0.5"),
            *("--json", str(record)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    idle = json.loads(record.read_text())
    assert idle["accumulator_bytes_per_key"] == 4096
    assert idle["server_core"] < 1.0


# What users write on the command line.


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("1.5MiB", 3 << 19),
        ("1GB", 10**9),
        ("2 gib", 2 << 30),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-4KiB", "1.3B", "0", "12 parsecs", "1e6"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"understood|whole"):
        parse_size(text)


def plan_of(*arguments: str, **environment: str) -> Plan:
    return make_plan(parse(arguments, ""), environment)


def test_a_launcher_says_how_many_workers_there_are() -> None:
    plan = plan_of(RANK="3", WORLD_SIZE="6", DMLC_NUM_SERVER="2")
    assert (plan.topology.workers, plan.topology.servers) == (6, 2)


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
        (["--nics-per-host", "2"], "for the hosts of --emulate"),
        (["--nics-per-host", "0"], "a number of NICs"),
        (["--uneven", "4"], "for hosts of several ranks"),
        (["--iters", "0"], "at least 1"),
        (["--workers", "0"], "at least one worker"),
    ],
)
def test_bad_use_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_of(*arguments)


def test_a_gpu_that_is_not_there_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert pushpull_bench.main(["--device", "cuda", "--sizes", "4KiB"]) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err


def test_nics_have_the_rate_of_a_link_each() -> None:
    topology = plan_of("--emulate", "3@200mbit", "--nics-per-host", "2").topology
    assert (topology.link_bits, topology.host_bits) == (200_000_000, 400_000_000)


def test_plain_sockets_are_not_for_a_rank() -> None:
    with pytest.raises(ValueError, match="without a launcher"):
        plan_of("--backends", "sockets", RANK="0", WORLD_SIZE="2")


def test_emulation_is_not_for_a_rank() -> None:
    with pytest.raises(ValueError, match="unset RANK"):
        plan_of("--emulate", "3@1gbit", RANK="0", WORLD_SIZE="2")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--min-ratio", "1", "--backends", "gloo"], "does not name"),
        (["--min-ratio", "1", "--backends", "byteps"], "a backend to compare"),
        (["--min-of-limit", "0.9"], "--emulate or --link"),
    ],
)
def test_bars_that_cannot_be_held_are_refused(arguments: list[str], complaint: str) -> None:
    options = parse(arguments, "")
    with pytest.raises(ValueError, match=complaint):
        make_gates(options, make_plan(options, {}))


# Plain sockets in the pattern of a push-pull: every byte, both ways, over every flow.


PROGRAM_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


@contextmanager
def servers(program: Program, folder: Path, count: int, connections: int) -> Iterator[list[str]]:
    """So many servers; every one must end well when its connections have."""
    files = [folder / f"{index}.port" for index in range(count)]
    running = [
        subprocess.Popen([program.server, "127.0.0.1", str(file), str(connections)])
        for file in files
    ]
    try:
        deadline = time.monotonic() + PROGRAM_LIMIT_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield [file.read_text().strip() for file in files]
        assert [process.wait(PROGRAM_LIMIT_S) for process in running] == [0] * count
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("count", "flows"), [(1, 1), (1, 4), (3, 2)])
def test_every_byte_comes_back_in_every_round(
    program: Program, tmp_path: Path, count: int, flows: int
) -> None:
    with servers(program, tmp_path, count, flows) as places:
        sockets = Sockets(library=str(program.library), servers=places, flows=flows)
        # From one byte per server to several calls per flow, up and down again.
        for size in (7, 64 << 10, (9 << 20) + 5, 1000, 3 << 20):
            sockets.reduce(
                [torch.empty(size - 3, dtype=torch.uint8), torch.empty(3).byte()], "t", "same"
            )
        sockets.close()


def test_servers_answer_with_bytes_of_their_own(program: Program, tmp_path: Path) -> None:
    with servers(program, tmp_path, 2, 2) as places:
        sockets = Sockets(library=str(program.library), servers=places, flows=2)
        size = 1 << 20
        sockets.reduce([torch.empty(size, dtype=torch.uint8)], "t", "same")
        sockets._pulled.fill_(7)
        sockets.reduce([torch.empty(size, dtype=torch.uint8)], "t", "same")
        assert (sockets._pulled == 1).all()  # each was received, and none is left of before
        sockets.close()
