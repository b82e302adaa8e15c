# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The record of samples that were not trained on, since a replica was not there, or too slow."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

_FILE = "dpu_lost_samples.jsonl"


def write(
    folder: str | None, iteration: int, first: int, samples: int, missing: Sequence[int]
) -> None:
    """Add a line to the file in the folder of the checkpoints; nothing if none are saved.

    Args:
        folder: of the checkpoints.
        iteration: the last one that it is about, counted from 1.
        first: sample of the first one.
        samples: of all replicas, from that one on.
        missing: the replicas whose part of them was left out.
    """
    if not folder:
        return
    os.makedirs(folder, exist_ok=True)
    record = {
        "iteration": iteration,
        "first_sample": first,
        "samples": samples,
        "replicas": list(missing),
    }
    with open(os.path.join(folder, _FILE), "a") as file:
        file.write(json.dumps(record) + "\n")
