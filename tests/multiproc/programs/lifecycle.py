"""Joining, leaving, rejoining and idling; metrics of known jobs; invalid settings."""

from __future__ import annotations

import atexit
import os
import re
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
    """Leave twice and rejoin, with rounds of the same name before and after."""
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
        environment = dict(os.environ)
        bps.resume(job.size, job.args["servers"], job.rank)
        with job.check(f"rank and size after resume {time_away}"):
            assert (bps.rank(), bps.size()) == (job.rank, job.size)
            assert dict(os.environ) == environment, "arguments travel as variables"
        for round_ in range(3):
            with job.check(f"sum after {time_away}, round {round_}"):
                _sum(job, "kept", 10 * (time_away + 1) + round_)
        with job.check(f"a new name after {time_away}"):
            _sum(job, f"new.{time_away}", 0)
        with job.check(f"another size after {time_away}"):
            _sum(job, f"size.{time_away}", 0, 7000 + time_away)
    bps.shutdown()


def sums(job: Job) -> None:
    """Sum rounds of a few names until the count is reached; `salt` distinguishes two jobs."""
    bps.init()
    for round_ in range(job.args.get("rounds", 20)):
        for name in ("weight", "bias"):
            with job.check(f"{name} {round_}"):
                _sum(job, name, round_ * 7 + job.args.get("salt", 0))
    bps.shutdown()


def fork_and_exit(job: Job) -> None:
    """Check that a forked child ends like any Python program, and without effect on the job."""
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
    """Check that shutdown ends a cluster, and that functions that need no cluster still answer."""
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
    """End without bps.shutdown(): the exit handler leaves the cluster."""
    bps.init()
    with job.check("sum"):
        _sum(job, "sum", 0)


def idle(job: Job) -> None:
    """Sum a few times, then idle while the test measures CPU time."""
    bps.init()
    for round_ in range(20):
        _sum(job, "traffic", round_, 100_000)
    job.mark("idle")
    job.wait_go("on")
    _sum(job, "traffic", 99, 100_000)
    bps.shutdown()


def speed(job: Job) -> None:
    """Check get_pushpull_speed and print_config."""
    begin_ms = time.time() * 1000
    bps.init()
    tensor = torch.ones(2_500_000)  # 10 MB
    deadline = time.monotonic() + 40
    moved = 0
    stamp, rate = bps.get_pushpull_speed()
    # Ranks sum until all have a speed, and stop together. The first speed may need some traffic.
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
        # The speed is at most the total traffic of both directions, in the shortest measured
        # window.
        assert rate < 2 * 100_000, f"{rate} MB/s"
    os.environ["BYTEPS_PARTITION_BYTES"] = "12345"  # The setting comes too late to take effect.
    bps.print_config()
    bps.shutdown()


# Errors of bps.init() for invalid settings.


def bad_values(job: Job) -> None:
    """Each (variable, value) of args must make init raise an error that names both."""
    for name, value in job.args["bad"]:
        before = os.environ.get(name)
        os.environ[name] = value
        label = f"{name}={value!r}"
        with job.check(label):
            try:
                bps.init()
            except bps.BytePSError as error:
                text = str(error)
                assert name in text, f"does not name {name}: {text}"
                assert value in text, f"does not show {value!r}: {text}"
            else:
                bps.shutdown()
                raise AssertionError(f"bps.init() accepted {label}")
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def disagreeing_ranks(job: Job) -> None:
    """Check that torchrun's variables and BytePS's own must agree."""
    for name, value in (("DMLC_WORKER_ID", "1"), ("DMLC_NUM_WORKER", "3")):
        before = os.environ.pop(name, None)
        os.environ[name] = value
        with job.check(name):
            try:
                bps.init()
            except bps.BytePSError as error:
                assert re.search(name, str(error)), str(error)
                assert re.search("RANK|WORLD_SIZE", str(error)), str(error)
            else:
                bps.shutdown()
                raise AssertionError(f"bps.init() accepted {name}={value}")
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def second_try(job: Job) -> None:
    """Check that init works after a setting was corrected."""
    os.environ["BYTEPS_PUSH_THREAD"] = "many"
    with job.check_raises("bad value", bps.BytePSError, "BYTEPS_PUSH_THREAD"):
        bps.init()
    with job.check("not initialised"):
        assert bps.is_initialized() is False
    os.environ["BYTEPS_PUSH_THREAD"] = "3"
    bps.init()
    with job.check("sum"):
        assert (bps.push_pull(torch.ones(7), average=False, name="x") == job.size).all()
    bps.shutdown()


