"""Which GPUs of this machine each emulated host has."""

from __future__ import annotations

import os

import torch

from benchkit.errors import LaunchError


def gpus_of(rank: int, ranks_per_host: int) -> str:
    """The GPUs that the host of a rank has, by CUDA_VISIBLE_DEVICES: one for each of its ranks.

    Hosts that outnumber GPUs share them evenly. A host sees no GPU that it does not use: torch
    takes a rank's number modulo those it sees for its GPU's, and hangs where that is wrong.

    Raises:
        LaunchError: a host has more ranks than there are GPUs.
    """
    if ranks_per_host > count_gpus():
        raise LaunchError(f"{ranks_per_host} ranks a host need as many GPUs, not {count_gpus()}")
    return some_gpus(rank // ranks_per_host * ranks_per_host, ranks_per_host)


def outnumbered(ranks: int) -> bool:
    """Whether so many ranks share GPUs of this machine. NCCL refuses that to ranks of a machine."""
    return 0 < count_gpus() < ranks


def place_among(number: int, per_machine: int) -> dict[str, str]:
    """Variables of a rank, of which so many have a GPU each. Those are a machine to NCCL, which
    lets no two ranks of a machine share a GPU."""
    machine, local = divmod(number, per_machine)
    return {"LOCAL_RANK": str(local), "NCCL_HOSTID": f"machine{machine}"}


def some_gpus(first: int, count: int) -> str:
    """``count`` GPUs of this machine from the ``first`` one on and around, by
    CUDA_VISIBLE_DEVICES."""
    gpus = _gpus()
    return ",".join(gpus[(first + i) % len(gpus)] for i in range(count))


def count_gpus() -> int:
    """How many GPUs of this machine may be used."""
    return len(_gpus())


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
