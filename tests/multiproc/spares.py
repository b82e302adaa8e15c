"""Jobs with a server that waits for the place of one that is lost."""

from __future__ import annotations

import time

from tests.multiproc.cluster import (
    IMPORT_S,
    RUN_S,
    Cluster,
    Nursed,
    Process,
    wait_for_file,
)

WAIT = {"BYTEPS_REPLACE_SERVERS_S": "60"}


def wait_done(cluster: Cluster, step: int) -> None:
    """Until worker 0 has made so many steps."""
    workers = list(cluster.workers.values())
    path = cluster.folder / "done.0"
    wait_for_file(path, IMPORT_S, workers)
    end = time.monotonic() + RUN_S
    while int(path.read_text() or 0) < step:
        assert all(worker.running for worker in workers), workers[0].text[-3000:]
        assert time.monotonic() < end, f"step {step} was not made"
        time.sleep(0.01)


def wait_for_text(node: Process, text: str, times: int = 1) -> None:
    end = time.monotonic() + RUN_S
    while node.text.count(text) < times:
        assert node.running and time.monotonic() < end, node.text[-3000:]
        time.sleep(0.02)


def start_with_spare(cluster: Cluster, **args: object) -> list[Nursed]:
    """A spare comes once the others have their places."""
    workers = cluster.start("lost_servers:train", **args)
    wait_done(cluster, 1)
    wait_for_text(cluster.start_server(), "waiting for the place of a server")
    return workers