# Jobs with known sums: tests check their metrics and timelines.


ROUNDS = 3
LARGE = 2500
"""Number of fp32 elements: 10,000 bytes, three partitions of at most 4096."""
SMALL = 100
"""Number of elements: one partition."""
PARTITIONS = 4
"""Number of partitions of both tensors."""


def known(job: Job) -> None:
    """Make ROUNDS sums of two tensors, then wait for the test."""
    bps.init()
    for _ in range(ROUNDS):
        handle = bps.push_pull_async(torch.ones(LARGE), average=False, name="large")
        bps.push_pull(torch.ones(SMALL), average=True, name="small")
        bps.synchronize(handle)
    job.mark("done")
    with job.check("get_metrics agrees with the job"):
        metrics = bps.get_metrics()
        assert metrics["byteps_worker_operations_total"] == 2 * ROUNDS, metrics
        assert metrics["byteps_worker_pushed_bytes_total"] == ROUNDS * 4 * (LARGE + SMALL), metrics
        spread = metrics["byteps_worker_operation_seconds"]
        assert spread.count == 2 * ROUNDS, spread
        assert list(spread.buckets.values()) == sorted(spread.buckets.values()), spread
        assert spread.sum > 0, spread
    job.wait_go("end")
    bps.shutdown()
    with job.check("get_metrics after shutdown"):
        assert bps.get_metrics()["byteps_worker_operations_total"] == 2 * ROUNDS


def waiting(job: Job) -> None:
    """Worker 0 pushes; worker 1 waits for the test."""
    with job.check("get_metrics before init"):
        assert bps.get_metrics()["byteps_worker_pushed_partitions_total"] == 0
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    tensor = torch.ones(LARGE)
    if job.rank == 0:
        handle = bps.push_pull_async_inplace(tensor, average=False, name="large")
        pushed = "byteps_worker_pushed_partitions_total"
        job.wait_until("all pushes", lambda: bps.get_metrics()[pushed] == PARTITIONS)
        job.mark("pushed")
        bps.synchronize(handle)
    else:
        job.wait_go("push")
        bps.push_pull_inplace(tensor, average=False, name="large")
    bps.shutdown()


def disagreeing(job: Job) -> None:
    """Give a tensor another size on one worker: one of the workers gets an error."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    try:
        bps.push_pull(torch.ones(SMALL + job.rank), average=False, name="other")
    except bps.BytePSError:
        job.note("refused", str(bps.get_metrics()["byteps_worker_failed_requests_total"]))
    job.mark("done")
    job.wait_go("end")
    bps.shutdown()


def odd_names(job: Job) -> None:
    """Sums under names that need escaping in JSON."""
    bps.init()
    for name in job.args["names"]:
        bps.push_pull(torch.ones(SMALL), average=False, name=name)
    bps.shutdown()


def two_lives(job: Job) -> None:
    """Leave the job and rejoin."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="before")
    bps.suspend()
    bps.resume(job.size, 1, job.rank)
    bps.push_pull(torch.ones(SMALL), average=False, name="after")
    bps.shutdown()


def straggling(job: Job) -> None:
    """Sum until the test ends it; the last worker is always late."""
    bps.init()
    tensor, ends = torch.ones(LARGE), job.folder / "go.end"
    deadline = time.monotonic() + 100.0
    job.mark("looping")
    while time.monotonic() < deadline:
        if job.rank == job.size - 1:
            time.sleep(0.02)
        bps.push_pull_inplace(tensor.fill_(1.0), average=False, name="large")
        # All ranks leave after the same sum.
        ended = torch.tensor([1.0 if ends.exists() else 0.0])
        if bps.push_pull(ended, average=False, name="asked").item() == job.size:
            break
    bps.shutdown()


def drained(job: Job) -> None:
    """Worker 0 pushes at once, and worker 1 on the test's signal. Then both sum until a sum
    fails."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    if job.rank == 0:
        total = bps.push_pull(torch.ones(LARGE), average=False, name="large")
    else:
        job.wait_go("push")
        total = bps.push_pull(torch.ones(LARGE), average=False, name="large")
    with job.check("the sum is right"):
        assert torch.equal(total, torch.full((LARGE,), 2.0)), total
    job.mark("summed")
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(0.01)
        bps.push_pull(torch.ones(SMALL), average=False, name="small")
