"""Which GPUs of this machine each emulated host has."""

from __future__ import annotations

import os

import torch

from benchkit.processes import LaunchError


def gpus_of(rank: int, ranks_per_host: int) -> str:
    """The GPUs that the host of a rank has, by CUDA_VISIBLE_DEVICES: all of this machine's, from
    another one on for each host, so that hosts that outnumber GPUs share them evenly.

    Raises:
        LaunchError: a host has more ranks than there are GPUs.
    """
    if ranks_per_host > count_gpus():
        raise LaunchError(f"{ranks_per_host} ranks a host need as many GPUs, not {count_gpus()}")
    return rotated_gpus(rank // ranks_per_host * ranks_per_host)


def rotated_gpus(first: int) -> str:
    """All GPUs of this machine, by CUDA_VISIBLE_DEVICES, from the ``first`` one on and around."""
    gpus = _gpus()
    at = first % len(gpus)
    return ",".join(gpus[at:] + gpus[:at])


def count_gpus() -> int:
    """How many GPUs of this machine may be used."""
    return len(_gpus())


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
