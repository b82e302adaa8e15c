#!/usr/bin/env python3
"""Teaches a tiny model to add, by reinforcement learning through verl's PPO trainer.

Actor, critic (with PPO), reference and rollout are verl's, its models Megatron's. Gradients of
actor and critic are summed by BytePS: a scheduler and servers start next to the ranks. With
--compare the same job runs through all-reduce too. With --reward megatron the reward is a model:
trained first, by BytePS too, and then frozen in Megatron's workers, in the layout of the others.
With --device cuda each rank has a GPU of its own.

Exit status: 0 right responses rose as they must, and both ways agree; 1 not, or the job failed; 2
bad usage.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_byteps_ray.traces import merge
from scripts.children import Spawned, end_all, last_lines
from scripts.progress import Progress
from scripts.trainkit import rl_report
from scripts.trainkit.arguments import positive
from scripts.trainkit.job import JobError
from scripts.trainkit.rl_report import Outcome

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("grpo", "ppo")
DEVICES = ("cpu", "cuda")
ROLLOUTS = ("transformers", "megatron")
REWARDS = ("rule", "megatron")
STEPS = 30
RISE = 0.25
"""In a whole run the part of right responses, by the rule, rises by this much at least, from the
first steps to the last. It is the reward, unless a model gives that."""
REWARD_STEPS = 150
"""Of the training of the reward's model."""
LIMIT_S = 3600.0
_POLL_S = 0.5
_GRACE_S = 20.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--algorithm", choices=ALGORITHMS, default="grpo", help="default: grpo")
    add("--device", choices=DEVICES, default="cpu", help="of the ranks (default: cpu)")
    add("--steps", type=positive, default=STEPS, help=f"default: {STEPS}")
    add(
        "--workers", type=positive, help="ranks (default: 2, on GPUs as many as there are, up to 2)"
    )
    add("--tensor", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    add("--pipeline", type=positive, default=1, help="pipeline stages (default: 1)")
    add("--rollout", choices=ROLLOUTS, default="transformers", help="default: transformers")
    add("--rollout-tensor", type=positive, default=1, help="its tensor-parallel ranks (default: 1)")
    add("--reward", choices=REWARDS, default="rule", help="who gives it (default: rule)")
    add("--servers", type=positive, default=1, help="BytePS servers (default: 1)")
    add("--compare", action="store_true", help="train through all-reduce too")
    add("--budget", type=float, metavar="S", help="begin no other job after so many seconds")
    steps = ("FIRST", "LAST")
    add("--profile", type=positive, nargs=2, metavar=steps, help="steps to record, for Perfetto")
    add("--profile-ranks", type=int, nargs="+", default=[0], metavar="RANK", help="default: 0")
    add("--seed", type=positive, default=1, help="default: 1")
    add("--rise", type=float, default=RISE, help=f"of right responses (default: {RISE})")
    add("--out", type=Path, default=ROOT / "build" / "rl", help="default: build/rl")
    add("--data-cache", type=Path, default=ROOT / "build" / "data", help="default: build/data")
    add("overrides", nargs="*", metavar="-- NAME=VALUE", help="of verl's configuration")
    options = parser.parse_args(arguments)
    if options.workers is None:
        options.workers = _default_workers(options.device)
    if options.workers % (options.tensor * options.pipeline):
        parser.error(
            f"--workers {options.workers} is no multiple of --tensor {options.tensor} times "
            f"--pipeline {options.pipeline}"
        )
    if options.rollout_tensor > 1 and options.rollout != "megatron":
        parser.error(f"--rollout-tensor {options.rollout_tensor} needs --rollout megatron")
    if options.workers % options.rollout_tensor:
        parser.error(
            f"--workers {options.workers} is no multiple of --rollout-tensor "
            f"{options.rollout_tensor}"
        )
    if options.profile and not options.profile[0] <= options.profile[1] <= options.steps:
        parser.error(
            f"--profile {options.profile[0]} {options.profile[1]}: the steps are 1 to "
            f"{options.steps}"
        )
    if wrong := [rank for rank in options.profile_ranks if not 0 <= rank < options.workers]:
        parser.error(f"--profile-ranks {wrong[0]}: the ranks are 0 to {options.workers - 1}")
    return options


def _default_workers(device: str) -> int:
    """As many as have a place, and no more than two."""
    if device == "cpu":
        return 2
    import torch

    return max(1, min(2, torch.cuda.device_count()))


def environment(servers: int, ranks: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    values = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "PYTHONWARNINGS": "ignore"}
    # All files are here: nothing is to be looked up.
    values |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    values |= {"BYTEPS_EMBEDDED_SERVERS": str(servers)}
    return {k: v for k, v in values.items() if k not in os.environ or k.startswith("BYTEPS")}


def make_model(options: argparse.Namespace) -> Path:
    """The base model's folder."""
    from megatron_byteps_rl import task

    with Progress("rl") as bar:
        bar.update("the base model is taught to add")
        return task.make_model(options.data_cache / "rl-base", options.seed)


def make_reward(options: argparse.Namespace, base: Path) -> Path:
    """The folder of the reward's model, trained or found there.

    Raises:
        JobError: its training failed; the text has the end of its log.
    """
    folder = options.data_cache / f"rl-reward-{options.seed}-{options.workers}"
    note = folder / "reward.json"
    if note.is_file() and _is_for(note, base):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"reward's model through BytePS: {options.workers} ranks", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(options.workers),
        "-m",
        "megatron_byteps_rl.reward_training",
    ]
    command += ["--device", options.device, "--seed", str(options.seed)]
    command += ["--model", str(base), "--out", str(folder)]
    command += ["--steps", str(REWARD_STEPS)]
    _run("reward", command, options, folder, REWARD_STEPS, _shower_of_losses)
    accuracy = json.loads(note.read_text(encoding="utf-8"))["accuracy"]
    print(f"reward's model: {accuracy:.3f} of fresh answers told apart", flush=True)
    return folder


