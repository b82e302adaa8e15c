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
LIMIT_S = 500.0


@pytest.fixture(scope="module")
def main_branch() -> Upstream:
    (upstream,) = (each for each in load_lock(REPOSITORY) if each.name == "megatron-main")
    return upstream


def test_series_applies_and_survives_the_round_trip() -> None:
    result = run_script("apply", "--check", "--only", "megatron-main", timeout=LIMIT_S)
    assert result.status == 0, result.output
    assert "patches apply exactly and export unchanged" in result.output


@pytest.fixture(scope="module")
def checkout(main_branch: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as users have it, patched, with what a CPU needs."""
    folder = tmp_path_factory.mktemp("checkout") / "Megatron-LM"
    fetch.unpack(main_branch, folder)
    before = contents(folder)
    target = ["apply", "--target", str(folder)]
    # There and back, and there again.
    for options in (["--cpu"], ["--reverse"], ["--cpu"]):
        result = run_script(*target, *options, timeout=LIMIT_S)
        assert result.status == 0, result.output
        assert "warning" not in result.output
        if options == ["--reverse"]:
            assert contents(folder) == before
    assert f"series for {main_branch.label}: " in result.output
    return folder


def test_sums_are_the_same_to_the_last_bit(checkout: Path, run_dir: Path) -> None:
    output = _train(checkout, run_dir)
    assert "largest difference of the loss over 6 steps: 0.0; final parameters: the same" in output


def test_servers_that_keep_the_optimizer_update_alike(checkout: Path, run_dir: Path) -> None:
    """scripts/train.py holds them to the distributed optimizer's losses."""
    output = _train(checkout, run_dir, "--optimizer", "servers")
    assert "the mean of the last ten differs by 0.00%" in output


def _train(checkout: Path, folder: Path, *options: str) -> str:
    """Two ranks, through servers and without; what scripts/train.py says of both."""
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
