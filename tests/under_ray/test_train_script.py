"""scripts/train.py --mode ray, as `make train MODE=ray` runs it: it loses a rank and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("megatron", []), ("servers", []), ("megatron", ["--context-parallel-size", "2"])],
    ids=["megatron", "servers", "context-parallel"],
)
def test_training_loses_a_rank_and_goes_on(
    optimizer: str, layout: list[str], run_dir: Path
) -> None:
    source = run_dir / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    script = [sys.executable, str(ROOT / "scripts/train.py"), "--out", str(run_dir / "out")]
    data = ["--data-cache", str(run_dir / "data"), "--data", str(source)]
    job = ["--mode", "ray", "--steps", "12", "--lose-rank-at", "6", "--optimizer", optimizer]
    small = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]
    small += layout
    run = subprocess.run(
        [*script, *data, *job, "--", *small],
        env={**os.environ, "MEGATRON_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for said in (
        "step 6: killing the actor of rank 1",
        "generation 0 failed: rank 1 was lost with its actor",
        "generation 1: 2 ranks on 1 machine, 0 warm spares",
        "training again",
    ):
        assert said in run.stdout, run.stdout
