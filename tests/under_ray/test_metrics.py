"""What the driver tells Ray is what Prometheus can scrape."""

from __future__ import annotations

import time
import urllib.request

import ray

from megatron_byteps_ray.metrics import Metrics
from megatron_byteps_ray.pool import Pool

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
