"""Benchmarks, scripts and tests find each other: the checkout is installed (pyproject.toml)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EDITS = re.compile(r"\bsys\.path(\.(insert|append|extend)\b|\[.*\] *=|\s*\+?=[^=])")
ALLOWED = {"integrations/ray/megatron_byteps_ray/rank_program.py"}
"""Does for a user's script what Python does for one: its folder comes first."""
FOLDERS = ("Megatron-LM", "bench", "byteps", "integrations", "scripts", "tests")


def test_no_file_edits_the_path() -> None:
    found = {
        str(path.relative_to(REPOSITORY))
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        if EDITS.search(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "module", ["bench.kit.plan", "megatron_byteps_ray.settings", "scripts.progress", "tests.native"]
)
def test_modules_are_found_from_anywhere(module: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    "script", ["apply_patches.sh", "locks.py", "merge_traces.py", "progress.py"]
)
def test_scripts_that_need_no_environment(script: str) -> None:
    """They run by any Python, whose packages are not ours."""
    command = [sys.executable, "-S", str(REPOSITORY / "scripts" / script), "--help"]
    if script.endswith(".sh"):
        command = command[2:]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
