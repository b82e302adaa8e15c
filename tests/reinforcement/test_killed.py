"""A process of a run is killed, and the run goes on from its last checkpoint by itself; a run whose
vLLM takes no weights ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_byteps_rl.__main__ import LATEST
from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_report, rl_task
from scripts.trainkit.rl_settings import EXTENSION, Settings

STEPS = 4
LIMIT_S = 1500.0


def processes(title: str, folder: Path) -> list[int]:
    """Those of this name that belong to the run in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "cmdline").read_bytes().decode(errors="replace")
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if name.startswith(title) and f"={folder}/steps.jsonl\0".encode() in variables:
            found.append(int(process.name))
    return found


def settings_of(model: Path, folder: Path) -> Settings:
    made = Settings(
        model=model,
        questions=rl_task.write_questions(folder / "sums.parquet"),
        folder=folder / "run",
        steps=STEPS,
        save_every=1,
    )
    made.folder.mkdir()
    return made


def start(settings: Settings, overrides: list[str], *arguments: str) -> Spawned:
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_rl", *arguments]
    environment = {**os.environ, **settings.environment(), "BYTEPS_EMBEDDED_SERVERS": "1"}
    return Spawned("verl", [*command, *overrides], environment, settings.folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("ray::WorkerDict", "WorkerDict"),
        pytest.param("VLLM::EngineCore", None, marks=pytest.mark.thorough),
    ],
)
def test_the_run_goes_on(title: str, named: str | None, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    before = set(os.listdir("/dev/shm"))
    run = start(settings, settings.overrides(), "--restarts", "1")
    saved = settings.folder / "checkpoints" / LATEST
    try:
        deadline = time.monotonic() + LIMIT_S
        # verl writes a step's metrics after its checkpoint.
        while not rl_report.read_steps(settings.folder):
            assert run.running and time.monotonic() < deadline, last_lines(run.log, 80)
            time.sleep(0.2)
        assert saved.exists(), last_lines(run.log, 80)
        victims = processes(title, settings.folder)
        assert len(victims) == 2, victims
        os.kill(victims[1], signal.SIGKILL)
        run.wait(deadline - time.monotonic())
    finally:
        end_all([run], 60.0)
    assert run.status == 0, last_lines(run.log, 80)
    again = re.search(r"again from step (\d+)", run.text)
    assert again is not None, last_lines(run.log, 80)
    if named is not None:
        assert f"actor {named} " in run.text and f"(process {victims[1]}) died" in run.text
    # Of both attempts; verl writes no metrics of a step that ended after its checkpoint.
    steps = {step.number for step in rl_report.read_steps(settings.folder)}
    assert steps | {int(again[1])} == set(range(1, STEPS + 1))
    assert (settings.folder / "steps.1.jsonl").exists()
    assert saved.read_text().strip() == str(STEPS)
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}
    assert not left


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_weights_that_vllm_does_not_take_end_the_run(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    fails = "tests.reinforcement.no_weights.Extension"
    overrides = [one.replace(EXTENSION, fails) for one in settings.overrides()]
    assert overrides != settings.overrides()
    run = start(settings, overrides)
    try:
        run.wait(800.0)
    finally:
        end_all([run], 60.0)
    assert run.status == 1
    wanted = "WeightUpdateError: vLLM did not take the weights of training"
    assert wanted in run.text and "no place for these weights" in run.text, last_lines(run.log, 80)
