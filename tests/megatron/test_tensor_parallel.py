"""All-reduces of tensor-parallel layers through servers, by one variable."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scripts.children import captured

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "scripts/examples/train_qwen_3b.sh"
STEPS = 3
LIMIT_S = 500.0


def _losses(tree: Path, python: str, **settings: str) -> tuple[list[str], str]:
    """Printed values, and the whole output."""
    words = ["--nproc-per-node", "2", "--", "--tensor-model-parallel-size", "2"]
    # All-reduces of 128 KiB: shorter ones stay with gloo.
    words += ["--seq-length", "512", "--max-position-embeddings", "512"]
    words += ["--train-iters", str(STEPS)]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SIZE": "tiny", **settings}
    environment |= {"PROGRAM": str(tree / "pretrain_dpu_gpt.py"), "PYTHON_EXEC": python}
    run = captured([EXAMPLE, *words], LIMIT_S, env=environment)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    losses = re.findall(r"lm loss: (\S+)", said)
    assert len(losses) == STEPS, said
    return losses, said


@pytest.mark.slow
def test_tensor_parallel_sums_have_gloo_s_bits(tree: Path, warm_python: str) -> None:
    ours, said = _losses(tree, warm_python, BYTEPS_C10D="1", BYTEPS_C10D_BACKEND="flat")
    assert re.search(r"all-reduces of bfloat16 over 2 ranks on 1 host\(s\): BytePS flat", said), (
        said
    )
    theirs, _ = _losses(tree, warm_python)
    assert ours == theirs
