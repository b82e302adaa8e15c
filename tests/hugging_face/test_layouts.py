"""Hugging Face to Megatron and back, in every layout, whole and by adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.hugging_face.rows import LAYOUTS, Layout
from tests.layouts.hugging_face.runs import compare

# Those of eight ranks take a minute each on two cores.
_ROWS = [
    pytest.param(layout, id=layout.name, marks=[pytest.mark.thorough] if layout.ranks > 4 else [])
    for layout in LAYOUTS
]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", _ROWS)
def test_layout(layout: Layout, lora: bool, run_dir: Path, models: Path, data: list[str]) -> None:
    outcome = compare(layout, run_dir / "jobs", models, data, lora=lora)
    assert not outcome.problems()
    assert (outcome.trained < 0.5) == lora
