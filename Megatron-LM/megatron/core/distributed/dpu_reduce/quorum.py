# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Parses ``--dpu-quorum REPLICAS@SECONDS``, which limits how long replicas wait for slower
replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Rule for late replicas: once `replicas` replicas wait, the others have `seconds` seconds
    left."""

    replicas: int
    seconds: float


def parse(text: str) -> Quorum:
    """Parse the flag's value. Raises ValueError if it is invalid."""
    replicas, _, seconds = text.partition("@")
    try:
        quorum = Quorum(replicas=int(replicas), seconds=float(seconds))
    except ValueError:
        quorum = None
    if quorum is None or quorum.replicas < 1 or not 0 < quorum.seconds < float("inf"):
        raise ValueError(
            f"--dpu-quorum={text} is not REPLICAS@SECONDS: with 3@60, once three replicas wait, "
            "the others have a minute"
        )
    return quorum
