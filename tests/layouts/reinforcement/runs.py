"""Runs a layout both ways and compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_byteps_rl import memory
from tests.layouts.job import Job
from tests.layouts.platforms import CPU, Platform

from .rows import Layout

PROGRAMS = "tests.layouts.reinforcement.rank"
ROWS = 8
"""Prompts of each data-parallel rank; see rank.PROMPTS."""
STEPS = 2
# Training computes in bf16, the rollout in fp32: up to 0.08 was seen.
ROUNDING = 0.1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one layout and algorithm."""

    equal: Mapping[str, bool]
    """By role: whether both gave all ranks the same parameters, to the last bit."""
    apart: float
    """Largest difference of a log-probability between rollout and training."""
    sent_bytes: int | None
    """Of all ranks to others in one reshard; None where the rollout takes whole tensors."""

    rewards_apart: float | None
    """Largest difference of a reward between its model in this layout and the whole one, in fp32;
    None where a rule gives the reward."""

    peaks: Mapping[str, int]
    """Bytes of the GPU that took the most, by phase, through BytePS; empty on CPUs."""

    def problems(self) -> list[str]:
        """What is not as it must be."""
        wrong = {f"{role}: other parameters": not same for role, same in self.equal.items()}
        text = f"rollout and training differ by {self.apart:.3f}"
        wrong[text] = not self.apart < ROUNDING
        if self.rewards_apart is not None:
            text = f"rewards of the model in parts and of the whole one: {self.rewards_apart:.3f}"
            wrong[text] = not self.rewards_apart < ROUNDING
        return [text for text, is_so in wrong.items() if is_so]


def large_model(base: Path, folder: Path) -> Path:
    """Write a model of 100 million parameters that was not taught, with the base model's tokenizer.

    Compared with it, CUDA's libraries take little of a GPU's memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(base)
    config.hidden_size, config.intermediate_size = 1024, 2816
    config.num_hidden_layers = 8
    config.num_attention_heads = config.num_key_value_heads = 16
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def _run(
    folder: Path,
    layout: Layout,
    algorithm: str,
    model: Path,
    reward: Path,
    *,
    byteps: bool,
    platform: Platform,
    first_gpu: int,
) -> list[Any]:
    settings: dict[str, Any] = {"device": platform.name, "algorithm": algorithm}
    settings |= {"through_byteps": byteps, "ranks": layout.ranks}
    settings |= {"tensor": layout.tp, "pipeline": layout.pp, "model": model}
    # One micro-batch of each data-parallel rank.
    settings |= {"prompts": ROWS, "responses": layout.dp * layout.samples, "updates": 1}
    settings |= {"offload": layout.offload and byteps}
    if algorithm == "ppo":
        settings |= {"reward": "megatron", "reward_model": reward}
    if layout.resharded is not None:
        settings |= {"rollout": "megatron", "rollout_tensor": layout.resharded}
    job = Job(
        folder=folder,
        program=f"{PROGRAMS}:train",
        ranks=layout.ranks,
        settings={"settings": settings, "samples": layout.samples},
        platform=platform,
        first_gpu=first_gpu,
    )
    job.run()
    return job.results()


def compare(
    folder: Path,
    layout: Layout,
    algorithm: str,
    model: Path,
    reward: Path,
    platform: Platform = CPU,
    first_gpu: int = 0,
) -> Outcome:
    """Train some steps through BytePS and through all-reduce.

    Args:
        folder: for the ranks' logs and results.
        layout: of all models.
        algorithm: GRPO's reward is the rule's, PPO's that of a model.
        model: folder of the base model.
        reward: folder of the reward's model.
        platform: of the ranks.
        first_gpu: of rank 0, where ranks have GPUs.

    Raises:
        JobFailed: a rank failed; the text has its log.
        AssertionError: a sum did not go the way it should have.
    """

    def way(name: str, *, byteps: bool) -> list[Any]:
        return _run(
            folder / name,
            layout,
            algorithm,
            model,
            reward,
            byteps=byteps,
            platform=platform,
            first_gpu=first_gpu,
        )

    ours, theirs = way("byteps", byteps=True), way("all-reduce", byteps=False)
    roles = list(ours[0]["checksums"])
    for one, other in zip(ours, theirs, strict=True):
        names = [name for role in roles for name in one["names"][role]]
        for role in roles:
            assert bool(one["names"][role]) == (layout.dp > 1), f"{role}: {names}"
        assert len(set(names)) == len(names), f"two sums of one name: {names}"
        assert sorted(one["summed"]) == sorted(names * STEPS), "BytePS did not make every sum"
        assert not other["summed"], "a sum of the other run went through BytePS"
    apart = [value for one in ours for value in one["apart"] if value is not None]
    pairs = list(zip(ours, theirs, strict=True))
    for one in ours:
        held = one["held_bytes"]
        assert (held["rollout"] == 0) == layout.offload, f"buffers take {held}"
        assert held["training"] > 0, f"buffers take {held}"
    scored = [step for one in ours for step in one["scored"] if step is not None]
    assert bool(scored) == (algorithm == "ppo"), "rewards of a model, or none"
    costs = [one["reshard"] for one in ours]
    assert all((cost is None) == (layout.resharded is None) for cost in costs), costs
    return Outcome(
        equal={
            role: all(one["checksums"][role] == other["checksums"][role] for one, other in pairs)
            for role in roles
        },
        apart=max(apart),
        rewards_apart=max((_apart(step) for step in scored), default=None),
        sent_bytes=None if None in costs else sum(cost["sent_bytes"] for cost in costs),
        peaks=memory.most([one["peaks"] for one in ours]),
    )


def _apart(scored: Mapping[str, Any]) -> float:
    return float((scored["rewards"] - scored["whole"]).abs().max())
