"""What servers keep in memory, and what they say when there is none."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from tests.multiproc.cluster import wait_all
from tests.multiproc.small_cluster import LIMIT_S, small_cluster

MIB = 1 << 20

LARGE = 256 * MIB
ONE_PARTITION = {f"BYTEPS_{name}_BYTES": str(LARGE) for name in ("PARTITION", "MIN_PARTITION")}


def test_values_that_nobody_declared_take_no_memory(run_dir: Path) -> None:
    """They are refused by name, and the server has never had room for them."""
    with small_cluster(run_dir, **ONE_PARTITION) as job:
        arguments = ["--bytes", str(LARGE), "--tensors", "1", "--rounds", "1", "--fail-in", "0"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 0
        assert "which nobody declared" in workers[0].text
        assert job.memory("VmHWM") < 128 * MIB


def test_a_server_without_memory_says_what_it_wanted(run_dir: Path) -> None:
    """The operation fails, and the server serves the next job, which wants less."""
    with small_cluster(run_dir, **ONE_PARTITION, MALLOC_ARENA_MAX="1") as job:
        limit = job.memory("VmSize") + LARGE // 2
        resource.prlimit(job.server.pid, resource.RLIMIT_AS, (limit, limit))
        arguments = ["--bytes", str(LARGE), "--tensors", "1", "--rounds", "1"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 1
        told = (
            rf"server 0 is out of memory: it wanted {LARGE} bytes for a push of 'tensor\.0' from "
            r"worker 0, partition 0; take more servers"
        )
        assert re.search(told, workers[0].text), workers[0].text
        assert job.server.running
        job.end_well(2)


def test_a_failed_operation_leaves_nothing_behind(run_dir: Path) -> None:
    """One rank fails alone. All go on, and the server ends as large as it was."""
    rounds = 2000
    with small_cluster(run_dir, BYTEPS_RECEIVE_POOL_BYTES=str(16 * MIB)) as job:
        arguments = ["--bytes", "400000", "--tensors", "2", "--rounds", str(rounds)]
        workers = job.start_workers(2, *arguments, "--fail-in", "5")
        wait_all(workers, LIMIT_S)
        # Who leaves first takes its failure along, and may end the other one's last round.
        ended_by = r"sum_worker: worker \d .* failed: .*(gave up round 5|which nobody declared)"
        for worker in workers:
            assert worker.wait(0) == 0 or re.search(ended_by, worker.text)
        assert 0 in [worker.wait(0) for worker in workers]
        assert "which nobody declared" in workers[0].text
        assert "worker 0 gave up round 5" in workers[1].text
        # byteps.sizing: three times what is summed, the pool, and 256 MiB for the process.
        assert job.memory("VmHWM") < 3 * 2 * 400_000 + 16 * MIB + 256 * MIB
        job.end_well(2)
