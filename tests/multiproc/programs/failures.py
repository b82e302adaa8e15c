"""Workers for tests in which a process is lost, hangs, ends or forks; Job.run records their
exceptions."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import byteps.torch as bps
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.multiproc.programs.job import Job


def loop(job: Job) -> None:
    """Sum until the test ends it by an error."""
    bps.init()
    for round_ in range(1_000_000):
        bps.push_pull(torch.ones(20_000), average=False, name=f"loop.{round_ % 3}")
        if round_ == 5:
            job.mark("looping")


def saves(job: Job) -> None:
    """Sum until a rank gets SIGTERM; then save, which needs sums, and leave."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    bps.init()
    job.mark("looping")
    stopping = torch.zeros(1)
    while stopping.item() == 0:
        stopping = bps.push_pull(torch.tensor([float(len(signals))]), average=False, name="told")
    for part in range(50):
        time.sleep(0.01)
        with job.check(f"part {part} of the checkpoint"):
            total = bps.push_pull(torch.full((5000,), float(part)), average=False, name="part")
            assert (total == job.size * part).all()
    job.mark("saved")
    bps.shutdown()


def meets(job: Job) -> None:
    """Let ranks meet through gloo, round after round, until that fails."""
    store = dist.FileStore(str(Path(job.folder) / "store"), job.size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    bps.init()
    for round_ in range(1_000_000):
        dist.all_reduce(torch.ones(1000))
        if round_ == 5:
            job.mark("meeting")


def init_only(job: Job) -> None:
    """Join and leave. Joining may fail."""
    bps.init()
    bps.shutdown()


UNSENT = ("push_queue", "transport")
"""Metrics of partitions that this worker still has to send."""


def unread(job: Job) -> None:
    """Stop rank 0 after it has pushed a tensor that rank 1 pushes later. So rank 0 does not read
    the sum. In the other sums only rank 0 takes part."""
    bps.init()
    large = torch.ones(16 << 20)
    if job.rank == 0:
        handles = []
        for index in range(40):  # Each handle has its own deadline.
            handles.append(bps.push_pull_async(torch.ones(10), name=f"alone.{index}"))
            time.sleep(0.1)
        # This tensor is pushed last, so that rank 1 has most of its time limit left.
        handles.append(bps.push_pull_async(large, average=False, name="large"))
        while any(bps.get_metrics()[f"byteps_worker_{name}_partitions"] for name in UNSENT):
            time.sleep(0.01)
        job.mark("pushed")
    else:
        job.wait_go("push")
        bps.push_pull(large, average=False, name="large")
        job.mark("summed")
    job.wait_go("never")


def missing(job: Job) -> None:
    """Make rank ``missing`` (in args) never call the operation for which the other ranks wait.

    It stays in the job or, with ``leaves``, leaves it normally. With ``traffic`` the other ranks
    keep the servers busy with another tensor.
    """
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="together")
    job.mark("looping")
    if job.rank == job.args["missing"]:
        if job.args.get("leaves"):
            time.sleep(0.5)
        else:
            job.wait_go("end")
        bps.shutdown()
        return
    handle = bps.push_pull_async(torch.ones(20_000), average=False, name="layer.grad")
    if job.args.get("traffic"):
        _keep_busy(job, handle)
    bps.synchronize(handle)


def _keep_busy(job: Job, handle: int) -> None:
    others = [rank for rank in range(job.size) if rank != job.args["missing"]]
    busy = torch.ones(2000)
    deadline = time.monotonic() + 20
    while not bps.poll(handle) and time.monotonic() < deadline:
        bps.push_pull_inplace(busy, average=True, name="busy", group=others)


