"""Where ranks stand on their machines, and which of the GPUs there is theirs.

Ray names GPUs as the mask does with which its node was started: ``4`` of ``4,5``, or the UUID of a
GPU or of a slice of one (MIG). CUDA counts them by their place in that mask, which is what
``LOCAL_RANK`` must be for ``torch.cuda.set_device(LOCAL_RANK)``. BytePS counts ranks instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SLICE = "MIG-"


def gpu_numbers(given: Sequence[str], mask: str | None) -> list[int]:
    """How CUDA numbers these GPUs in a process that sees those of ``mask``; None: all there are.

    Raises:
        ValueError: the mask does not have them.
    """
    if mask is None:
        return [int(gpu) for gpu in given]
    visible = [gpu.strip() for gpu in mask.split(",")]
    for gpu in given:
        if gpu not in visible:
            raise ValueError(
                f"Ray gave GPU {gpu}, but ranks see CUDA_VISIBLE_DEVICES={mask}: set it for "
                "`ray start`, not for the ranks"
            )
    return [visible.index(gpu) for gpu in given]


def is_slice(given: Sequence[str]) -> bool:
    """Whether it is a part of a GPU (MIG)."""
    return any(gpu.startswith(_SLICE) for gpu in given)


def local_variables(places: Sequence[Mapping[str, Any]], rank: int) -> dict[str, str]:
    """What tells a rank its place among those of its machine.

    Args:
        places: of each rank, ``node``, ``gpus`` (CUDA's numbers) and ``slice``.
    """
    node, gpus = places[rank]["node"], places[rank]["gpus"]
    here = [other for other, place in enumerate(places) if place["node"] == node]
    number = here.index(rank)
    ours = {"BYTEPS_LOCAL_RANK": str(number), "BYTEPS_LOCAL_SIZE": str(len(here))}
    if not gpus:
        return {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(len(here)), **ours}
    highest = max(gpu for other in here for gpu in places[other]["gpus"])
    values = {"LOCAL_RANK": str(gpus[0]), "LOCAL_WORLD_SIZE": str(highest + 1), **ours}
    # NCCL lets no two ranks of a machine share a GPU: to it those that do are on several.
    if any(_sharers_before(places, here, other) for other in here):
        values["NCCL_HOSTID"] = f"{node}-{_sharers_before(places, here, rank)}"
    return values


def _sharers_before(places: Sequence[Mapping[str, Any]], here: Sequence[int], rank: int) -> int:
    """How many lower ranks have the same GPU. A slice's name does not tell whose it is, so that
    all are taken to be of one."""
    own = places[rank]
    return sum(
        other < rank
        and (places[other]["gpus"] == own["gpus"] or (places[other]["slice"] and own["slice"]))
        for other in here
    )
