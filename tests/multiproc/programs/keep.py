"""Workers of a job that restarts after a failure: in new or in the same processes.

As a program, this is the training script that torchrun or worker.sh starts: see `SCRIPTS`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps.torch import nodes

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 60_000
"""Number of elements: several partitions on each server."""


def _sum(rank: int, size: int, name: str, round_: int) -> None:
    given = values.exact_input(COUNT, rank, name, round_, "float32")
    want = values.exact_sum(COUNT, list(range(size)), name, round_, "float32")
    values.demand_exact(bps.push_pull(given, average=False, name=name), want)


def _sum_until_it_fails(rank: int, size: int, name: str, job: Job) -> str:
    for round_ in range(1_000_000):
        try:
            _sum(rank, size, name, round_)
        except bps.BytePSError as error:
            return str(error)
        if round_ == 5:
            job.mark("looping")
    raise AssertionError("no sum failed")


def again_in_one_process(job: Job) -> None:
    """Sum until the job fails, shut down, and join a smaller job.

    args: ``rank`` and ``size`` in the second job, by first rank; ``group``: with a process group of
    torch.distributed, which embedded mode needs, created anew for each job.
    """
    _enter(job, job.rank, job.size, 0)
    bps.init()
    old = torch.ones(10)
    handle = bps.push_pull_async_inplace(old, average=False, name="old")
    bps.synchronize(handle)
    failure = _sum_until_it_fails(job.rank, job.size, "weight", job)
    job.note("failure", failure)
    with job.check_raises("a sum after the failure", bps.BytePSError, "lost|stopped"):
        bps.push_pull(torch.ones(3), name="late")
    bps.shutdown()
    with job.check("nothing of it is left"):
        assert not bps.is_initialized()
    lives: dict[str, int] = job.args["ranks"]
    rank, size = lives[str(job.rank)], len(lives)
    _enter(job, rank, size, 1)
    bps.init()
    with job.check("rank and size"):
        assert (bps.rank(), bps.size()) == (rank, size)
    with job.check_raises("a handle of the last life", ValueError, "handle"):
        bps.synchronize(handle)
    for round_ in range(20):
        # The name and the rounds are those of earlier generations. The workers and values are new.
        with job.check(f"sum {round_}"):
            _sum(rank, size, "weight", 1000 + round_)
    with job.check("another size under the same name"):
        total = bps.push_pull(torch.ones(7777), average=False, name="old")
        assert (total == size).all()
    bps.shutdown()
    _exit(job)


def _enter(job: Job, rank: int, size: int, life: int) -> None:
    """Join as this worker of `size`, with a process group if args ask for it."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.pop("DMLC_NUM_WORKER", None)
    if not job.args.get("group"):
        return
    _exit(job)
    store = dist.FileStore(str(Path(job.folder) / f"store.{life}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _exit(job: Job) -> None:
    if job.args.get("group") and dist.is_initialized():
        dist.destroy_process_group()


def joins(job: Job) -> None:
    """Check sums of values that depend on ``salt``. Then wait for the test's signal to end."""
    bps.init()
    salt = job.args.get("salt", 0)
    for round_ in range(job.args.get("rounds", 20)):
        with job.check(f"sum {round_}"):
            _sum(job.rank, job.size, "weight", 100 * salt + round_)
    job.mark(f"joined{salt}")
    if job.args.get("stays"):
        job.wait_go(f"end{salt}")
        with job.check("and still"):
            _sum(job.rank, job.size, "weight", 100 * salt + 99)
    bps.shutdown()


def raises(job: Job) -> None:
    """Raise an error outside BytePS on every worker, one after the other."""
    bps.init()
    _sum(job.rank, job.size, "weight", 0)
    job.mark("summed")
    job.wait_go("raise")
    raise RuntimeError(f"no checkpoint for rank {job.rank}")


def lacks_one(job: Job) -> None:
    """Rank 0 waits for a sum that rank 1 never pushes. Then both shut down normally."""
    bps.init()
    if job.rank == 0:
        with job.check_raises("the sum", bps.BytePSError, "timed out"):
            bps.push_pull(torch.ones(10), average=False, name="alone")
        job.mark("told")
    else:
        job.wait_until("rank 0", (job.folder / "mark.told.0").exists)
    bps.shutdown()


def train(folder: Path, arguments: dict[str, Any]) -> None:
    """Learn y = Wx by SGD over BytePS as a rank of torchrun, from a checkpoint if there is one.

    In the first attempt rank 1 kills itself after a few steps. The last rank 0 prints the result.
    """
    import signal

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = arguments["steps"]
    bps.init()
    checkpoint = folder / "checkpoint.pt"
    torch.manual_seed(7)
    truth = torch.randn(4, 8)
    weight = torch.zeros(4, 8)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first, weight = saved["step"], saved["weight"]
    print(f"attempt {attempt}: rank {rank} of {size} begins at step {first}", flush=True)
    for step in range(first, steps):
        if attempt == 0 and rank == 1 and step == arguments["dies_at"]:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        # Batches do not depend on the number of ranks, because each rank takes its part of a batch.
        batch = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))[rank::size]
        error = batch @ (weight - truth).T
        gradient = error.T @ batch / 64
        bps.push_pull_inplace(gradient, average=False, name="weight.grad")
        weight -= 0.5 * gradient
        if rank == 0:
            part = folder / "checkpoint.part"
            torch.save({"step": step + 1, "weight": weight}, part)
            part.rename(checkpoint)
    loss = (weight - truth).pow(2).mean().item()
    print(f"attempt {attempt}: rank {rank} ended with loss {loss:.3e}", flush=True)
    bps.shutdown()
    if loss > 1e-3:
        raise SystemExit(f"the model has learnt nothing: loss {loss}")


