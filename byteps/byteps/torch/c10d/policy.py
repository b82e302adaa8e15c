"""Which all-reduces of a group go through the servers, and how: the same on all members."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch
from byteps import logs
from byteps.torch import session
from byteps.torch.figures import setting
from byteps.torch.job import Job
from byteps.torch.routes import COLLECTIVE, Decision, Sum, decide

SUMMED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
"""Types of gradients. Whole numbers stay with NCCL or gloo, which do not average them."""

_WIRE_DTYPES = {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_REFERENCE_BYTES = 64 << 20
"""Bytes and times of a backend grow alike with the size, so that any size decides for all."""

_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What users choose, by variables BYTEPS_C10D_*."""

    backend: str
    min_bytes: int
    wire_dtype: torch.dtype | None

    @staticmethod
    def read() -> Settings:
        """Those in force. Raises BytePSError where one has a value that it may not have."""
        return Settings(
            backend=setting("BYTEPS_C10D_BACKEND"),
            min_bytes=int(setting("BYTEPS_C10D_MIN_BYTES")),
            wire_dtype=_WIRE_DTYPES[setting("BYTEPS_C10D_WIRE_DTYPE")],
        )

    def wire_dtype_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """The type in which a tensor travels; None: its own."""
        return self.wire_dtype if dtype in (torch.float32, torch.float64) else None


def decide_for(
    job: Job,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    settings: Settings,
) -> Decision:
    """How all-reduces of a type are made over these ranks. Rank 0 of them says so, once.

    A pure function of what all members know.
    """
    hosts = tuple(job.hosts[rank] for rank in ranks)
    wire = settings.wire_dtype_of(dtype) or dtype
    what = Sum(
        hosts=hosts,
        gradient_bytes=_REFERENCE_BYTES,
        wire_bytes=_REFERENCE_BYTES * wire.itemsize // dtype.itemsize,
    )
    decision = decide(what, job.network, settings.backend)
    if session.rank() == min(ranks):
        _tell(ranks, hosts, dtype, decision, settings)
    return decision


def _tell(
    ranks: tuple[int, ...],
    hosts: tuple[int, ...],
    dtype: torch.dtype,
    decision: Decision,
    settings: Settings,
) -> None:
    wire = settings.wire_dtype_of(dtype)
    of_type = str(dtype).removeprefix("torch.")
    if wire is not None:
        of_type += f", sent as {str(wire).removeprefix('torch.')}"
    backend = (
        "NCCL or gloo"
        if decision.route == COLLECTIVE
        else f"BytePS {decision.route}, from {settings.min_bytes} bytes"
    )
    text = (
        f"all-reduces of {of_type} over {len(ranks)} ranks on {len(set(hosts))} host(s): "
        f"{backend} ({decision.why})"
    )
    if text not in _told:
        _told.add(text)
        # Not by a logger: at its default level it says nothing.
        sys.stderr.write(logs.render(logging.INFO, text) + "\n")