def steady(job: Job) -> None:
    """Sum from time to time until the test ends it."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="first")
    job.mark("looping")
    job.wait_go("end", 600.0)
    with job.check("still right"):
        total = bps.push_pull(torch.ones(10), average=False, name="last")
        assert (total == job.size).all()
    bps.shutdown()


# A worker that ends in a given way, and others that observe the job.


WHY = "no checkpoint for rank 1"


def _raise() -> None:
    raise RuntimeError(WHY)


def _raise_text() -> None:
    raise SystemExit(WHY)


def _raise_and_shut_down() -> None:
    try:
        _raise()
    finally:
        bps.shutdown()


def _handle_and_shut_down() -> None:
    with contextlib.suppress(RuntimeError):
        _raise()
    bps.shutdown()


def _as_multiprocessing_does(status: int) -> None:
    atexit._run_exitfuncs()
    os._exit(status)


def _hang() -> None:
    time.sleep(1000)


WAYS: dict[str, Callable[[], None]] = {
    "return": lambda: None,
    "shutdown": bps.shutdown,
    "handled": _handle_and_shut_down,
    "exit-0": lambda: sys.exit(0),
    "forked-0": lambda: _as_multiprocessing_does(0),
    "raise": _raise,
    "finally": _raise_and_shut_down,
    "exit-3": lambda: sys.exit(3),
    "exit-text": _raise_text,
    "forked-3": lambda: _as_multiprocessing_does(3),
    "_exit-0": lambda: os._exit(0),
    "_exit-3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hang": _hang,
}


def ends(job: Job) -> None:
    """Let rank 1 end in the way that the argument ``way`` names. Rank 0 sums alone until the test's
    ``end``, or until a failure.

    args: ``first``: rank 0 ends before rank 1; ``hangs``: rank 0 does nothing until ``end``;
    ``group``: with a process group, for embedded mode; ``swapped``: the ranks' roles are exchanged.
    """
    ending = 0 if job.args.get("swapped") else 1
    if job.args.get("group"):
        store = dist.FileStore(str(Path(job.folder) / "store"), job.size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    bps.init()
    total = bps.push_pull(torch.full((100,), job.rank + 1.0), average=False, name="together")
    assert (total == job.size * (job.size + 1) / 2).all()
    job.mark("summed")
    if job.rank == ending:
        job.wait_go("way")
        return WAYS[job.args["way"]]()
    if job.args.get("hangs"):
        return job.wait_go("end")
    while not job.args.get("first") and not (job.folder / "go.end").exists():
        bps.push_pull(torch.ones(100), average=False, name="alone", group=[job.rank])
        time.sleep(0.02)


def waits_for_a_peer(job: Job) -> None:
    """Make rank 1 wait for rank 0 in torch.distributed. Rank 0 closes its connections, and then
    ends."""
    before = set(_sockets())
    store = dist.FileStore(str(Path(job.folder) / "store"), job.size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    dist.barrier()
    connections = set(_sockets()) - before
    bps.init()
    job.mark("joined")
    if job.rank == 1:
        dist.recv(torch.zeros(10), src=0)
        return
    job.wait_go("end")
    for number in (int(line.split()[0]) for line in connections if "socket:" in line):
        with contextlib.suppress(OSError):  # A listening socket.
            socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


# Workers that sum while processes are stopped.


def sums(job: Job) -> None:
    """Sum until the test ends it. Rank 0 decides when, so that all ranks end with the same sum."""
    bps.init()
    round_ = 0
    while True:
        last = job.rank == 0 and (job.folder / "go.end").exists()
        given = torch.full((50_000,), float(round_ % 100 + job.rank))
        given[0] = float(last)
        total = bps.push_pull(given, average=False, name="sum")
        want = job.size * (round_ % 100) + job.size * (job.size - 1) / 2
        assert (total[1:] == want).all(), f"round {round_}"
        if total[0] > 0:
            break
        round_ += 1
        if round_ == 5:
            job.mark("summing")
    bps.shutdown()


# Workers that sum in rounds and check every value, while a test breaks connections.


TENSORS = {"small": 700, "middle": 60_000, "large": 1_000_000}
"""Elements: a single copied message, a few partitions, and many."""


def _values(rank: int, round_: int, index: int, count: int) -> torch.Tensor:
    """Return integers that differ by rank, round, tensor and element."""
    ramp = torch.arange(count, dtype=torch.float32) % 251
    return ramp + (rank + 1) * 1000 + round_ % 97 * 7 + index


def _sum(size: int, round_: int, index: int, count: int) -> torch.Tensor:
    ramp = torch.arange(count, dtype=torch.float32) % 251
    return size * (ramp + round_ % 97 * 7 + index) + 1000 * size * (size + 1) / 2


def checked(job: Job) -> None:
    """Make rounds until the test's "end", or as many as args["rounds"] says. Every sum must be
    exact.

    Tensors have at most args["most"] elements; the time limit is args["limit_s"].
    """
    bps.init()
    round_ = 0
    last = job.args.get("rounds", 0)
    deadline = time.monotonic() + job.args.get("limit_s", 120)
    counts = {name: min(count, job.args.get("most", count)) for name, count in TENSORS.items()}
    ended = torch.zeros(1)
    with job.check("every sum"):
        while ended.item() == 0:
            assert time.monotonic() < deadline, "the test gave no sign"
            handles = []
            for index, (name, count) in enumerate(counts.items()):
                tensor = _values(job.rank, round_, index, count)
                handles.append(
                    (bps.push_pull_async_inplace(tensor, average=False, name=name), tensor)
                )
            for index, (handle, tensor) in enumerate(handles):
                bps.synchronize(handle)
                wanted = _sum(job.size, round_, index, len(tensor))
                wrong = (tensor != wanted).nonzero()
                assert not len(wrong), f"round {round_}, tensor {index}: {len(wrong)} are wrong"
            round_ += 1
            if round_ == 3:
                job.mark("looping")
            ended = torch.tensor([float(last == round_ or (job.folder / "go.end").exists())])
            ended = bps.push_pull(ended, average=False, name="ended")
            job.note("rounds", str(round_))
    bps.shutdown()


# Workers that fork: what their children may do, and which descriptors they must not keep.


def _demand_sum(job: Job, name: str, round_: int) -> None:
    total = bps.push_pull(torch.full((3000,), float(job.rank + round_)), average=False, name=name)
    want = float(sum(rank + round_ for rank in range(job.size)))
    assert (total == want).all(), (total[0], want)


def _in_child(run: Callable[[], None]) -> int:
    """Run a function in a forked process, then its exit handlers; return the exit status."""
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
    """Return this process's open files of the kinds that transports use."""
    sockets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")):
            sockets.append(f"{entry.name} {target}")
    return sockets


