"""Ranks that outnumber this machine's GPUs: Ray numbers more of them, and ranks share those there
are."""

from __future__ import annotations

import os

from megatron_byteps_ray.settings import Settings
from scripts.gpus import count_gpus, outnumbered, place_among


def gpus_to_offer(settings: Settings) -> int | None:
    """For ``cluster``: a GPU for each rank and spare, where Ray would find too few.

    None where ranks need none, and where there are enough.
    """
    wanted = int((settings.ranks + settings.spares) * settings.gpus_per_rank)
    return wanted if outnumbered(wanted) else None


def take_a_share() -> None:
    """In a rank whose GPU's number is its local rank: take one that is there.

    Does nothing where ranks compute on the CPU, or have a GPU each.
    """
    on_gpus = os.environ["MEGATRON_CPU"] != "1"
    if on_gpus and outnumbered(int(os.environ["LOCAL_WORLD_SIZE"])):
        os.environ |= place_among(int(os.environ["LOCAL_RANK"]), count_gpus())
