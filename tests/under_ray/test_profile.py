"""Some steps of some ranks, as torch and BytePS see them, in one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.ray_failures.cases import ENVIRONMENT, MODEL
from bench.ray_failures.script import SCRIPT
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.profiling import Profile
from megatron_byteps_ray.settings import Settings
from megatron_byteps_ray.traces import merge

LIMIT_S = 500.0
Event = dict[str, Any]


class Merged:
    """The events of a file, by the titles of the processes that they are of."""

    def __init__(self, file: Path) -> None:
        events = json.loads(file.read_text())["traceEvents"]
        named = [event for event in events if event["name"] == "process_name"]
        titles = {event["pid"]: event["args"]["name"] for event in named}
        assert len(titles) == len(named), "two processes have one number"
        self.of: dict[str, list[Event]] = {}
        for event in events:
            if event["ph"] == "X":
                self.of.setdefault(titles.get(event["pid"], "?").split(":")[0], []).append(event)

    def span(self, title: str) -> tuple[float, float]:
        events = self.of[title]
        return min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)

    def rounds(self, title: str) -> set[int]:
        return {event["args"]["round"] for event in self.of[title]}


def test_a_job_under_ray(pool: Pool, settings: Settings, run_dir: Path) -> None:
    profile = Profile(folder=run_dir / "profile", ranks=(1,), first=3, last=5)
    job = replace(
        settings,
        arguments=(*MODEL, "--train-iters", "7"),
        folder=run_dir / "job",
        profile=profile,
    )
    Job(job, lambda event: None, pool).run()
    merged = Merged(profile.merge())
    assert {"torch, rank 1", "worker 1", "server 0"} <= set(merged.of)
    assert not {"torch, rank 0", "worker 0"} & set(merged.of)
    names = {event["name"] for event in merged.of["torch, rank 1"]}
    assert {"aten::bmm", "BmmBackward0"} <= names
    assert {event["name"] for event in merged.of["worker 1"]} >= {"push", "pull"}
    # Steps 3 to 5 are rounds 2 to 4; torch saw what BytePS did, at the same time.
    assert merged.rounds("worker 1") == merged.rounds("server 0") == {2, 3, 4}
    (begin, end), (first, last) = merged.span("torch, rank 1"), merged.span("worker 1")
    assert begin <= first <= last <= end


def test_a_script_of_any_kind_under_torchrun(run_dir: Path) -> None:
    script = run_dir / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_ray", "--mode", "local"]
    command += ["--ranks", "2", "--profile-folder", str(run_dir / "profile")]
    command += ["--profile-first", "2", "--profile-last", "3", str(script), "--", str(run_dir)]
    run = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "profile: " in run.stdout, run.stdout + run.stderr
    merged = Merged(run_dir / "profile" / "profile.json")
    assert {"torch, rank 0", "torch, rank 1", "worker 0", "worker 1", "server 0"} <= set(merged.of)
    assert merged.rounds("worker 0") == merged.rounds("worker 1") == {1, 2}


def test_bad_profiles_are_refused(tmp_path: Path) -> None:
    for values in ({"first": 1}, {"first": 5, "last": 4}, {"ranks": (-1,)}):
        with pytest.raises(ValueError, match=r"must be 2 or more|numbers from 0"):
            Profile(folder=tmp_path, **values)
    with pytest.raises(ValueError, match="rank 2 cannot be profiled: there are 2 ranks"):
        Settings(entry="a:b", profile=Profile(folder=tmp_path, ranks=(2,)))
    with pytest.raises(ValueError, match="no rank has left a profile"):
        Profile(folder=tmp_path).merge()
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is no timeline of BytePS or torch"):
        merge([other])
    command = [sys.executable, "-m", "megatron_byteps_ray", "--profile-ranks", "0", "a.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 2 and "--profile-ranks needs --profile-folder" in run.stderr