def children(job: Job) -> None:
    """Fork a child, and a child of the child. Neither can use or end the job."""
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
                raise AssertionError(f"{name} works in a fork of a worker")
        bps.shutdown()
        assert not _sockets(), _sockets()

    for round_ in range(3):
        _demand_sum(job, "grad", round_)
        with job.check(f"child {round_}"):
            assert _in_child(child) == 0
    with job.check("child of a child"):
        assert _in_child(lambda: _demand_none(_in_child(child))) == 0
    with job.check("what is started by exec"):
        command = ["ls", "-l", "/proc/self/fd"]
        listed = subprocess.run(
            command, check=True, close_fds=False, stdout=subprocess.PIPE, text=True
        )
        assert "socket:" not in listed.stdout and "eventpoll" not in listed.stdout, listed.stdout
    with job.check("the parent goes on"):
        assert bps.is_initialized()
        assert (bps.synchronize(pending) == job.size).all()
        _demand_sum(job, "grad", 9)
    bps.shutdown()
    with job.check("forked after the end"):
        assert _in_child(lambda: _demand_may_join()) == 0


def _demand_may_join() -> None:
    """Check that init works as in any process in a child that is in no job."""
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
    """Sum while DataLoader processes start, run and end."""
    bps.init()
    for epoch in range(2):
        with job.check(f"epoch {epoch}"):
            for number, batch in enumerate(_batches(job)):
                total = bps.push_pull(batch.mean(0), average=False, name="batch")
                assert (total == job.size * (8 * number + 3.5)).all(), total[0]
    bps.shutdown()


def killed(job: Job) -> None:
    """Sum until a killed rank is noticed. Rank 1 is killed, and has a child that outlives it."""
    bps.init()
    if job.rank == 1:
        pid = os.fork()
        if pid == 0:
            job.mark("child")
            job.wait_go("end")
            job.mark("ended")
            os._exit(0)
    while True:
        _demand_sum(job, "loop", 0)
        job.mark("sums")
