"""How processes of a cluster end when something is wrong: in time, with an error that says it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping

from tests.multiproc.cluster import END_S, Cluster, Nursed, Process, Spawned, wait_all


def start_looping(
    make: Callable[..., Cluster], env: Mapping[str, str], *, workers: int, servers: int
) -> Cluster:
    """A cluster in which every worker is at work, sum after sum, until something ends it."""
    cluster = make(workers=workers, servers=servers, env=env)
    cluster.start("failures:loop")
    cluster.wait_mark("looping", range(workers))
    return cluster


def lose(cluster: Cluster, lost: str) -> list[Nursed]:
    """Kill the second worker, the first server or the scheduler; return the workers that were not
    killed, once they have ended."""
    workers = list(cluster.workers.values())
    victims: dict[str, Process] = {
        "worker": workers[1],
        "server": cluster.servers[0],
        "scheduler": cluster.scheduler,
    }
    victims[lost].send(signal.SIGKILL)
    survivors = [worker for worker in workers if worker is not victims[lost]]
    wait_all(survivors, END_S)
    return survivors


def error_of(worker: Nursed) -> str:
    """The last error that the worker raised: the line after its traceback."""
    return re.split(r"^[\w.]+Error:", worker.text.rstrip(), flags=re.MULTILINE)[-1].strip()


def demand_error(worker: Nursed, *patterns: str) -> None:
    assert worker.wait(END_S) == 1, f"{worker.title}: exit status {worker.status}"
    last = worker.text.rstrip().rpartition("\n")[2]
    assert re.search(r"BytePS\w*Error:", last), f"{worker.title} did not end by BytePSError: {last}"
    text = error_of(worker)
    for pattern in patterns:
        assert re.search(pattern, text), f"{worker.title}: {pattern!r} is not in {text!r}"


def demand_failed(node: Spawned, *patterns: str) -> None:
    """A scheduler or server ends with 1 and says why on stderr."""
    assert node.wait(END_S) == 1, node.text
    for pattern in patterns:
        assert re.search(pattern, node.text), f"{node.title}: {pattern!r} is not in {node.text!r}"


def wait_for_text(node: Spawned, pattern: str) -> None:
    """Wait until the node's log has a line with the pattern (a regex)."""
    deadline = time.monotonic() + END_S
    while not re.search(pattern, node.text):
        assert time.monotonic() < deadline, f"{pattern!r} is not in {node.text!r}"
        assert node.running, node.text
        time.sleep(0.02)
