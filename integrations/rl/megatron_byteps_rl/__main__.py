"""Trains by verl on this machine: ``python -m megatron_byteps_rl --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .devices import ENVIRONMENTS, check
from .settings import ALGORITHMS, ROLLOUTS, Settings

_OBJECT_STORE_BYTES = 100 << 20  # batches of short sequences go through it


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_byteps_rl", description=__doc__)
    add = parser.add_argument
    add("--algorithm", choices=sorted(ALGORITHMS), default="grpo", help="default: grpo")
    add("--device", choices=sorted(ENVIRONMENTS), default="cpu", help="of the ranks (default: cpu)")
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


def settings_of(options: argparse.Namespace) -> Settings:
    """The job of a command line.

    Raises:
        ValueError: it cannot be, or not on this machine.
    """
    check(options.device, options.ranks)
    return Settings(
        algorithm=options.algorithm,
        device=options.device,
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


def run(settings: Settings, overrides: Sequence[str]) -> None:
    """Train, and write what came of it."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    environment = dict(ENVIRONMENTS[settings.device])
    os.environ.update(environment | settings.trace_environment())
    # Ray would give its workers a nice value of 15.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(settings.folder / "steps.jsonl")
    import ray

    from . import trainer

    config = trainer.compose([*settings.overrides(), *overrides])
    with tempfile.TemporaryDirectory(prefix="verl-ray-") as folder:
        ray.init(
            num_cpus=settings.ranks + 1,
            num_gpus=0 if settings.device == "cpu" else settings.ranks,
            include_dashboard=False,
            log_to_driver=True,
            object_store_memory=_OBJECT_STORE_BYTES,
            # Also on a machine that has no network.
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            runtime_env={"env_vars": environment | _inherited()},
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
    prefixes = ("BYTEPS_", "DMLC_", "GLOO_", "NCCL_", "OMP_", "PYTHONWARNINGS", "HF_", "RAY_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def main() -> None:
    options = parse(None)
    try:
        settings = settings_of(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    run(settings, options.overrides)


if __name__ == "__main__":
    main()
