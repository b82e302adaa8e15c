#!/usr/bin/env python3
"""Teaches a tiny model to add, by reinforcement learning: verl's trainer, Megatron engine and vLLM.

With --model it trains another model, with questions in words. BytePS all-reduces the gradients of
actor and critic: a scheduler and servers start next to the ranks. With --compare the same job also
runs with all-reduce. With --device cuda each rank has its own GPU.

Exit status: 0 the reward rose as required; 1 it did not, or nothing was learnt, or the job failed;
2 bad usage.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.children import Spawned, end_all, last_lines
from scripts.progress import Progress, aligned
from scripts.trainkit.job import JobError, positive
from scripts.trainkit.rl_steps import LOG, Loss, Step, read_steps

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("grpo", "ppo")
DEVICES = ("cpu", "cuda")
MODES = ("sync", "colocate_async")
STEPS = 20
UPDATES = 2
"""Number of updates per step."""
LAYERS = 2
RISE = 0.2
"""Least increase of the mean reward in a whole run, from the first steps to the last. The reward
may stay the same in a shorter run, with adapters (which learn more slowly), or with a user's model.
"""
SETTINGS = (
    *("algorithm", "device", "mode", "steps", "save_every", "seed", "prompts", "responses"),
    *("tensor", "sequence_parallel", "pipeline", "virtual", "context", "expert", "rollout_tensor"),
    *("lora", "merge", "server_optimizer"),
)
"""Settings of a run that are options of the same names."""
NEEDED = ("verl", "vllm", "ray", "transfer_queue", "megatron.bridge")
LIMIT_S = 3600.0
_POLL_S = 0.5
_GRACE_S = 40.0
EDGE = 3
"""Number of steps at each end of a run whose mean reward counts."""
_SHOWN = 12
_WIDTH = 60
_DIGEST = re.compile(r"-[0-9a-f]{16}$")
"""Suffix of the folder's name of an unpacked model."""
_CHOSEN = re.compile(r"(BytePS[ \w]*?|reduce-scatter|all-reduce) {2,}.* yes\b(?!: a single rank)")
"""Line of the table of ``dpu_reduce:`` that names a bucket's backend, unless there is nothing to
reduce."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Prompt, and the model's response to it."""

    prompt: str
    response: str
    wanted: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a successful run."""

    backend: str
    steps: list[Step]
    before: list[Sample]
    """Samples of the first step."""
    after: list[Sample]
    """Samples of the last step."""
    backends: list[str]
    """Backend of each bucket of gradients, as logged by Megatron's ranks."""

    @property
    def first_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[:EDGE])

    @property
    def last_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[-EDGE:])


def _samples(file: Path) -> list[Sample]:
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        # A reward model's scores are only near 0 and 1, so this compares with 0.5.
        Sample(prompt=e["input"], response=e["output"], wanted=e["gts"], right=e["score"] > 0.5)
        for e in entries
    ]


