"""Scripts in every mode, under torchrun, under Ray and submitted, with their metrics and traces."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
import torch
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest

from bench.ray_failures.cases import ENVIRONMENT, MODEL
from bench.ray_failures.nodes import SCRIPT
from megatron_byteps_ray.__main__ import parse
from megatron_byteps_ray.cluster import Metrics, Pool, resources
from megatron_byteps_ray.job import Job, record_of_steps
from megatron_byteps_ray.profiling import Profile, merge
from megatron_byteps_ray.settings import Settings
from scripts.children import captured, free_ports
from tests.layouts.job import data_arguments, tiny_dataset
from tests.layouts.under_ray.modes import compare, run_locally, run_under_ray
from tests.layouts.under_ray.rows import CELLS, FULL, Cell

LIMIT_S = 500.0


def _seen(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_script_runs_in_both_modes(pool: Pool, run_dir: Path) -> None:
    script = run_dir / "script.py"
    script.write_text(SCRIPT)
    (run_dir / "ray").mkdir()
    (run_dir / "local").mkdir()
    settings = Settings(
        entry=str(script),
        arguments=(str(run_dir / "ray"), "--flag"),
        folder=run_dir / "job",
        environment=ENVIRONMENT,
    )
    events: list[Any] = []
    Job(settings, events.append, pool).run()
    command = [sys.executable, "-m", "megatron_byteps_ray", "--mode", "local", "--ranks", "2"]
    run = captured(
        [*command, str(script), "--", str(run_dir / "local"), "--flag"],
        LIMIT_S,
        env={**os.environ, **ENVIRONMENT},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ours, torchrun = _seen(run_dir / "ray"), _seen(run_dir / "local")
    assert ours[0].pop("arguments") == [str(run_dir / "ray"), "--flag"]
    assert torchrun[0].pop("arguments") == [str(run_dir / "local"), "--flag"]
    assert ours[0] == torchrun[0]
    for rank, seen in enumerate(ours):
        assert seen["sum"] == [9.0, 18.0, 27.0, 36.0]
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("2", "2")
    steps = record_of_steps(run_dir / "job")
    assert [(s["step"], s["tokens"], s["values"]) for s in steps] == [
        (n, 4, {"total": 30.0 * n}) for n in (1, 2, 3)
    ]
    assert events[-1]["event"] == "done"


# Ranks under Ray compute the same as ranks under torchrun, to the last bit.


# Layouts of four ranks, which is the size of the pool. `make ray-layouts` runs all layouts, and
# adapters.
_CELLS = [
    pytest.param(cell, id=cell.name)
    for cell in CELLS
    if cell.trained == FULL and cell.name in ("tp2-pp2", "dp4-distributed-optimizer")
]


@pytest.mark.parametrize("cell", _CELLS)
def test_a_layout_in_both_modes(cell: Cell, pool: Pool, settings: Settings, run_dir: Path) -> None:
    arguments = [*cell.arguments, *data_arguments(tiny_dataset(run_dir))]
    local = run_locally(cell, run_dir / "local", arguments)
    ray = run_under_ray(cell, run_dir / "ray", arguments, pool, settings)
    outcome = compare(local, ray)
    assert outcome.differences == [] and outcome.problems == []
    assert (outcome.groups, outcome.sums) == ((0, 0) if cell.name == "tp2-pp2" else (1, 1))
    # A different bit in a parameter of a rank is detected.
    other = copy.deepcopy(ray)
    next(iter(other[-1].parameters.values())).view(-1).view(torch.int32)[0] ^= 1
    (difference,) = compare(local, other).differences
    assert difference.startswith(f"rank {cell.ranks - 1}, parameter ")


# scripts/train.py --mode ray, as `make train MODE=ray` runs it: it loses a rank and continues.


ROOT = Path(__file__).resolve().parents[2]
TRAIN_LIMIT_S = 600.0


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("servers", []),
        # test_failures.py has jobs that lose ranks with this optimizer.
        pytest.param("megatron", [], marks=pytest.mark.thorough),
        pytest.param("megatron", ["--context-parallel-size", "2"], marks=pytest.mark.thorough),
    ],
    ids=["servers", "megatron", "context-parallel"],
)
def test_training_loses_a_rank_and_goes_on(
    optimizer: str, layout: list[str], run_dir: Path
) -> None:
    source = run_dir / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    script = [sys.executable, str(ROOT / "scripts/train.py"), "--out", str(run_dir / "out")]
    data = ["--data-cache", str(run_dir / "data"), "--data", str(source)]
    job = ["--mode", "ray", "--steps", "12", "--lose-rank-at", "6", "--optimizer", optimizer]
    small = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]
    small += layout
    run = captured(
        [*script, *data, *job, "--", *small], TRAIN_LIMIT_S, env={**os.environ, "MEGATRON_CPU": "1"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for said in (
        "step 6: killing the actor of rank 1",
        "generation 0 failed: rank 1 was lost with its actor",
        "generation 1: 2 ranks on 1 machine, 0 warm spares",
        "training again",
    ):
        assert said in run.stdout, run.stdout


# Metrics that the driver reports to Ray are available to Prometheus.


METRICS_LIMIT_S = 120.0


def _scrape() -> str:
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def _value(page: str, name: str, job: str) -> float | None:
    for line in page.splitlines():
        if line.startswith(f"ray_megatron_byteps_{name}{{") and f'job="{job}"' in line:
            return float(line.rpartition(" ")[2])
    return None


def test_metrics_are_served(pool: Pool) -> None:
    del pool  # this process is a driver of its cluster
    metrics = Metrics("a-job")
    metrics.ranks(4, 1, 2)
    for step in range(1, 6):
        values = {"lm loss": 6.0 - step}
        metrics.step({"step": step, "tokens": 100, "time": 1000.0 + step * 2.0, "values": values})
    metrics.restart()
    metrics.recovery(7.5)
    expected = {"ranks": 4.0, "spares": 1.0, "generation": 2.0, "step": 5.0, "loss": 1.0}
    expected |= {"tokens_per_second": 50.0, "restarts_total": 1.0, "recovery_seconds": 7.5}
    deadline = time.monotonic() + METRICS_LIMIT_S
    while True:  # Ray forwards the metrics every few seconds
        page = _scrape()
        seen = {name: _value(page, name, "a-job") for name in expected}
        if seen == expected:
            return
        assert time.monotonic() < deadline, seen
        time.sleep(0.5)


SERVING_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import byteps.torch as bps
from megatron_byteps_ray import report

dist.init_process_group("gloo")
bps.init()
bps.push_pull_inplace(torch.ones(4), average=False, name="x")
report(1, total=1.0)
while not os.path.exists(f"{sys.argv[1]}/scraped"):
    time.sleep(0.05)
bps.shutdown()
dist.destroy_process_group()
"""


