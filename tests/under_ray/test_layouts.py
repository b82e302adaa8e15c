"""What ranks under Ray compute is what ranks under torchrun do, to the last bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings
from tests.layouts.data import data_arguments, tiny_dataset
from tests.layouts.under_ray.modes import compare, run_locally, run_under_ray
from tests.layouts.under_ray.rows import CELLS, FULL, Cell

# Of four ranks, as many as the pool has; `make ray-layouts` runs all, and adapters.
_CELLS = [
    pytest.param(cell, id=cell.name)
    for cell in CELLS
    if cell.trained == FULL and cell.name in ("tp2-pp2", "dp4-distributed-optimizer")
]


@pytest.mark.parametrize("cell", _CELLS)
def test_a_layout_in_both_modes(cell: Cell, pool: Pool, settings: Settings, run_dir: Path) -> None:
    arguments = [*cell.arguments, *data_arguments(tiny_dataset(run_dir))]
    local = run_locally(cell, run_dir / "local", arguments)
    ray = run_under_ray(cell, run_dir / "ray", arguments, pool, settings)
    outcome = compare(local, ray)
    assert outcome.differences == [] and outcome.problems == []
    assert (outcome.groups, outcome.sums) == ((0, 0) if cell.name == "tp2-pp2" else (1, 1))
    # One bit of one parameter of one rank would have been seen.
    other = copy.deepcopy(ray)
    next(iter(other[-1].parameters.values())).view(-1).view(torch.int32)[0] ^= 1
    (found,) = compare(local, other).differences
    assert found.startswith(f"rank {cell.ranks - 1}, parameter ")