def torchrun(job: Job) -> None:
    """Run torchrun in a process that has imported torch; its ranks are normal programs."""
    from torch.distributed import run

    run.main(job.args["words"])


def demand_sum(rank: int, size: int, salt: int) -> None:
    for round_ in range(3):
        given = torch.full((5000,), float(rank + salt + round_))
        total = bps.push_pull(given, average=False, name="weight")
        want = float(sum(r + salt + round_ for r in range(size)))
        if not (total == want).all():
            raise SystemExit(f"rank {rank}: the sum is {total[0]}, not {want}")


def init_over_the_lent_store(rank: int, size: int) -> None:
    """Initialize over the store that torchrun shares between all generations, with a backend that
    makes no connections: torch's own backends may use addresses of an earlier generation."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

    store, _, _ = next(iter(dist.rendezvous("env://", rank, size)))
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)


def _count_life(rank: int) -> int:
    """Return the number of this rank's generation, from 0. (torchrun counts them per host.)"""
    with (Path(os.environ["JOB_FOLDER"]) / f"lives.{rank}").open("a+") as lives:
        lives.write("life\n")
        lives.seek(0)
        return len(lives.readlines()) - 1


def live(rank: int, size: int) -> None:
    """Sum, also inside the host. In each generation but the last, one rank then ends abruptly."""
    life, lives = _count_life(rank), int(os.environ["LIVES"])
    group = nodes.groups.get(tuple(range(size)), torch.device("cpu"))
    total = torch.empty(3)
    group.reduce_scatter(total, torch.arange(3.0 * size) + rank)
    want = size * (torch.arange(3.0) + 3 * rank) + sum(range(size))
    if not (total == want).all():
        raise SystemExit(f"rank {rank}, generation {life}: the sum is {total}, not {want}")
    print(f"rank {rank} of life {life}: sums inside the host are right", flush=True)
    if life >= lives - 1:
        return
    bps.push_pull(torch.ones(10), average=False, name="all are here")
    if rank == life % size:
        os._exit(3)
    while True:
        bps.push_pull(torch.ones(10), average=False, name="loop")


def _embedded() -> None:
    """Training script in embedded mode, started with torchrun; the second argument selects the
    behaviour."""
    mode, salt = sys.argv[2], int(os.environ.get("SALT", "0"))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(os.environ["JOB_FOLDER"])
    if mode == "restarts":
        init_over_the_lent_store(rank, size)
    elif size > 1:
        dist.init_process_group("gloo")
    if mode == "absent" and rank == 1:
        dist.barrier()  # Rank 0 never joins, because its init fails.
    bps.init()
    demand_sum(rank, size, salt)
    if elements := int(os.environ.get("ELEMENTS", "0")):
        total = bps.push_pull(torch.full((elements,), rank + 1.0), average=False, name="large")
        if not (total == sum(range(1, size + 1))).all():
            raise SystemExit(f"rank {rank}: wrong large sum {total[0]}")
    if left := {"DMLC_PS_ROOT_URI", "DMLC_NUM_SERVER"} & os.environ.keys():
        raise SystemExit(f"bps.init() left {left} in the environment")
    print(
        f"rank {bps.rank()} of {bps.size()}, {bps.num_servers()} servers, sums are right",
        flush=True,
    )
    if mode in ("restarts", "restarts-gloo"):
        live(rank, size)
    if mode == "forever":
        part = folder / f".pid.{rank}"
        part.write_text(str(os.getpid()))
        part.rename(folder / f"pid.{rank}")
        try:
            while True:
                bps.push_pull(torch.ones(1000), average=False, name="loop")
        except bps.BytePSError:
            if rank == 0:
                raise
            # torchrun ends all ranks once one has ended. Rank 0 has started the nodes, and has a
            # more precise error than this rank. So this rank waits: rank 0 fails first, and then
            # torchrun ends this rank.
            traceback.print_exc()
            time.sleep(60)
            raise
    if mode == "again":
        bps.shutdown()
        bps.init()
        demand_sum(rank, size, salt + 1)
    if mode != "no-shutdown":
        bps.shutdown()
    if size > 1 and mode != "no-shutdown":
        dist.destroy_process_group()


def _scripted() -> None:
    """Training script for tests of worker.sh: a mode, and a folder."""
    mode, folder = sys.argv[2], Path(sys.argv[3])
    bps.init()
    want = float(sum(range(1, bps.size() + 1)))
    for round_ in range(5):
        given = torch.full((100_000,), float(bps.rank() + 1 + round_))
        total = bps.push_pull(given, average=False, name="weight")
        if not (total == want + round_ * bps.size()).all():
            raise SystemExit(f"wrong sum {total[0]}")
    print(f"rank {bps.rank()} of {bps.size()}: sums are right", flush=True)
    (folder / f"ready.{bps.rank()}").touch()
    while mode == "forever":
        bps.push_pull(torch.ones(1000), average=False, name="loop")
    bps.shutdown()


def _restarted() -> None:
    """Training script that torchrun restarts repeatedly."""
    train(Path(os.environ["JOB_FOLDER"]), {"steps": 60, "dies_at": 20})


SCRIPTS = {"embedded": _embedded, "scripted": _scripted, "restarted": _restarted}
"""Scripts, by the first argument of the program."""

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]]()