def test_each_process_serves_its_own(pool: Pool, run_dir: Path) -> None:
    """Ranks and a server on a machine serve metrics at the addresses in the list for Prometheus."""
    (run_dir / "script.py").write_text(SERVING_SCRIPT)
    port = free_ports(3, host="0.0.0.0")
    settings = Settings(
        entry=str(run_dir / "script.py"),
        arguments=(str(run_dir),),
        folder=run_dir / "job",
        environment={**ENVIRONMENT, "BYTEPS_METRICS_PORT": str(port)},
        max_restarts=0,
    )
    pages: dict[str, str] = {}

    def scrape(event: dict[str, Any]) -> None:
        if event["event"] != "step":
            return
        for target in json.loads((run_dir / "job" / "prometheus.json").read_text()):
            (where,) = target["targets"]
            name, number = target["labels"].popitem()
            with urllib.request.urlopen(f"http://{where}/metrics", timeout=30) as answer:
                pages[f"{name} {number}"] = answer.read().decode()
        (run_dir / "scraped").touch()

    Job(settings, scrape, pool).run()
    assert set(pages) == {"server 0", "worker 0", "worker 1"}
    for name, page in pages.items():
        role, number = name.split()
        assert f'{{role="{role}",rank="{number}"' in page


# Traces of some steps of some ranks, from torch and BytePS, in one file.


Event = dict[str, Any]


