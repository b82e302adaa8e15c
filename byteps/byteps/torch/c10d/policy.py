"""Which all-reduces of a group go through the servers, and how: the same on all members."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch
from byteps import logs
from byteps.torch import session, wire
from byteps.torch.figures import setting
from byteps.torch.job import Job
from byteps.torch.routes import COLLECTIVE, Decision, Sum, decide
from byteps.torch.wire import WireType

SUMMED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
"""Types of gradients. Whole numbers stay with NCCL or gloo, which do not average them."""

SAME = "same"
"""The name of a tensor's own type."""

_REFERENCE_BYTES = 64 << 20
"""Bytes and times of a backend grow alike with the size, so that any size decides for all."""

_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What users choose, by variables BYTEPS_C10D_*."""

    backend: str
    min_bytes: int
    wire_dtype: str
    """A name of `wire.NAMES`, or "same"."""

    @staticmethod
    def read() -> Settings:
        """Those in force. Raises BytePSError where one has a value that it may not have."""
        return Settings(
            backend=setting("BYTEPS_C10D_BACKEND"),
            min_bytes=int(setting("BYTEPS_C10D_MIN_BYTES")),
            wire_dtype=setting("BYTEPS_C10D_WIRE_DTYPE"),
        )

    def wire_of(self, dtype: torch.dtype) -> WireType:
        """The type in which a tensor travels: its own where the one that was asked for would keep
        less of it, or cannot hold it."""
        asked = wire.NAMES.get(self.wire_dtype)
        return asked if asked is not None and asked.takes(dtype) else wire.of(dtype)


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
    what = Sum(
        hosts=hosts,
        gradient_bytes=_REFERENCE_BYTES,
        wire_bytes=settings.wire_of(dtype).nbytes(_REFERENCE_BYTES // dtype.itemsize),
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
    form = settings.wire_of(dtype)
    of_type = str(dtype).removeprefix("torch.")
    if form != wire.of(dtype):
        of_type += f", sent as {form}"
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