def _is_for(note: Path, base: Path) -> bool:
    """Whether the model next to this note was trained as it would be now, from this base model."""
    bases = [(folder / "base.json").read_text(encoding="utf-8") for folder in (note.parent, base)]
    steps = json.loads(note.read_text(encoding="utf-8"))["steps"]
    return bases[0] == bases[1] and steps == REWARD_STEPS


def train(
    options: argparse.Namespace, model: Path, reward: Path | None, *, backend: str
) -> Outcome:
    """One run through ``BytePS`` or ``all-reduce``.

    Raises:
        JobError: it failed; the text has the end of its log.
    """
    print(f"{options.algorithm} through {backend}: {options.workers} ranks", flush=True)
    folder = options.out / f"{options.algorithm}-{backend.lower()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_rl"]
    command += ["--device", options.device]
    command += ["--algorithm", options.algorithm, "--ranks", str(options.workers)]
    command += ["--tensor", str(options.tensor), "--pipeline", str(options.pipeline)]
    command += ["--steps", str(options.steps), "--seed", str(options.seed)]
    command += ["--rollout", options.rollout, "--rollout-tensor", str(options.rollout_tensor)]
    command += ["--model", str(model), "--out", str(folder)]
    command += ["--reward-model", str(reward)] if reward else []
    if options.profile:
        command += ["--profile", *map(str, options.profile)]
        command += ["--profile-ranks", *map(str, options.profile_ranks)]
    command += ["--all-reduce"] if backend != "BytePS" else []
    command += ["--", *options.overrides]
    _run("verl", command, options, folder, options.steps, _shower)
    if not (folder / "end.json").is_file():
        raise JobError(f"the job left no end.json\n{last_lines(folder / 'verl.log', 60)}")
    if options.profile:
        _merge_profile(folder)
    return rl_report.read(folder, backend)