class Merged:
    """The events of a file, by the titles of their processes."""

    def __init__(self, file: Path) -> None:
        events = json.loads(file.read_text())["traceEvents"]
        named = [event for event in events if event["name"] == "process_name"]
        titles = {event["pid"]: event["args"]["name"] for event in named}
        assert len(titles) == len(named), "two processes have one number"
        self.of: dict[str, list[Event]] = {}
        for event in events:
            if event["ph"] == "X":
                self.of.setdefault(titles.get(event["pid"], "?").split(":")[0], []).append(event)

    def span(self, title: str) -> tuple[float, float]:
        events = self.of[title]
        return min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)

    def rounds(self, title: str) -> set[int]:
        return {event["args"]["round"] for event in self.of[title]}


def test_a_job_under_ray(pool: Pool, settings: Settings, run_dir: Path) -> None:
    profile = Profile(folder=run_dir / "profile", ranks=(1,), first=3, last=5)
    job = replace(
        settings,
        arguments=(*MODEL, "--train-iters", "7"),
        folder=run_dir / "job",
        profile=profile,
    )
    Job(job, lambda event: None, pool).run()
    merged = Merged(profile.merge())
    assert {"torch, rank 1", "worker 1", "server 0"} <= set(merged.of)
    assert not {"torch, rank 0", "worker 0"} & set(merged.of)
    names = {event["name"] for event in merged.of["torch, rank 1"]}
    assert {"aten::bmm", "BmmBackward0"} <= names
    assert {event["name"] for event in merged.of["worker 1"]} >= {"push", "pull"}
    # Steps 3 to 5 are rounds 2 to 4; torch recorded the BytePS operations at the same time.
    assert merged.rounds("worker 1") == merged.rounds("server 0") == {2, 3, 4}
    (begin, end), (first, last) = merged.span("torch, rank 1"), merged.span("worker 1")
    assert begin <= first <= last <= end


def test_a_script_of_any_kind_under_torchrun(run_dir: Path) -> None:
    script = run_dir / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_ray", "--mode", "local"]
    command += ["--ranks", "2", "--profile-folder", str(run_dir / "profile")]
    command += ["--profile-first", "2", "--profile-last", "3", str(script), "--", str(run_dir)]
    run = captured(command, LIMIT_S, env={**os.environ, **ENVIRONMENT})
    assert run.returncode == 0, run.stdout + run.stderr
    assert "profile: " in run.stdout, run.stdout + run.stderr
    merged = Merged(run_dir / "profile" / "profile.json")
    assert {"torch, rank 0", "torch, rank 1", "worker 0", "worker 1", "server 0"} <= set(merged.of)
    assert merged.rounds("worker 0") == merged.rounds("worker 1") == {1, 2}