def read(folder: Path, backend: str) -> Outcome:
    """Return the results of a complete run."""
    numbers = sorted(int(file.stem) for file in (folder / "samples").glob("*.jsonl"))
    before, after = (_samples(folder / "samples" / f"{n}.jsonl") for n in (numbers[0], numbers[-1]))
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    return Outcome(
        backend=backend,
        steps=read_steps(folder),
        before=before,
        after=after,
        backends=_CHOSEN.findall(log),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    lines = aligned(rows, left=len(rows[0])).splitlines()
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _end(text: str) -> str:
    """Return the last words of a text in a single line."""
    return " ".join(text.split())[-_WIDTH:]


def samples(outcome: Outcome) -> str:
    """Return a table of prompts with their responses in the first and last step, and how many were
    right.

    Prompts that both steps have come first. With few prompts per step there may be none.
    """
    steps = [
        {sample.prompt: sample for sample in of_step} for of_step in (outcome.before, outcome.after)
    ]
    prompts = sorted(set().union(*steps), key=lambda p: (-sum(p in step for step in steps), p))
    rows = [["prompt", "right", "before", "after"]]
    for prompt in prompts[:_SHOWN]:
        shown = [step.get(prompt) for step in steps]
        wanted = next(sample.wanted for sample in shown if sample)
        rows.append(
            [_end(prompt), wanted, *(_end(sample.response) if sample else "" for sample in shown)]
        )
    right = [
        f"{sum(s.right for s in of_step)} of {len(of_step)}"
        for of_step in (outcome.before, outcome.after)
    ]
    return _aligned([*rows, ["all", "", *right]])


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary table of ``make rl``."""
    rows = [
        ["backend", "first reward", "last reward", "last KL", "mismatch", "s/step"],
    ]
    for outcome in outcomes:
        rows.append(
            [
                outcome.backend,
                f"{outcome.first_reward:.3f}",
                f"{outcome.last_reward:.3f}",
                f"{outcome.steps[-1].kl:.4f}",
                f"{max(s.mismatch for s in outcome.steps):.4f}",
                f"{statistics.median(s.seconds for s in outcome.steps):.2f}",
            ]
        )
    return _aligned(rows)


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw reward and KL as a PNG."""
    # The import is here, because matplotlib takes a second, and a failed run does not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles: list[dict[str, Any]] = [
        {"linewidth": 3.5, "alpha": 0.45},
        {"linewidth": 1.0, "color": "black"},
    ]
    for outcome, style in zip(outcomes, styles, strict=False):
        numbers = [step.number for step in outcome.steps]
        upper.plot(numbers, [s.reward for s in outcome.steps], label=outcome.backend, **style)
        lower.plot(numbers, [s.kl for s in outcome.steps], label=outcome.backend, **style)
    upper.set_title(title)
    upper.set_ylabel("reward")
    upper.set_ylim(0, 1.02)
    lower.set_ylabel("KL from the reference")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--algorithm", choices=ALGORITHMS, default="grpo", help="default: grpo")
    add("--device", choices=DEVICES, default="cpu", help="of the ranks (default: cpu)")
    add("--mode", choices=MODES, default="sync", help="of verl's trainer (default: sync)")
    add("--steps", type=positive, default=STEPS, help=f"default: {STEPS}")
    add(
        "--workers", type=positive, help="ranks (default: 2, on GPUs as many as there are, up to 2)"
    )
    add("--tensor", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    add("--sequence-parallel", action="store_true", help="over the tensor-parallel ranks")
    add("--pipeline", type=positive, default=1, help="pipeline stages (default: 1)")
    add("--virtual", type=positive, default=1, help="parts of each stage (default: 1)")
    add("--context", type=positive, default=1, help="context-parallel ranks (default: 1)")
    add("--expert", type=positive, default=1, help="expert-parallel ranks (default: 1)")
    add("--rollout-tensor", type=positive, default=1, help="ranks of a vLLM (default: 1)")
    add("--model", metavar="PATH_OR_HUB_NAME", help="teach this one, of Hugging Face's")
    add("--layers", type=positive, default=LAYERS, help=f"of the tiny model (default: {LAYERS})")
    add("--experts", type=int, default=0, help="of each of its layers (default: 0)")
    add("--prompts", type=positive, default=16, help="of a step (default: 16)")
    add("--responses", type=positive, default=8, help="to each prompt (default: 8)")
    add("--reward-model", action="store_true", help="a tiny model scores, on a vLLM of its own")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters (default: 0, none)")
    add("--merge", action="store_true", help="adapters are merged for vLLM")
    add("--server-optimizer", action="store_true", help="the servers keep the optimizer")
    add("--servers", type=positive, default=1, help="BytePS servers (default: 1)")
    add("--compare", action="store_true", help="train through all-reduce too")
    add("--save-every", type=positive, default=5, metavar="STEPS", help="default: 5")
    add("--restarts", type=int, default=1, help="after a failure (default: 1)")
    add("--spares", type=int, help="warm processes for lost ranks (default: 1 to lose one)")
    add("--lose-actor-at", type=positive, metavar="STEP", help="kill the last rank's actor there")
    add("--seed", type=positive, default=1, help="default: 1")
    rises = (
        f"{RISE}; in fewer steps, with --lora or with --model 0; not judged in up to {EDGE} steps"
    )
    add("--rise", type=float, help=f"of the reward (default: {rises})")
    add("--out", type=Path, default=ROOT / "build" / "rl", help="default: build/rl")
    add("--data-cache", type=Path, default=ROOT / "build" / "data", help="default: build/data")
    add("overrides", nargs="*", metavar="-- NAME=VALUE", help="of verl's configuration")
    options = parser.parse_args(arguments)
    if options.workers is None:
        options.workers = _default_workers(options.device)
    if options.steps <= EDGE:
        if options.rise is not None:
            parser.error(
                f"--rise compares the first {EDGE} steps with the last: --steps {EDGE + 1}"
            )
    elif options.rise is None:
        whole = options.steps >= STEPS and not (options.lora or options.model)
        options.rise = RISE if whole else 0.0
    if options.workers % (options.tensor * options.pipeline * options.context):
        parser.error(
            f"--workers {options.workers} is no multiple of --tensor {options.tensor} times "
            f"--pipeline {options.pipeline} times --context {options.context}"
        )
    if options.workers % options.rollout_tensor:
        parser.error(
            f"--workers {options.workers} is no multiple of --rollout-tensor "
            f"{options.rollout_tensor}"
        )
    if options.prompts % UPDATES or options.prompts * options.responses % (
        UPDATES * options.workers
    ):
        parser.error(
            f"--responses {options.responses} to each of --prompts {options.prompts} cannot be "
            f"shared by {UPDATES} updates of {options.workers} ranks"
        )
    if options.spares is None:
        options.spares = int(options.lose_actor_at is not None)
    if options.lose_actor_at is not None and options.lose_actor_at >= options.steps:
        parser.error(f"--lose-actor-at {options.lose_actor_at} needs more --steps")
    if options.spares and options.mode != "sync":
        parser.error("--spares needs --mode sync")
    if options.reward_model and (options.model or options.experts):
        parser.error("--reward-model is made of the tiny model: without --model and --experts")
    if options.model and (options.layers, options.experts) != (LAYERS, 0):
        parser.error("--layers and --experts are of the tiny model: --model has its own")
    return options


def _default_workers(device: str) -> int:
    """Return the number of GPUs, at most 2; 2 on a CPU."""
    return 2 if device == "cpu" else max(1, min(2, _gpus()))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def train(options: argparse.Namespace, *, backend: str) -> Outcome:
    """Make a run through ``BytePS`` or through ``all-reduce``.

    Raises:
        JobError: the run failed; the text has the end of its log.
    """
    from scripts.trainkit import rl_task
    from scripts.trainkit.rl_settings import CHAT, SUMS, Settings

    task = CHAT if options.model else SUMS
    folder = (options.out / f"{options.algorithm}-{backend.lower()}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with Progress("rl") as bar:
        model = _model(options, bar)
        reward_model = _reward_model(options, model, bar)
    settings = Settings(
        task=task,
        through_byteps=backend == "BytePS",
        ranks=options.workers,
        updates=UPDATES,
        model=model.resolve(),
        reward_model=reward_model,
        questions=rl_task.write_questions(folder / "questions.parquet", task.pairs, task.ask),
        folder=folder,
        **{name: getattr(options, name) for name in SETTINGS},
    )
    print(f"{options.algorithm} through {backend}: {options.workers} ranks", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_rl"]
    command += ["--restarts", str(options.restarts), "--spares", str(options.spares)]
    command += ["--", *settings.overrides(), *options.overrides]
    variables = {**os.environ, **settings.environment()}
    variables["BYTEPS_EMBEDDED_SERVERS"] = str(options.servers)
    process = Spawned("verl", command, variables, folder, cwd=folder)
    deadline = time.monotonic() + LIMIT_S
    try:
        with Progress("rl", total=options.steps) as bar:
            bar.update("the ranks and vLLM start, and import torch, Megatron and verl")
            show = _shower(bar, options.steps)
            loss = Loss(folder, options.lose_actor_at, partial(bar.say, stream=sys.stdout))
            while process.running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                show(folder)
                loss.look()
            show(folder)
    finally:
        end_all([process], _GRACE_S)
    end = "was ended after an hour" if time.monotonic() >= deadline else "failed"
    if process.status != 0:
        log = last_lines(folder / LOG, 60)
        raise JobError(f"the job {end} (exit status {process.status})\n{log}")
    outcome = read(folder, backend)
    if len(outcome.steps) != options.steps:
        raise JobError(f"the job ended after {len(outcome.steps)} of {options.steps} steps")
    return outcome


def _model(options: argparse.Namespace, bar: Progress) -> Path:
    """Return the folder of the model to train.

    Raises:
        JobError: ``--model`` is not a model.
    """
    from scripts.trainkit import rl_task

    if options.model:
        bar.update(f"{options.model} is looked for")
        try:
            return rl_task.find_model(options.model)
        except ValueError as error:
            raise JobError(f"--model {error}") from error
    bar.update("the base model is taught to add")
    kind = {"layers": options.layers, "experts": options.experts}
    base = options.data_cache / f"rl-base-{options.layers}-{options.experts}"
    return rl_task.make_model(base, options.seed, **kind)


def _reward_model(options: argparse.Namespace, base: Path, bar: Progress) -> Path | None:
    """Return the folder of the reward model; None: there is none."""
    if not options.reward_model:
        return None
    from scripts.trainkit import rl_reward_model

    bar.update("the reward model is taught to tell right sums")
    folder = options.data_cache / f"rl-reward-{options.layers}"
    return rl_reward_model.make_reward_model(folder, base, options.seed).resolve()


def _shower(bar: Progress, steps: int) -> Callable[[Path], None]:
    """Return a function that prints new steps."""
    shown = 0

    def show(folder: Path) -> None:
        nonlocal shown
        seen = read_steps(folder)
        for step in seen[shown:]:
            bar.update("training", done=step.number)
            bar.say(
                f"  step {step.number:3d}/{steps}  reward {step.reward:.3f}  KL {step.kl:+.4f}  "
                f"rollout and training differ by {step.mismatch:.4f}",
                stream=sys.stdout,
            )
        shown = len(seen)

    return show


def check(outcome: Outcome, rise: float | None) -> bool:
    """Check whether the mean reward rose as required. `rise` None: too few steps to decide, so only
    gradients that are not zero are required."""
    first, last = outcome.first_reward, outcome.last_reward
    if rise is None:
        learns = any(step.grad_norm > 0 for step in outcome.steps)
        word = "the actor has gradients" if learns else "NOTHING was learnt: all gradients are zero"
        print(f"reward: {last:.3f}; not judged before step {EDGE + 1} (--steps); {word}")
        return learns
    rose = last - first >= rise
    word = "rose" if rose else "did NOT rise"
    print(f"reward: {word} by {rise:.2f} or more ({first:.3f} -> {last:.3f})")
    return rose


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # the package that would contain it is missing
        return True


def _complaint(options: argparse.Namespace) -> str:
    """Return the reason why this cannot run here. Empty if it can."""
    if missing := [name for name in ("megatron_byteps_rl", *NEEDED) if _missing(name)]:
        return f"{', '.join(missing)}: not installed here; use `make rl`"
    gpus = options.workers + options.reward_model
    if options.device == "cuda" and gpus > _gpus():
        scorer = " and a reward model" if options.reward_model else ""
        return f"{options.workers} ranks{scorer} need {gpus} GPUs, and torch sees {_gpus()}"
    return ""


def run(options: argparse.Namespace) -> int:
    if complaint := _complaint(options):
        print(f"error: {complaint}", file=sys.stderr)
        return 1
    backends = ["BytePS", "all-reduce"] if options.compare else ["BytePS"]
    picture = options.out / f"{options.algorithm}.png"
    taught = _DIGEST.sub("", Path(options.model).name) if options.model else "a tiny Llama"
    outcomes: list[Outcome] = []
    for backend in backends:
        outcomes.append(train(options, backend=backend))
        # The curves are drawn at once, because the next run may fail.
        draw(outcomes, picture, f"{options.algorithm.upper()} of {taught} on sums")
        print(f"\n{table(outcomes)}\n", flush=True)
    print(f"{samples(outcomes[0])}\n")
    good = check(outcomes[0], options.rise)
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
