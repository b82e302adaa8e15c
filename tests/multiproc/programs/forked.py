"""Workers that fork: what their children may do, and what they do not keep."""

from __future__ import annotations

import atexit
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import byteps.torch as bps
import torch
from torch.utils.data import DataLoader, Dataset

from tests.multiproc.programs.job import Job


def _sum(job: Job, name: str, round_: int) -> None:
    found = bps.push_pull(torch.full((3000,), float(job.rank + round_)), average=False, name=name)
    want = float(sum(rank + round_ for rank in range(job.size)))
    assert (found == want).all(), (found[0], want)


def _in_child(run: Callable[[], None]) -> int:
    """The exit status of a forked process that runs this, and then what runs at a program's end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            atexit._run_exitfuncs()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _demand_none(status: int) -> None:
    assert status == 0


def _sockets() -> list[str]:
    """What this process has open of the kind that a transport needs."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")):
            found.append(f"{entry.name} {target}")
    return found


def children(job: Job) -> None:
    """A child cannot reach the job, nor end it; a child of a child neither."""
    bps.init()
    given = torch.ones(8)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    pending = bps.push_pull_async(given, average=False, name="pending")
    refused: dict[str, Callable[[], object]] = {
        "push_pull": lambda: bps.push_pull(torch.ones(3), name="a"),
        "push_pull of another size": lambda: bps.push_pull(torch.ones(3000), name="grad"),
        "declare": lambda: bps.declare(
            [bps.TensorDeclaration(name="b", dtype=torch.float32, numel=3)]
        ),
        "synchronize": lambda: bps.synchronize(pending),
        "poll": lambda: bps.poll(pending),
        "init": bps.init,
        "suspend": bps.suspend,
        "resume": lambda: bps.resume(job.size, 1, job.rank),
        "get_metrics": bps.get_metrics,
        "partition_bytes": lambda: bps.partition_bytes(100),
        "optimizer": lambda: bps.ServerOptimizer(sgd),
    }

    def child() -> None:
        assert not bps.is_initialized()
        assert (bps.rank(), bps.size()) == (job.rank, job.size)
        for name, call in refused.items():
            try:
                call()
            except bps.BytePSError as error:
                assert "was forked from a worker" in str(error), (name, error)
            else:
                raise AssertionError(f"{name} was not refused")
        bps.shutdown()
        assert not _sockets(), _sockets()

    for round_ in range(3):
        _sum(job, "grad", round_)
        with job.check(f"child {round_}"):
            assert _in_child(child) == 0
    with job.check("child of a child"):
        assert _in_child(lambda: _demand_none(_in_child(child))) == 0
    with job.check("what is started by exec"):
        command = ["ls", "-l", "/proc/self/fd"]
        told = subprocess.run(
            command, check=True, close_fds=False, stdout=subprocess.PIPE, text=True
        )
        assert "socket:" not in told.stdout and "eventpoll" not in told.stdout, told.stdout
    with job.check("the parent goes on"):
        assert bps.is_initialized()
        assert (bps.synchronize(pending) == job.size).all()
        _sum(job, "grad", 9)
    bps.shutdown()
    with job.check("forked after the end"):
        assert _in_child(lambda: _demand_may_join()) == 0


def _demand_may_join() -> None:
    """There is no job: the child is a process as any other."""
    os.environ["BYTEPS_START_TIMEOUT_S"] = "1"
    os.environ["DMLC_PS_ROOT_PORT"] = "1"
    try:
        bps.init()
    except bps.BytePSError as error:
        assert "forked" not in str(error) and "scheduler" in str(error), error
    else:
        raise AssertionError("there is no scheduler")


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not bps.is_initialized()
        return torch.full((500,), float(index))


def _batches(job: Job) -> Iterator[torch.Tensor]:
    yield from DataLoader(
        _Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork", shuffle=False
    )


def loads_data(job: Job) -> None:
    """Processes of a DataLoader come, go, and are there while the job sums."""
    bps.init()
    for epoch in range(2):
        with job.check(f"epoch {epoch}"):
            for number, batch in enumerate(_batches(job)):
                found = bps.push_pull(batch.mean(0), average=False, name="batch")
                assert (found == job.size * (8 * number + 3.5)).all(), found[0]
    bps.shutdown()


def killed(job: Job) -> None:
    """Rank 1 has a child that outlives it; all sum until they hear of its end."""
    bps.init()
    if job.rank == 1:
        pid = os.fork()
        if pid == 0:
            job.mark("child")
            job.wait_go("end")
            job.mark("ended")
            os._exit(0)
    while True:
        _sum(job, "loop", 0)
        job.mark("sums")