def test_bad_profiles_are_refused(tmp_path: Path) -> None:
    for values in ({"first": 1}, {"first": 5, "last": 4}, {"ranks": (-1,)}):
        with pytest.raises(ValueError, match=r"must be 2 or more|numbers from 0"):
            Profile(folder=tmp_path, **values)
    with pytest.raises(ValueError, match="rank 2 cannot be profiled: there are 2 ranks"):
        Settings(entry="a:b", profile=Profile(folder=tmp_path, ranks=(2,)))
    with pytest.raises(ValueError, match="no rank has left a profile"):
        Profile(folder=tmp_path).merge()
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is no timeline of BytePS or torch"):
        merge([other])
    command = [sys.executable, "-m", "megatron_byteps_ray", "--profile-ranks", "0", "a.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 2 and "--profile-ranks needs --profile-folder" in run.stderr


# A job that `ray job submit` sends to a running cluster: the driver runs on its head.


SUBMIT_LIMIT_S = 400.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENV = {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts a Ray head with a dashboard, and yields its address for jobs."""
    log = tmp_path_factory.mktemp("head") / "head.log"
    # Ray's sockets need a short path, and its processes may still write there when they end.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as short:
        process, address = _start(log, short)
        try:
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(log: Path, short: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start the head; repeated if the machine is too busy for the 30 s that Ray gives a node."""
    deadline = time.monotonic() + SUBMIT_LIMIT_S
    while True:
        gcs = free_ports(3)
        dashboard, client = gcs + 1, gcs + 2
        command = [*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "4"]
        command += ["--node-ip-address", "127.0.0.1", "--port", str(gcs), "--temp-dir", short]
        command += ["--dashboard-port", str(dashboard), "--ray-client-server-port", str(client)]
        command += ["--dashboard-agent-listen-port", "0", "--object-store-memory", str(100 << 20)]
        # Ray refuses to use a port twice. Its workers would take all ports from 10002 to 19999.
        command += ["--min-worker-port", "0", "--max-worker-port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=ENV,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{dashboard}"
        if _wait_for(f"{address}/api/version", process):
            return process, address
        assert "timed out during startup" in log.read_text(), log.read_text()
        assert time.monotonic() < deadline, "no head starts"


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the URL answers. Return False if the process ends first."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def _submit(head: str, entry: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Submit a job and wait for its end. Ray gives its agent 10 s to start, and on a busy machine
    asks the user to try again."""
    deadline = time.monotonic() + SUBMIT_LIMIT_S
    # `--` begins the entrypoint.
    submit = [*RAY, "job", "submit", "--address", head, "--", *entry]
    while True:
        done = captured(submit, SUBMIT_LIMIT_S, env=ENV, cwd=folder)
        if "No available agent to submit job" not in done.stdout + done.stderr:
            return done
        assert time.monotonic() < deadline, done.stdout + done.stderr


def test_a_submitted_job_trains(head: str, run_dir: Path) -> None:
    (run_dir / "script.py").write_text(SCRIPT)
    entry = [sys.executable, "-m", "megatron_byteps_ray", "--address", "auto", "--ranks", "2"]
    entry += ["--folder", str(run_dir / "job"), "--preload", "torch", "--cpus-per-rank", "0.5"]
    for name, value in ENVIRONMENT.items():
        entry += ["--environment", f"{name}={value}"]
    entry += [str(run_dir / "script.py"), "--", str(run_dir)]
    done = _submit(head, entry, run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done, after 1 generation" in done.stdout
    seen = [json.loads((run_dir / f"{rank}.json").read_text()) for rank in range(2)]
    assert [result["sum"] for result in seen] == [[9.0, 18.0, 27.0, 36.0]] * 2
    assert json.loads((run_dir / "job" / "job.json").read_text())["state"] == "done"


def test_a_job_that_fails_says_so(head: str, run_dir: Path) -> None:
    entry = [sys.executable, "-m", "megatron_byteps_ray", "--address", "auto", "nosuch.py"]
    entry += ["--preload", "torch", "--max-fruitless", "1", "--servers", "0", "--ranks", "1"]
    entry += ["--folder", str(run_dir / "job")]
    done = _submit(head, entry, run_dir)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: failed 1 times in a row without a step" in done.stdout
    assert "the entry 'nosuch.py' is no file on this machine" in done.stdout


# deploy/ray: the machines that Ray's autoscaler brings for a job.


MANIFESTS = {
    name: yaml.safe_load((ROOT / f"deploy/ray/{name}.yaml").read_text())
    for name in ("raycluster", "rayjob", "job")
}
MANIFESTS["raycluster"]["metadata"]["namespace"] = "default"


@pytest.mark.parametrize(
    "entrypoint",
    [MANIFESTS["rayjob"]["spec"]["entrypoint"], MANIFESTS["job"]["entrypoint"]],
    ids=["kuberay", "anyscale"],
)
@pytest.mark.parametrize(("spares", "machines"), [(0, 2), (8, 3)])
def test_the_autoscaler_brings_a_job_s_machines(
    entrypoint: str, spares: int, machines: int
) -> None:
    config = AutoscalingConfig(
        _derive_autoscaling_config_from_ray_cr(MANIFESTS["raycluster"]), skip_content_hash=True
    )
    settings = parse([f"--spares={spares}", *entrypoint.split()[3:]]).settings
    server, rank = resources(settings)
    bundles = [server] * (settings.servers + 1) + [rank] * (settings.ranks + settings.spares)
    group = GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in bundles])
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        gang_resource_requests=[group],
    )
    brought = ResourceDemandScheduler(MagicMock()).schedule(request)
    assert not brought.infeasible_gang_resource_requests
    launches = {launch.instance_type: launch.count for launch in brought.to_launch}
    assert launches == {"training": machines, "servers": 2}
