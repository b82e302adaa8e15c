"""Names, priorities and placements of buckets: pure functions of what identifies them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core.distributed import dpu_reduce
from megatron.core.distributed.dpu_reduce import naming


def _name(**changed: Any) -> str:
    identity: dict[str, Any] = {
        "kind": "dense",
        "group": (0, 1),
        "model": 0,
        "chunk": 0,
        "param_dtype": torch.bfloat16,
        "grad_dtype": torch.float32,
        "bucket_id": 3,
    }
    return dpu_reduce.bucket_name(**{**identity, **changed})


def test_name() -> None:
    assert _name() == ("dpu_reduce/dense/dp0x2-9fc81a7857d8/model0/chunk0/bf16-fp32/bucket3")
    assert _name(group=(1, 0)) == _name()


def test_every_part_of_the_identity_counts() -> None:
    kinds, models, chunks = ("dense", "expert"), (0, 1), (0, 1, 10)
    groups = ((0,), (0, 1), (0, 2), (0, 1, 2), (1, 2), (10, 11))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64)
    buckets, buffers = (0, 1, 10, 11), (0, 1, 10)
    names = {
        _name(
            kind=kind,
            group=group,
            model=model,
            chunk=chunk,
            param_dtype=param,
            grad_dtype=grad,
            bucket_id=bucket,
            buffer=buffer,
        )
        for kind, group, model, chunk, param, grad, bucket, buffer in itertools.product(
            kinds, groups, models, chunks, dtypes, dtypes, buckets, buffers
        )
    }
    assert len(names) == 2 * 6 * 2 * 3 * 5 * 5 * 4 * 3


def test_an_unusual_dtype_has_a_name() -> None:
    assert "/int32-fp32/" in _name(param_dtype=torch.int32)


def test_what_is_built_for_other_groups_changes_neither_names_nor_placements() -> None:
    """Not even for a group with the same lowest rank: its members alone know of it."""
    everywhere, here = naming.Named(), naming.Named()
    group, alone = (0, 1), (0,)
    seen = []
    for named in (everywhere, here):
        first = named.next_model("dense", group, 0), named.next_placement(group, 7)
        if named is here:
            assert named.next_model("dense", alone, 0) == 0
            assert named.next_placement(alone, 3) == 0
        seen.append((first, named.next_model("dense", group, 0), named.next_placement(group, 5)))
    assert seen[0] == seen[1] == ((0, 0), 1, 7)
    assert _name(group=alone) != _name(group=group)
