"""The optimizer on the servers, when a rank or a server is killed within a step."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, RUN_S, Cluster, wait_all

ENV = {
    "BYTEPS_PARTITION_BYTES": "4096",
    "BYTEPS_OP_TIMEOUT_S": "60",
    "BYTEPS_KEEP": "1",
    "BYTEPS_PEER_TIMEOUT_S": "5",
}
PHASES = ("before", "pushed", "answered", "again", "after")


@pytest.mark.parametrize("victim", ["server", pytest.param("rank", marks=pytest.mark.thorough)])
def test_one_is_killed_at_each_phase(make_cluster: Callable[..., Cluster], victim: str) -> None:
    """Of a step that is tried: all ranks that live end with an error that names who is lost, no
    rank has parameters of a step whose norm it does not know, and the job resumes from its
    checkpoint to the bits of a job in which nobody died."""
    cluster = make_cluster(workers=2, servers=2, env=ENV)
    cluster.start_nodes()
    for life, phase in enumerate((*PHASES, None)):
        server = cluster.servers[-1] if victim == "server" and phase else None
        workers = [
            cluster.start_worker(
                rank,
                "server_faults:dies",
                title=f"life {life} worker {rank}",
                device="cpu",
                life=life,
                phase=phase,
                server=server and server.pid,
            )
            for rank in range(2)
        ]
        wait_all(workers, RUN_S)
        alive = [rank for rank in range(2) if phase is None or victim == "server" or rank == 0]
        for rank, worker in enumerate(workers):
            assert worker.status == (0 if rank in alive else -signal.SIGKILL), worker.text
        left = {(cluster.folder / f"left{life}.{rank}").read_text() for rank in alive}
        assert len(left) == 1, "ranks are left with different parameters"
        for rank in alive if phase else ():
            error = (cluster.folder / f"error{life}.{rank}").read_text()
            lost = r"server [01]\b.*lost" if victim == "server" else r"worker 1\b.*lost"
            assert re.search(lost, error), f"{phase}: {error}"
        if server is not None:
            server.wait(END_S)
            cluster.start_server()
    cluster.demand_checks()
