"""A program that acts as a host of a job and starts the ranks there, as a launcher does. It forks
them, so that they need not import torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.multiproc.cluster import processes_with
from tests.multiproc.programs.job import Job
from tests.multiproc.programs.keep import demand_sum

WAIT_S = 100.0
"""Limit in seconds, only against hangs."""


def host(job: Job) -> None:
    """Become a host and start its ranks there.

    args: ``namespace`` of its network; ``name`` of the host; ``names``: content of its /etc/hosts;
    ``torchrun``: arguments. Without torchrun: number of ``ranks`` here, number of the ``first``
    one, the job's ``size``, variables that each is ``told``, and ``init_method`` of
    `init_process_group`.
    """
    _enter(job.args["namespace"], job.args["name"], job.args["names"])
    if words := job.args.get("torchrun"):
        _torchrun(words)
        return
    multiprocessing.start_processes(
        _spawned, (job.args,), nprocs=job.args["ranks"], start_method="fork"
    )


def _enter(namespace: str, name: str, names: str) -> None:
    with Path("/run/netns", namespace).open() as network:
        os.setns(network.fileno(), os.CLONE_NEWNET)
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWUTS)
    socket.sethostname(name)
    own = "mount --make-rslave / && mount -t sysfs sysfs /sys && mount --bind"
    subprocess.run(["sh", "-ec", f'{own} "$0" /etc/hosts', names], check=True)


def _torchrun(words: list[str]) -> None:
    """Run torchrun with these arguments; its ranks are forked."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    config, _, _ = run.config_from_args(run.parse_args([*words, "program"]))
    config.start_method = "fork"
    elastic_launch(config, train)({})


def _spawned(local_rank: int, args: dict[str, Any]) -> None:
    rank = args["first"] + local_rank
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": args["ranks"]}
    numbers |= {"WORLD_SIZE": args["size"]}
    os.environ.update({name: str(numbers[name]) for name in args.get("given", ())})
    init = {"rank": rank, "world_size": args["size"], "init_method": args["init_method"]}
    train(init if args["init_method"] else {})


def train(init: dict[str, Any]) -> None:
    """Sum in all generations. In each but the last, a rank is killed, and the other ranks fail."""
    folder, lives = Path(os.environ["JOB_FOLDER"]), int(os.environ.get("LIVES", "1"))
    dist.init_process_group("gloo", **init)
    rank, size = dist.get_rank(), dist.get_world_size()
    life = _count_life(folder, rank)
    bps.init()
    demand_sum(rank, size, life)
    _demand_servers(folder, life)
    print(f"life {life}: rank {rank} of {size}, {bps.num_servers()} servers", flush=True)
    if life < lives - 1:
        _fail(rank, int(os.environ["VICTIM"]))
    bps.shutdown()
    dist.destroy_process_group()


def _count_life(folder: Path, rank: int) -> int:
    """Return the number of this rank's restarts."""
    with (folder / f"lives.{rank}").open("a+") as lives:
        lives.write("life\n")
        lives.seek(0)
        return len(lives.readlines()) - 1


def _demand_servers(folder: Path, life: int) -> None:
    """Wait until only this generation's scheduler and servers run."""
    deadline = time.monotonic() + WAIT_S
    while True:
        commands = processes_with("JOB_FOLDER", str(folder)).values()
        roles = [
            role for role in ("scheduler", "server") for c in commands if f"--role {role} " in c
        ]
        if roles == ["scheduler", *["server"] * bps.num_servers()]:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"generation {life}: these processes run: {roles}")
        time.sleep(0.1)


def _fail(rank: int, victim: int) -> None:
    bps.push_pull(torch.ones(10), average=False, name="all are here")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        bps.push_pull(torch.ones(10), average=False, name="loop")
