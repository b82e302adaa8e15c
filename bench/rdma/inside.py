"""Measurements in the guest, interleaved, with results as JSON.

``python -m bench.rdma.inside SPEC RESULT``. Workers are forked from this process, so that torch is
imported only once: on an emulated CPU the import takes half a minute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch

from bench.kit import record
from bench.kit.emulation import LOOPBACK
from bench.kit.processes import LaunchError, Processes, plain_environment, server_executable
from scripts.children import captured

START_S = 60.0
RUN_S = 180.0
IN_FLIGHT = 16
"""Number of partitions in flight while control messages are timed."""
PLANES = {"one plane": "0", "two planes": "1"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    address: str
    size: int
    """Bytes of a partition, and of a write of perftest."""
    partitions: int
    """Number of partitions of the summed tensor."""
    rounds: int
    repetitions: int
    writes: int
    window: int
    """Value of BYTEPS_RDMA_WINDOW_BYTES. Emulated links are slower than the links for which the
    default is meant."""
    ping_ms: int
    idle_s: float


def perftest(spec: Spec) -> float:
    """Return the rate of plain RDMA writes of the given size: bytes per second, both directions
    together."""
    command = ["ib_write_bw", "-R", "-b", "-s", str(spec.size), "-n", str(spec.writes), "-t", "16"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_S
            while True:
                client = captured([*command, spec.address], RUN_S)
                if client.returncode == 0:
                    break
                if time.monotonic() > deadline:
                    raise LaunchError(f"ib_write_bw: {client.stdout}{client.stderr}")
                time.sleep(0.3)
        finally:
            server.kill()
    match = re.search(rf"^ *{spec.size} +\d+ +[\d.]+ +([\d.]+)", client.stdout, re.MULTILINE)
    if match is None:
        raise LaunchError(f"ib_write_bw printed no figure: {client.stdout}")
    return float(match[1]) * (1 << 20)


@contextmanager
def job(spec: Spec, settings: dict[str, str]) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Return a context with a scheduler and a server. It yields the variables to join them, and
    their pids."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        env = {
            **plain_environment(),
            "DMLC_PS_ROOT_URI": spec.address,
            "DMLC_NODE_HOST": spec.address,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
            "BYTEPS_PARTITION_BYTES": str(spec.size),
            "BYTEPS_MIN_PARTITION_BYTES": str(spec.size),
            "RANK": "0",
            "WORLD_SIZE": "1",
            **settings,
        }
        command = [server_executable(), "--die-with-parent", "--role"]
        port_file = Path(folder) / "port"
        scheduler = [*command, "scheduler", "--port-file", str(port_file)]
        pids = [processes.start("scheduler", scheduler, LOOPBACK, env)]
        env["DMLC_PS_ROOT_PORT"] = processes.wait_file(port_file, START_S).split()[1]
        pids.append(processes.start("server", [*command, "server"], LOOPBACK, env))
        yield env, pids
        processes.wait_all(START_S)


def forked(env: dict[str, str], program: Callable[[], Any]) -> Any:
    """Run a program in a child with this environment. Return its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            os.environ.clear()
            os.environ.update(env)
            with os.fdopen(writing, "w") as out:
                json.dump(program(), out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise LaunchError(f"the worker ended with {status}")
    return json.loads(text)


def push_pull(spec: Spec, settings: dict[str, str]) -> float:
    """Return the rate of sums of a single worker: bytes per second, both directions together. The
    sums need only transport, no addition."""

    def work() -> float:
        bps.init()
        tensor = torch.empty(spec.size * spec.partitions, dtype=torch.uint8)
        spent = []
        for round_ in range(spec.rounds + 1):
            tensor.fill_(round_ + 1)
            begin = time.monotonic()
            bps.push_pull_inplace(tensor, average=False, name="goodput")
            spent.append(time.monotonic() - begin)
            if not (tensor == round_ + 1).all():
                raise ValueError(f"round {round_} is wrong")
        bps.shutdown()
        # The first sum declares the tensor, so it does not count.
        return 2 * tensor.numel() * spec.rounds / sum(spent[1:])

    with job(spec, settings) as (env, _):
        return forked(env, work)


def control_delay(spec: Spec, settings: dict[str, str]) -> dict[str, float]:
    """Return p50 and p99, in seconds, of the round trip of a control message (a declaration).
    Meanwhile sums of IN_FLIGHT partitions fill the link."""

    def work() -> dict[str, float]:
        bps.init()
        tensor = torch.ones(spec.size * IN_FLIGHT, dtype=torch.uint8)
        bps.push_pull_inplace(tensor, average=False, name="filling")
        delays: list[float] = []
        done = threading.Event()

        def ping() -> None:
            while not done.wait(spec.ping_ms / 1e3):
                begin = time.monotonic()
                name = f"ping {len(delays)}"
                bps.declare(
                    [bps.TensorDeclaration(name=name, dtype=torch.float32, numel=1, average=False)]
                )
                delays.append(time.monotonic() - begin)

        pinging = threading.Thread(target=ping)
        pinging.start()
        for _ in range(spec.rounds * spec.partitions // IN_FLIGHT):
            bps.push_pull_inplace(tensor, average=False, name="filling")
        done.set()
        pinging.join()
        bps.shutdown()
        delays.sort()
        p50, p99 = (delays[len(delays) * percent // 100] for percent in (50, 99))
        return {"pings": len(delays), "p50": p50, "p99": p99}

    room = {"BYTEPS_SERVER_WINDOW_BYTES": str(spec.size * IN_FLIGHT)}
    with job(spec, {**settings, **room}) as (env, _):
        return forked(env, work)


def idle(spec: Spec, settings: dict[str, str]) -> dict[str, float]:
    """Return the fraction of a core that each process uses while nothing is summed."""
    with job(spec, settings) as (env, nodes):

        def work() -> list[float]:
            bps.init()
            bps.push_pull_inplace(torch.ones(spec.size), average=False, name="idle")
            time.sleep(1.0)  # lets the last messages finish
            pids = [*nodes, os.getpid()]
            begin, before = time.monotonic(), [record.process_cpu_ns(pid) for pid in pids]
            time.sleep(spec.idle_s)
            spent, after = time.monotonic() - begin, [record.process_cpu_ns(p) for p in pids]
            bps.shutdown()
            return [(b - a) / 1e9 / spent for a, b in zip(before, after, strict=True)]

        return dict(zip(("scheduler", "server", "worker"), forked(env, work), strict=True))


def measure(spec: Spec) -> dict[str, Any]:
    """Measure all figures, interleaved, so that drift affects all of them. The figure for plain
    writes is the mean of the one right before the sums and the one right after."""
    rdma = {"DMLC_ENABLE_RDMA": "ibverbs", "BYTEPS_RDMA_WINDOW_BYTES": str(spec.window)}
    planes = {name: {**rdma, "BYTEPS_RDMA_DATA_PLANE": value} for name, value in PLANES.items()}
    goodput: dict[str, list[float]] = {"ib_write_bw": [], **{name: [] for name in PLANES}}
    delays: dict[str, list[dict[str, float]]] = {name: [] for name in PLANES}

    for repetition in range(1, spec.repetitions + 1):
        turn = f"{repetition}/{spec.repetitions}"
        before = perftest(spec)
        for name, settings in planes.items():
            goodput[name].append(push_pull(spec, settings))
            print(f"{turn} {name}: {goodput[name][-1] / 1e6:.1f} MB/s", flush=True)
        goodput["ib_write_bw"].append((before + perftest(spec)) / 2)
        print(f"{turn} ib_write_bw: {goodput['ib_write_bw'][-1] / 1e6:.1f} MB/s", flush=True)
        for name, settings in planes.items():
            delays[name].append(control_delay(spec, settings))
            p99_ms = delays[name][-1]["p99"] * 1e3
            print(f"{turn} {name}: p99 of control {p99_ms:.1f} ms", flush=True)
    print("a job that sums nothing", flush=True)
    spent = {"tcp": idle(spec, {}), "rdma": idle(spec, rdma)}
    return {"spec": asdict(spec), "goodput": goodput, "delays": delays, "idle": spent}


def main(arguments: list[str]) -> int:
    spec_file, result_file = map(Path, arguments)
    spec = Spec(**json.loads(spec_file.read_text()))
    try:
        result = measure(spec)
    except LaunchError as error:
        print(error)
        return 1
    result_file.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
