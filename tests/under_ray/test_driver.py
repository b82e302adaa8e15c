"""A driver that is killed is started again, and its job goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray

from bench.ray_failures.cases import ENVIRONMENT, MODEL, SAVE_EVERY, STEPS, STRIKE, Case, Runner
from megatron_byteps_ray.job import record_of_steps
from megatron_byteps_ray.pool import Pool
from tests.layouts.under_ray.pools import ROOT

LIMIT_S = 500.0


def test_a_driver_is_started_again(pool: Pool, runner: Runner, run_dir: Path) -> None:
    del pool  # of whose cluster the job takes the rest
    folder = run_dir / "job"
    hold = {"incarnation": 0, "rank": 0, "when": STRIKE, "what": f"hold:{run_dir}/never"}
    variables = {**ENVIRONMENT, "SCRIPTED_FAULTS": json.dumps([hold])}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_ray", "--folder", str(folder)]
    command += ["--address", ray.get_runtime_context().gcs_address]
    command += ["--cpus-per-rank", "0.5", "--preload", "pretrain_dpu_gpt"]
    for path in ("build/Megatron-LM", ".", "tests", "scripts"):
        command += ["--python-path", str(ROOT / path)]
    for name, value in variables.items():
        command += ["--environment", f"{name}={value}"]
    entry = ["bench.ray_failures.faulty_gpt:main", "--", *MODEL, "--train-iters", str(STEPS)]
    entry += ["--save", str(run_dir / "saved"), "--save-interval", str(SAVE_EVERY)]
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    with (run_dir / "driver.log").open("wb") as log:
        first = subprocess.Popen([*command, *entry], env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + LIMIT_S
            while len(record_of_steps(folder)) < STRIKE - 1:
                assert first.poll() is None, "the driver ended by itself"
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.1)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        state = json.loads((folder / "job.json").read_text())
        assert (state["state"], state["incarnation"]) == ("running", 0)
        again = [*command, "--resume", *entry]
        subprocess.run(again, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=True)
    state = json.loads((folder / "job.json").read_text())
    assert (state["state"], state["incarnation"], state["restarts"]) == ("done", 1, 0)
    steps = record_of_steps(folder)
    numbers = {n: [s["step"] for s in steps if s["incarnation"] == n] for n in (0, 1)}
    assert numbers[0] == list(range(1, STRIKE))
    # From the last checkpoint.
    assert numbers[1] == list(range(SAVE_EVERY + 1, STEPS + 1))
    whole = runner.uninterrupted(Case(title="")).losses
    assert all([step["values"]["lm loss"]] == whole[step["step"]] for step in steps)
