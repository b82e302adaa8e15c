"""scripts/rl.py: a short run of PPO with all roles, under Ray and verl's trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.rl import REWARD_STEPS
from scripts.trainkit import rl_report
from tests.layouts.reinforcement import rewards

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0


def rl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "rl.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )


def test_ppo_of_two_steps_with_a_resharded_rollout_and_a_model_as_reward(
    tmp_path: Path, model: Path
) -> None:
    # The script finds a reward model where it would have written one.
    base = shutil.copytree(model, tmp_path / "data" / "rl-base")
    found = rewards.write(base, tmp_path / "data" / "rl-reward-1-2")
    (found / "reward.json").write_text(json.dumps({"steps": REWARD_STEPS, "accuracy": 1.0}))
    ran = rl(
        *("--algorithm", "ppo", "--steps", "2", "--rise", "-1", "--reward", "megatron"),
        *("--rollout", "megatron", "--rollout-tensor", "2"),
        *("--profile", "2", "2", "--profile-ranks", "0", "1"),
        *("--out", str(tmp_path / "out"), "--data-cache", str(tmp_path / "data")),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    folder = tmp_path / "out" / "ppo-byteps"
    outcome = rl_report.read(folder, "BytePS")
    assert [step.number for step in outcome.steps] == [1, 2]
    assert all(0 < step.accuracy < 1 and step.mismatch < 0.1 for step in outcome.steps)
    # Each rank got its half from itself, since it trains the whole.
    assert all(step.reshard and step.reshard.sent_bytes == 0 for step in outcome.steps)
    assert "reshard" in ran.stdout
    first, second = (e for e in metrics_of(folder) if "critic/score/mean" in e)
    assert "rollout/first_token_seconds" not in first
    # The reshard is a part of it.
    assert second["rollout/first_token_seconds"] > second["reshard/seconds"]
    assert len(outcome.before) == len(outcome.after) == 25
    # Both ranks have the same parameters, of which the critic's are others.
    actor, critic = outcome.checksums["actor"], outcome.checksums["critic"]
    assert len(set(actor)) == len(set(critic)) == 1 and len(actor) == 2
    assert actor[0] != critic[0]
    # The model gives the reward, and the rule says how many are right.
    assert all(step.reward != step.accuracy for step in outcome.steps)
    # It says when right responses did not become more.
    assert "right responses: rose" in ran.stdout and "3+3=" in ran.stdout
    assert (tmp_path / "out" / "ppo.png").is_file()
    _check_profile(folder / "profile.json")


def test_a_reward_model_that_learnt_too_little_is_an_error(tmp_path: Path, model: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "1", "-m", "megatron_byteps_rl.reward_training"),
            *("--steps", "1", "--model", str(model), "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ran.returncode != 0
    assert "of the answers apart, and needs 0.97: train it for more steps" in ran.stderr
    assert not (tmp_path / "out" / "reward.json").exists()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


def _check_profile(file: Path) -> None:
    """Both ranks' second step by verl's profiler, and BytePS's sums of it, at the same times."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    for rank in range(2):
        mine = {pid for pid, name in names.items() if name.startswith(f"torch, rank {rank}: ")}
        marks = [e for e in events if e["pid"] in mine and e.get("cat") == "user_annotation"]
        stages = {e["name"] for e in marks}
        assert stages >= {"rollout_generate", "reshard", "actor_update", "ref_compute_log_prob"}
        assert "reward_compute" in stages
        updates = [e for e in marks if e["name"] == "actor_update"]
        assert len(updates) == 1, updates
        begin, end = updates[0]["ts"], updates[0]["ts"] + updates[0]["dur"]
        worker = {pid for pid, name in names.items() if name == f"worker {rank}"}
        sums = [e for e in events if e["pid"] in worker and e.get("cat") == "partition"]
        during = [e for e in sums if e["ph"] == "b" and begin <= e["ts"] <= end]
        # Two updates of the actor; those of the critic came before.
        assert {e["args"]["round"] for e in during if "args" in e} == {2, 3}
    assert "server 0" in names.values()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "3", "--tensor", "2"], "--workers 3 is no multiple of --tensor 2"),
        (["--rollout-tensor", "2"], "--rollout-tensor 2 needs --rollout megatron"),
        (
            ["--rollout", "megatron", "--rollout-tensor", "3"],
            "--workers 2 is no multiple of --rollout-tensor 3",
        ),
        (["--profile", "3", "31"], "--profile 3 31: the steps are 1 to 30"),
        (["--profile-ranks", "2"], "--profile-ranks 2: the ranks are 0 to 1"),
        (["--algorithm", "sarsa"], "invalid choice: 'sarsa'"),
        (["--reward", "judge"], "invalid choice: 'judge'"),
    ],
)
def test_bad_usage(arguments: list[str], message: str) -> None:
    ran = rl(*arguments)
    assert ran.returncode == 2 and message in ran.stderr