def _run(
    title: str,
    command: Sequence[str],
    options: argparse.Namespace,
    folder: Path,
    steps: int,
    shower: Callable[[Progress, int], Callable[[Path], None]],
) -> None:
    """Run to the end, and show the steps that come into ``folder`` meanwhile.

    Raises:
        JobError: it failed; the text has the end of its log.
    """
    from megatron_byteps_rl.devices import ENVIRONMENTS

    variables = {**os.environ, **environment(options.servers, options.workers)}
    variables |= ENVIRONMENTS[options.device]
    process = Spawned(title, command, variables, folder, cwd=Path.cwd())
    deadline = time.monotonic() + LIMIT_S
    try:
        with Progress("rl", total=steps) as bar:
            bar.update("the ranks start, and import torch, Megatron and verl")
            show = shower(bar, steps)
            while process.running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                show(folder)
            show(folder)
    finally:
        end_all([process], _GRACE_S)
    end = "was ended after an hour" if time.monotonic() >= deadline else "failed"
    if process.status != 0:
        log = last_lines(folder / f"{title}.log", 60)
        raise JobError(f"the job {end} (exit status {process.status})\n{log}")


def _merge_profile(folder: Path) -> None:
    files = sorted((folder / "profile").glob("*.json*"))
    target = folder / "profile.json"
    target.write_text(json.dumps(merge(files)), encoding="utf-8")
    print(f"profile of {len(files)} files, for https://ui.perfetto.dev: {target}", flush=True)


def _shower_of_losses(bar: Progress, steps: int) -> Callable[[Path], None]:
    """A function that says how far the training of the reward's model is."""

    def show(folder: Path) -> None:
        file = folder / "steps.jsonl"
        if file.is_file():
            done = file.read_text(encoding="utf-8").count("\n")
            bar.update("training of the reward's model", done=done)

    return show


def _shower(bar: Progress, steps: int) -> Callable[[Path], None]:
    """A function that prints the steps that it has not printed yet."""
    shown = 0

    def show(folder: Path) -> None:
        nonlocal shown
        seen = rl_report.read_steps(folder)
        for step in seen[shown:]:
            bar.update("training", done=step.number)
            line = (
                f"  step {step.number:3d}/{steps}  reward {step.reward:.3f}  "
                f"right {step.accuracy:.3f}  KL {step.kl:+.4f}  "
                f"rollout and training differ by {step.mismatch:.4f}"
            )
            if (cost := step.reshard) is not None:
                line += f"  reshard {cost.seconds * 1e3:.1f} ms, {cost.sent_bytes / 1e6:.3f} MB"
            bar.say(line, stream=sys.stdout)
        shown = len(seen)

    return show


def check(outcome: Outcome, rise: float) -> bool:
    """Whether the part of right responses rose as far as it has to."""
    print(f"reward: {outcome.first_reward:.3f} -> {outcome.last_reward:.3f}")
    first, last = outcome.first_accuracy, outcome.last_accuracy
    rose = last - first >= rise
    word = "rose" if rose else "did NOT rise"
    print(f"right responses: {word} by {rise:.2f} or more ({first:.3f} -> {last:.3f})")
    return rose


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("megatron_byteps_rl") is None:
        print("error: megatron_byteps_rl is not installed: use `make rl`", file=sys.stderr)
        return 1
    from megatron_byteps_rl.devices import check as check_device

    try:
        check_device(options.device, options.workers)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    deadline = math.inf if options.budget is None else time.monotonic() + options.budget
    model = make_model(options)
    reward = make_reward(options, model) if options.reward == "megatron" else None
    backends = ["BytePS", "all-reduce"] if options.compare else ["BytePS"]
    outcomes: list[Outcome] = []
    for backend in backends:
        if outcomes and time.monotonic() > deadline:
            print(f"not run, since --budget is used up: {backend}", file=sys.stderr)
            break
        outcomes.append(train(options, model, reward, backend=backend))
    picture = options.out / f"{options.algorithm}.png"
    rl_report.draw(outcomes, picture, f"{options.algorithm.upper()} of a tiny Llama on sums")
    print(f"\n{rl_report.samples(outcomes[0])}\n\n{rl_report.table(outcomes)}\n")
    if peaks := rl_report.memory(outcomes):
        print(f"{peaks}\n")
    good = check(outcomes[0], options.rise)
    if len(outcomes) < len(backends):
        good = False
    elif options.compare:
        same = rl_report.same(*outcomes)
        print(f"BytePS and all-reduce: {'the same bits' if same else 'DIFFERENT'}")
        good = good and (same or options.workers > 2)
    print(f"picture: {picture}\nlogs, metrics and samples: {options.out}")
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the ranks were ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
