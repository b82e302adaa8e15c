"""The rule for hooks in Megatron: they are called without a condition, and look at their flag."""

from __future__ import annotations

import re
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "patches/megatron-core"
LOOKS = re.compile(r"^\+\s*(if|elif|while|assert)\b.*\b(use_dpu_reduce|dpu_optimizer)\b")


def test_megatron_looks_at_none_of_our_flags() -> None:
    """So that each is tested in one place, dpu_reduce/hooks.py."""
    lines = [
        f"{patch.name}: {line}"
        for patch in sorted(PATCHES.rglob("*.patch"))
        for line in patch.read_text().splitlines()
        if LOOKS.match(line)
    ]
    assert not lines
