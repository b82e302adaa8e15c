"""The same script, unchanged, under torchrun and under Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.ray_failures.cases import ENVIRONMENT
from bench.ray_failures.script import SCRIPT
from megatron_byteps_ray.job import Job, record_of_steps
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings

LIMIT_S = 500.0


def _seen(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_script_runs_in_both_modes(pool: Pool, run_dir: Path) -> None:
    script = run_dir / "script.py"
    script.write_text(SCRIPT)
    (run_dir / "ray").mkdir()
    (run_dir / "local").mkdir()
    settings = Settings(
        entry=str(script),
        arguments=(str(run_dir / "ray"), "--flag"),
        folder=run_dir / "job",
        environment=ENVIRONMENT,
    )
    events: list[Any] = []
    Job(settings, events.append, pool).run()
    command = [sys.executable, "-m", "megatron_byteps_ray", "--mode", "local", "--ranks", "2"]
    run = subprocess.run(
        [*command, str(script), "--", str(run_dir / "local"), "--flag"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ours, torchrun = _seen(run_dir / "ray"), _seen(run_dir / "local")
    assert ours[0].pop("arguments") == [str(run_dir / "ray"), "--flag"]
    assert torchrun[0].pop("arguments") == [str(run_dir / "local"), "--flag"]
    assert ours[0] == torchrun[0]
    for rank, seen in enumerate(ours):
        assert seen["sum"] == [9.0, 18.0, 27.0, 36.0]
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("2", "2")
    steps = record_of_steps(run_dir / "job")
    assert [(s["step"], s["tokens"], s["values"]) for s in steps] == [
        (n, 4, {"total": 30.0 * n}) for n in (1, 2, 3)
    ]
    assert events[-1]["event"] == "done"
