"""What the driver tells Ray is what Prometheus can scrape."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray

from bench.ray_failures.cases import ENVIRONMENT
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.metrics import Metrics
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings
from scripts.ports import free_ports

LIMIT_S = 120.0


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
    del pool  # of whose cluster this process is the driver
    metrics = Metrics("a-job")
    metrics.ranks(4, 1, 2)
    for step in range(1, 6):
        values = {"lm loss": 6.0 - step}
        metrics.step({"step": step, "tokens": 100, "time": 1000.0 + step * 2.0, "values": values})
    metrics.restart()
    metrics.recovery(7.5)
    expected = {"ranks": 4.0, "spares": 1.0, "incarnation": 2.0, "step": 5.0, "loss": 1.0}
    expected |= {"tokens_per_second": 50.0, "restarts_total": 1.0, "recovery_seconds": 7.5}
    deadline = time.monotonic() + LIMIT_S
    while True:  # Ray hands them on every few seconds
        page = _scrape()
        seen = {name: _value(page, name, "a-job") for name in expected}
        if seen == expected:
            return
        assert time.monotonic() < deadline, seen
        time.sleep(0.5)


SCRIPT = """
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
    """Ranks and a server of one machine, at the addresses that the list for Prometheus has."""
    (run_dir / "script.py").write_text(SCRIPT)
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
        for one in json.loads((run_dir / "job" / "prometheus.json").read_text()):
            (where,) = one["targets"]
            name, number = one["labels"].popitem()
            with urllib.request.urlopen(f"http://{where}/metrics", timeout=30) as answer:
                pages[f"{name} {number}"] = answer.read().decode()
        (run_dir / "scraped").touch()

    Job(settings, scrape, pool).run()
    assert set(pages) == {"server 0", "worker 0", "worker 1"}
    for name, page in pages.items():
        role, number = name.split()
        assert f'{{role="{role}",rank="{number}"' in page
