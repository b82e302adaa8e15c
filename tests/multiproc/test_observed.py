"""Visible effects of reductions in a running program."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.multiproc.cluster import Cluster
from tests.multiproc.programs.observed import LATE_S


def run_metrics(cluster: Cluster, device: str) -> None:
    cluster.start("observed:metrics", device=device)
    cluster.wait_mark("waits", [0])
    time.sleep(2 * LATE_S)  # by then rank 0 is in its next sum, or else it waits longer after this
    cluster.go("push")
    cluster.finish()


def test_metrics_of_a_step(make_cluster: Callable[..., Cluster]) -> None:
    run_metrics(make_cluster(workers=2), "cpu")


def test_profilers_show_names(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2).run("observed:profiled")
