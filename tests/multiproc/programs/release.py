"""Names that are released and declared anew: memory of servers, and the next sums."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import byteps.torch as bps
import torch
from byteps.torch import c_lib, engine, operations

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

LIVES = 30
NUMEL = 1 << 20
WARM = 5
"""Number of objects with the same names after which memory is first measured."""


class Owner:
    """Owns parameters on the servers, under a name that earlier objects had."""

    def __init__(self, name: str, numel: int) -> None:
        self._names = engine.Names(name)
        weakref.finalize(self, self._names.release).atexit = False
        spec = engine.spec_of(
            engine.TensorDeclaration(name=name, dtype=torch.float32, numel=numel, average=False)
        )
        adamw: Any = [(0.9, 0.999, 1e-8, False)]
        self._tensor = c_lib.UpdatedTensor(
            spec, True, adamw, [(numel, 0, True)], "float32", False, False
        )
        self._numel = numel

    def load(self, value: float) -> None:
        """Load this value into the servers."""
        held = torch.full((self._numel,), value)
        handle = operations.start_update(lambda: self._tensor.load(0, held.data_ptr()), held)
        operations.wait_update(handle)

    def read(self) -> torch.Tensor:
        """Return the servers' parameters."""
        held = torch.empty(self._numel)
        handle = operations.start_update(
            lambda: self._tensor.read(0, 0, self._numel, held.data_ptr(), 0), held
        )
        operations.wait_update(handle)
        return held


def lives(job: Job) -> None:
    """Make objects with the same names, one after the other: parameters, and a sum of another
    shape. One rank releases when it makes the next object, others when the last is collected."""
    bps.init()
    owner = None
    for life in range(LIVES):
        numel = NUMEL + life * 64
        if job.rank > 0:
            owner = None
            gc.collect()
        owner = Owner("parameters", numel)
        if job.rank == 0:
            owner.load(life + 0.5)
        given = values.exact_input(1000 + life, job.rank, "sum", life, "float32")
        bps.push_pull_inplace(given, average=False, name="sum")
        with job.check(f"the sum of life {life}"):
            ranks = list(range(job.size))
            assert torch.equal(given, values.exact_sum(1000 + life, ranks, "sum", life, "float32"))
        with job.check(f"the parameters of life {life}"):
            assert torch.equal(owner.read(), torch.full((numel,), life + 0.5))
        engine.release(["sum"])
        if life in (WARM, LIVES - 1):
            number = 1 if life == WARM else 2
            job.mark(f"looked{number}")
            job.wait_go(f"look{number}")
    del owner
    bps.shutdown()


def goes_on_alone(job: Job) -> None:
    """Let rank 0 release a name, and rank 1 begin another sum of this name."""
    bps.init()
    bps.push_pull_inplace(torch.ones(100), name="x")
    if job.rank == 0:
        engine.release(["x"])
        job.mark("released")
        job.wait_go("end")
    else:
        job.wait_go("push")
        with job.check("it hears who has released it"):
            try:
                bps.push_pull_inplace(torch.ones(100), name="x")
            except bps.BytePSError as error:
                assert "worker 0 has released 'x'" in str(error), error
            else:
                raise AssertionError("push_pull of a released tensor did not fail")
        job.mark("heard")
        job.wait_go("end")
    bps.shutdown()
