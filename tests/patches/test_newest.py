"""The series for Megatron's main branch, on a checkout of it: it applies, and what it gives trains
to the last bit as without BytePS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.patchkit import fetch
from scripts.patchkit.lock import Upstream, load_lock
from tests.patches.patch_project import REPOSITORY, contents, run_script

pytestmark = [pytest.mark.thorough, pytest.mark.requires("megatron-main")]

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
LIMIT_S = 900.0


@pytest.fixture(scope="module")
def main_branch() -> Upstream:
    (upstream,) = (each for each in load_lock(REPOSITORY) if each.name == "megatron-main")
    return upstream


def test_series_applies_and_survives_the_round_trip() -> None:
    result = run_script("apply", "--check", "--only", "megatron-main", timeout=LIMIT_S)
    assert result.status == 0, result.output
    assert "patches apply exactly and export unchanged" in result.output


def test_checkout_trains_as_without_byteps(main_branch: Upstream, run_dir: Path) -> None:
    checkout = run_dir / "Megatron-LM"
    fetch.unpack(main_branch, checkout)
    before = contents(checkout)
    target = ["apply", "--target", str(checkout)]
    result = run_script(*target, "--cpu", timeout=LIMIT_S)
    assert result.status == 0, result.output
    assert f"series for {main_branch.label}: " in result.output
    assert "warning" not in result.output

    assert "final parameters: the same to the last bit" in _train(checkout, run_dir / "sums")
    # The first loss of the servers' optimizer is the same, and the others as close as they are with
    # the release that the project is built of.
    assert "the mean of the last ten differs by" in _train(
        checkout, run_dir / "updates", "--optimizer", "servers"
    )

    result = run_script(*target, "--reverse", timeout=LIMIT_S)
    assert result.status == 0, result.output
    after = contents(checkout)
    assert {path: after[path] for path in before} == before


def _train(checkout: Path, folder: Path, *options: str) -> str:
    """Two ranks, through servers and without; what scripts/train.py says of both."""
    folder.mkdir()
    source = folder / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    command = [sys.executable, "-m", "scripts.train", "--tree", str(checkout), "--compare"]
    command += ["--steps", "6", "--out", str(folder / "out"), "--data", str(source)]
    command += ["--data-cache", str(folder / "data"), *options, "--", *MODEL]
    modules = os.pathsep.join([str(checkout), str(REPOSITORY)])
    # A git checkout compiles a module for its data sets, by the python3 that PATH has.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": modules, "PATH": programs, "MEGATRON_CPU": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
