"""A user's program computes gloo's results through each interface, or is refused on every rank.

A refusal has a named error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.border import interfaces, matrix
from tests.layouts.job import start_fork_server

QUICK = {
    ("ddp_comm_hook", "unused-parameters"),
    ("BYTEPS_C10D", "sparse-gradients"),
    ("FSDP2", "accumulation"),
    ("FSDP2 sharded", "accumulation"),
    ("--use-dpu-reduce", "grad-scaler"),
    ("--dpu-optimizer", "two-backward-passes"),
}
"""Cells of `make test`. Both optimizers of byteps run these programs in test_push_pull.py and
test_server_optimizer.py, too; test_c10d_groups.py has groups."""


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Import torch and Megatron once for all ranks of all cells."""
    start_fork_server(["tests.border.cell", "tests.layouts.warm"])


def _parameters() -> list[object]:
    return [
        pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.thorough, id="+".join(cell))
        for cell in matrix.cells()
    ]


@pytest.mark.parametrize(("interface", "scenario"), _parameters())
def test_each_interface_in_each_scenario(run_dir: Path, interface: str, scenario: str) -> None:
    # In `make test` a group is created fewer times than in the full matrix, to save time.
    rounds = 10 if (interface, scenario) in QUICK else matrix.ROUNDS
    job = matrix.run_cell(run_dir / "cell", interface, scenario, rounds=rounds)
    verdict = matrix.judge(job, interface, scenario)
    assert verdict.is_good, f"{verdict.text}\n{job.logs()}"


def test_what_must_compute_is_not_refused() -> None:
    assert not [cell for cell in matrix.REFUSED if cell[1] in matrix.MUST_COMPUTE]
    known = set(matrix.cells())
    assert set(QUICK) <= known and set(matrix.REFUSED) <= known
    averaged = {cell[0] for cell in QUICK} | {"DistributedOptimizer", "ServerOptimizer"}
    assert {interface.name for interface in interfaces.SERVED} == averaged
