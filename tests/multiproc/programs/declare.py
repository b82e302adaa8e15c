"""Declarations of many tensors, and what members have to agree on."""

from __future__ import annotations

from typing import Any

import byteps.torch as bps
import torch

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 3000


def tensors(job: Job, count: int) -> list[bps.TensorDeclaration]:
    """Every second one for the first two ranks alone."""
    return [
        bps.TensorDeclaration(
            name=f"tensor.{i}",
            dtype=torch.float32,
            numel=COUNT,
            average=False,
            group=[0, 1] if i % 2 else None,
            wire_dtype=torch.bfloat16 if i % 3 == 0 else None,
        )
        for i in range(count)
    ]


def _members(tensor: bps.TensorDeclaration, job: Job) -> list[int]:
    return list(tensor.group) if isinstance(tensor.group, list) else list(range(job.size))


def many(job: Job) -> None:
    """Two hundred tensors of two groups by one call; then some are summed."""
    bps.init()
    everyone = tensors(job, 200)
    own = [t for t in everyone if job.rank in _members(t, job)]
    bps.declare(own)
    bps.declare(own)
    bps.declare("a single name")
    with job.check("all are declared"):
        assert bps.get_metrics()["byteps_worker_declared_tensors"] == len(own)
    for tensor in everyone[:12]:
        if tensor not in own:
            continue
        with job.check(f"sum of {tensor.name}"):
            given = values.exact_input(COUNT, job.rank, tensor.name, 0, "float32")
            bps.push_pull_inplace(
                given,
                average=False,
                name=tensor.name,
                group=tensor.group,
                wire_dtype=tensor.wire_dtype,
            )
            ranks = _members(tensor, job)
            values.demand_exact(given, values.exact_sum(COUNT, ranks, tensor.name, 0, "float32"))
    spec: dict[str, Any] = {"name": "x", "dtype": torch.float32, "numel": COUNT}
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("name", {"name": ""}),
        ("numel", {"numel": 0}),
        ("dtype", {"dtype": torch.complex64}),
        ("wire", {"wire_dtype": torch.int8}),
        ("placement", {"placement": -1}),
        ("group", {"group": [job.size + 3, job.rank]}),
    )
    for label, bad in wrong:
        with job.check_raises(f"bad {label}", ValueError, "."):
            bps.declare([bps.TensorDeclaration(**{**spec, **bad})])
    bps.shutdown()


def hashed(job: Job) -> None:
    """The ranks have different BYTEPS_KEY_HASH_FN: the later one is refused, and told why."""
    bps.init()
    if job.rank == 1:
        job.wait_go("second")
        with job.check_raises("refused", bps.BytePSError, "BYTEPS_KEY_HASH_FN=djb2"):
            bps.push_pull(torch.ones(10), average=False, name="x")
    else:
        bps.declare([bps.TensorDeclaration(name="x", dtype=torch.float32, numel=10, average=False)])
        job.mark("declared")
    job.mark("done")
    job.wait_go("end")
    bps.shutdown()


def broadcast(job: Job) -> None:
    """Parameters without names."""
    bps.init()
    parameters = [torch.full((5,), float(10 * job.rank + i)) for i in range(3)]
    bps.broadcast_parameters(parameters, root_rank=1)
    with job.check("those of rank 1"):
        for i, parameter in enumerate(parameters):
            values.demand_exact(parameter, torch.full((5,), 10.0 + i))
    bps.shutdown()
