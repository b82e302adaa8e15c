"""verl's Megatron engine in each layout: BytePS reduces gradients to the bits of all-reduce, and an
engine that goes on from a checkpoint computes what one that never stopped does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_task

from .engine_rank import BACKENDS, LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 2700.0
"""Minutes on a machine of its own; on one that others keep busy, many."""


def run(name: str, model: Path, out: Path) -> str:
    """All engines of a layout, on its ranks; returns their log."""
    ranks = str(LAYOUTS[name].ranks)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "tests.reinforcement.engine_rank"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BYTEPS_EMBEDDED_SERVERS": "1"}
    process = Spawned("verl", [*command, name, str(model), str(out)], environment, out, cwd=out)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    assert process.status == 0, last_lines(process.log, 80)
    return process.text


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    import torch

    assert one.keys() == other.keys() and one
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def optimizer_values(checkpoint: Path) -> dict[str, Any]:
    """What the optimizer saved: fp32 parameters and moments, by name."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    reader = FileSystemReader(checkpoint)
    names = reader.read_metadata().state_dict_metadata
    loaded = _load_state_dict_from_keys(set(names), storage_reader=reader)
    return {name: value for name, value in loaded.items() if torch.is_tensor(value)}


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    import torch

    model = rl_task.make_model(tmp_path / "model", **LAYOUTS[name].model)
    out = tmp_path / "out"
    out.mkdir()
    log = run(name, model, out)
    assert "BytePS flat" in log, last_lines(out / "verl.log", 60)
    for rank in range(LAYOUTS[name].ranks):
        seen = {backend: torch.load(out / f"{backend}-{rank}.pt") for backend in BACKENDS}
        assert_same(seen["byteps"]["last"], seen["all-reduce"]["last"])
        for one in seen.values():
            assert_same(one["resumed"], one["last"])
            assert any(not torch.equal(one["first"][key], one["last"][key]) for key in one["last"])
    ours, theirs = (
        optimizer_values(next(out.glob(f"{backend}-saved/**/optim*/dist_ckpt")))
        for backend in ("servers", "all-reduce")
    )
    assert any(key.startswith("optimizer.state.param.") for key in ours), list(ours)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)
