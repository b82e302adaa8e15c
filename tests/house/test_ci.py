"""What continuous integration runs (.ci/run): parts exist, and a commit always has the same one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / ".ci/run"


def ci(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_each_part_runs_something() -> None:
    listed = ci("--list").stdout.split()
    script = SCRIPT.read_text(encoding="utf-8")
    branches = re.findall(r"^  ([a-z]+)\) #.*\n((?:    .*\n)+)", script, re.MULTILINE)
    assert sorted(listed) == sorted(name for name, _ in branches)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for name, commands in branches:
        targets = re.findall(r"run make ([a-z-]+)", commands)
        assert targets, name
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("arguments", [("--part",), ("--part", "nothing"), ("--pat", "rdma")])
def test_bad_use(arguments: tuple[str, ...]) -> None:
    assert ci(*arguments).returncode == 2
