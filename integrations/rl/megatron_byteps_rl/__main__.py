"""Trains by verl on this machine's CPU: ``python -m megatron_byteps_rl --help``."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cpu_environment import ENVIRONMENT
from .settings import ALGORITHMS, ROLLOUTS, Settings


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_byteps_rl", description=__doc__)
    add = parser.add_argument
    add("--algorithm", choices=sorted(ALGORITHMS), default="grpo", help="default: grpo")
    add("--all-reduce", action="store_true", help="sum gradients by all-reduce, not by BytePS")
    add("--ranks", type=int, default=2, help="default: 2")
    add("--tensor", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    add("--pipeline", type=int, default=1, help="pipeline stages (default: 1)")
    add("--rollout", choices=sorted(ROLLOUTS), default="transformers", help="default: transformers")
    add("--rollout-tensor", type=int, default=1, help="its tensor-parallel ranks (default: 1)")
    add("--reward-model", type=Path, help="folder of a model that gives the reward")
    add("--profile", type=int, nargs=2, metavar=("FIRST", "LAST"), help="steps to profile")
    add("--profile-ranks", type=int, nargs="+", default=[0], help="default: 0")
    add("--steps", type=int, default=30, help="default: 30")
    add("--seed", type=int, default=1, help="default: 1")
    add("--model", type=Path, required=True, help="folder of a Hugging Face model")
    add("--out", type=Path, required=True, help="folder for steps.jsonl, samples and end.json")
    add("overrides", nargs="*", metavar="-- NAME=VALUE", help="of verl's configuration")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Train, and write what came of it."""
    settings = Settings(
        algorithm=options.algorithm,
        through_byteps=not options.all_reduce,
        ranks=options.ranks,
        tensor=options.tensor,
        pipeline=options.pipeline,
        rollout=options.rollout,
        rollout_tensor=options.rollout_tensor,
        reward="megatron" if options.reward_model else "rule",
        reward_model=options.reward_model.resolve() if options.reward_model else None,
        profile=tuple(options.profile) if options.profile else None,
        profile_ranks=tuple(options.profile_ranks),
        steps=options.steps,
        seed=options.seed,
        model=options.model.resolve(),
        folder=options.out.resolve(),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT | settings.trace_environment())
    # Ray would give its workers a nice value of 15.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(settings.folder / "steps.jsonl")
    import ray

    from . import trainer

    config = trainer.compose([*settings.overrides(), *options.overrides])
    with tempfile.TemporaryDirectory(prefix="verl-ray-") as folder:
        ray.init(
            num_cpus=settings.ranks + 1,
            include_dashboard=False,
            log_to_driver=True,
            _temp_dir=folder,
            runtime_env={"env_vars": ENVIRONMENT | _inherited()},
        )
        try:
            made = trainer.make_trainer(config)
            made.fit()
            end = {"parameters_sha256": trainer.checksums(made)}
            made.actor_rollout_wg.leave()
        finally:
            ray.shutdown()
    (settings.folder / "end.json").write_text(json.dumps(end) + "\n", encoding="utf-8")


def _inherited() -> dict[str, str]:
    """What workers are told of this process's environment."""
    prefixes = ("BYTEPS_", "DMLC_", "GLOO_", "OMP_", "PYTHONWARNINGS", "HF_", "RAY_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


if __name__ == "__main__":
    run(parse(None))
