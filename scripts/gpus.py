"""The GPUs of this machine, and how ranks share them."""

from __future__ import annotations

import os

import torch


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
