"""Joining, leaving, coming back, idling, and what the engine reports."""

from __future__ import annotations

import atexit
import os
import time

import byteps.torch as bps
import torch

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job


def _sum(job: Job, name: str, round_: int, count: int = 5000) -> None:
    given = values.exact_input(count, job.rank, name, round_, "float32")
    want = values.exact_sum(count, list(range(job.size)), name, round_, "float32")
    values.demand_exact(bps.push_pull(given, average=False, name=name), want)


def suspend_resume(job: Job) -> None:
    """Leave twice and come back, with rounds of one name on both sides."""
    bps.init()
    for round_ in range(3):
        with job.check(f"sum before, round {round_}"):
            _sum(job, "kept", round_)
    for time_away in range(2):
        bps.suspend()
        with job.check_raises(f"push_pull while away {time_away}", bps.BytePSError, ""):
            bps.push_pull(torch.ones(3), name="away")
        job.mark(f"away{time_away}")
        job.wait_go(f"back{time_away}")
        bps.resume(job.size, job.args["servers"], job.rank)
        with job.check(f"rank and size after resume {time_away}"):
            assert (bps.rank(), bps.size()) == (job.rank, job.size)
        for round_ in range(3):
            with job.check(f"sum after {time_away}, round {round_}"):
                _sum(job, "kept", 10 * (time_away + 1) + round_)
        with job.check(f"a new name after {time_away}"):
            _sum(job, f"new.{time_away}", 0)
        with job.check(f"another size after {time_away}"):
            _sum(job, f"size.{time_away}", 0, 7000 + time_away)
    bps.shutdown()


def sums(job: Job) -> None:
    """Rounds of a few names until the count is reached; `salt` tells two jobs apart."""
    bps.init()
    for round_ in range(job.args.get("rounds", 20)):
        for name in ("weight", "bias"):
            with job.check(f"{name} {round_}"):
                _sum(job, name, round_ * 7 + job.args.get("salt", 0))
    bps.shutdown()


def fork_and_exit(job: Job) -> None:
    """A child by fork ends as Python's programs do, and the job does not notice."""
    bps.init()
    with job.check("sum before"):
        _sum(job, "kept", 0)
    child = os.fork()
    if child == 0:
        bps.shutdown()
        atexit._run_exitfuncs()
        os._exit(0)
    with job.check("the child ends"):
        assert os.waitpid(child, 0)[1] == 0
    job.mark("forked")
    for round_ in range(1, 4):
        with job.check(f"sum after, round {round_}"):
            _sum(job, "kept", round_)
    bps.shutdown()


def many_lives(job: Job) -> None:
    """shutdown is the end of a cluster; what can be asked without one is answered."""
    for ask in (bps.rank, bps.size, bps.local_rank, bps.local_size):
        with job.check_raises(f"{ask.__name__} before init", bps.BytePSError, "init"):
            ask()
    with job.check_raises("push_pull before init", bps.BytePSError, "init"):
        bps.push_pull(torch.ones(3), name="early")
    with job.check("is_initialized before init"):
        assert bps.is_initialized() is False
    bps.init()
    with job.check("init again changes nothing"):
        bps.init()
        assert bps.size() == job.size
    with job.check("sum"):
        _sum(job, "sum", 0)
    bps.shutdown()
    with job.check("shutdown again changes nothing"):
        bps.shutdown()
    with job.check_raises("push_pull after shutdown", bps.BytePSError, "init|shut"):
        bps.push_pull(torch.ones(3), name="late")


def no_shutdown(job: Job) -> None:
    """Ends without bps.shutdown(): leaving the cluster is then done at exit."""
    bps.init()
    with job.check("sum"):
        _sum(job, "sum", 0)


def idle(job: Job) -> None:
    """Some traffic, then nothing while the test measures CPU time."""
    bps.init()
    for round_ in range(20):
        _sum(job, "traffic", round_, 100_000)
    job.mark("idle")
    job.wait_go("on")
    _sum(job, "traffic", 99, 100_000)
    bps.shutdown()


def speed(job: Job) -> None:
    """get_pushpull_speed and print_config."""
    begin_ms = time.time() * 1000
    bps.init()
    tensor = torch.ones(2_500_000)  # 10 MB
    deadline = time.monotonic() + 40
    moved = 0
    stamp, rate = bps.get_pushpull_speed()
    # The engine may need a while of traffic for its first figure; the ranks stop together.
    while True:
        bps.push_pull_inplace(tensor, average=True, name="traffic")
        moved += tensor.nbytes
        stamp, rate = bps.get_pushpull_speed()
        enough = torch.tensor([1.0 if rate > 0 else 0.0])
        if bps.push_pull(enough, average=False, name="enough").item() == job.size:
            break
        if time.monotonic() > deadline:
            break
    seconds = time.time() - begin_ms / 1000
    with job.check("speed"):
        assert rate > 0, f"no speed after {moved / 1e6:.0f} MB in {seconds:.1f} s"
        assert begin_ms - 1000 <= stamp <= time.time() * 1000 + 1000, f"{stamp} ms is not now"
        # At most what was moved in all, both ways, in the shortest window that is worth a figure.
        assert rate < 2 * 100_000, f"{rate} MB/s"
    os.environ["BYTEPS_PARTITION_BYTES"] = "12345"  # too late: not in force
    bps.print_config()
    bps.shutdown()
