"""One scheduler serves a job of two thousand nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from tests import native
from tests.multiproc.cluster import LOOPBACK, Cluster

WORKERS = SERVERS = 1000
PATIENCE_S = 400
"""Against hangs: it takes seconds."""
MESSAGES_A_NODE = 20
"""Welcome, the servers or the start, a farewell, its workers' departures, and an end; heartbeats
are not counted. Departures come as many together as the scheduler finds at once, in two messages or
three, more on a busy machine. If each node heard of each one by itself, that would be thousands."""

MOST_LINES = 80
"""Those that come and leave are named 16 times each, and counted every ten seconds."""


def test_two_thousand_nodes_join_and_leave(make_cluster: Callable[..., Cluster]) -> None:
    program = native.build("swarm") / "swarm"
    patience = {"BYTEPS_START_TIMEOUT_S": "120", "BYTEPS_PEER_TIMEOUT_S": "120"}
    cluster = make_cluster(workers=WORKERS, servers=SERVERS, env=patience)
    scheduler = cluster.start_scheduler()
    swarm = subprocess.run(
        [
            *(program, "--host", LOOPBACK, "--port", str(cluster.port)),
            *("--workers", str(WORKERS), "--servers", str(SERVERS), "--timeout", "120"),
        ],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env=cluster.node_environment(),
    )  # fmt: skip
    assert swarm.returncode == 0, swarm.stdout + swarm.stderr
    told = re.search(r"([\d.]+) for each node", swarm.stdout)
    assert told is not None, swarm.stdout
    assert float(told[1]) <= MESSAGES_A_NODE
    assert scheduler.wait(PATIENCE_S) == 0, scheduler.text
    said = scheduler.text.splitlines()
    assert len(said) <= MOST_LINES, said
    assert "the job is complete, 1000 workers and 1000 servers" in scheduler.text
