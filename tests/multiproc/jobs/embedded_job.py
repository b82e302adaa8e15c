"""A training script as a user would start it with torchrun; MODE says what it shall show."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps.torch import nodes


def demand_sum(rank: int, size: int, salt: int) -> None:
    for round_ in range(3):
        given = torch.full((5000,), float(rank + salt + round_))
        total = bps.push_pull(given, average=False, name="weight")
        want = float(sum(r + salt + round_ for r in range(size)))
        if not (total == want).all():
            raise SystemExit(f"rank {rank}: {total[0]}, want {want}")


def init_over_the_lent_store(rank: int, size: int) -> None:
    """With the store that torchrun lends to every life of the job, and a backend that connects
    nothing: what torch's own do with a store that has an earlier life's addresses is not ours."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

    store, _, _ = next(iter(dist.rendezvous("env://", rank, size)))
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)


def live(rank: int, size: int) -> None:
    """Sum inside the host, as well; then one rank of each life but the last ends at once."""
    life, lives = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["LIVES"])
    group = nodes.groups.get(tuple(range(size)), torch.device("cpu"))
    total = torch.empty(3)
    group.reduce_scatter(total, torch.arange(3.0 * size) + rank)
    want = size * (torch.arange(3.0) + 3 * rank) + sum(range(size))
    if not (total == want).all():
        raise SystemExit(f"rank {rank}, life {life}: {total}, want {want}")
    print(f"rank {rank} of life {life}: sums inside the host are right", flush=True)
    if life == lives - 1:
        return
    bps.push_pull(torch.ones(10), average=False, name="all are here")
    if rank == life % size:
        os._exit(3)
    while True:
        bps.push_pull(torch.ones(10), average=False, name="loop")


def main() -> None:
    mode, salt = sys.argv[1], int(os.environ.get("SALT", "0"))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(os.environ["JOB_FOLDER"])
    if mode == "restarts":
        init_over_the_lent_store(rank, size)
    elif size > 1:
        dist.init_process_group("gloo")
    if mode == "absent" and rank == 1:
        dist.barrier()  # rank 0 never comes: its init fails
    bps.init()
    demand_sum(rank, size, salt)
    servers = os.environ["DMLC_NUM_SERVER"]
    print(f"rank {bps.rank()} of {bps.size()}, {servers} servers, sums are right", flush=True)
    if mode == "restarts":
        live(rank, size)
    if mode == "raise":
        if rank == 0:
            raise RuntimeError("a mistake of the user's")
        dist.barrier()  # ends when rank 0 has ended
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
            # torchrun ends all ranks once one has ended. Rank 0 started the nodes and has more to
            # tell than the error: leave it the time to, and torchrun to end this one after it.
            traceback.print_exc()
            time.sleep(60)
            raise
    if mode == "again":
        bps.shutdown()
        if "DMLC_PS_ROOT_URI" in os.environ:
            raise SystemExit("the scheduler's address outlives the embedded cluster")
        bps.init()
        demand_sum(rank, size, salt + 1)
    if mode != "no-shutdown":
        bps.shutdown()
    if size > 1 and mode != "no-shutdown":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
