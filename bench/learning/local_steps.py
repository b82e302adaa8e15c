#!/usr/bin/env python3
"""Measures what local steps cost in held-out loss, over one job with summed gradients.

Trains a GPT of 36 million parameters on 20 tokens per parameter: as one job (0 replicas), and as
replicas that exchange parameters once in `--every` steps. Each run is NAME.json in the folder. Runs
that exist are not made again, so pieces of GPU time add up. The loss is that of the outer
parameters, on text that no replica has seen.

  bench/learning/local_steps.py --limit-s 500                      what is missing, as time allows
  bench/learning/local_steps.py --replicas 4 --form int4           these runs alone
  bench/learning/local_steps.py --report build/learning/local      the table of all folders named

Exit status: 0 all runs are done or the limit was reached; 1 a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from byteps.torch.diloco import outer_rate

from bench.learning.model import Size
from bench.learning.replicas import LocalSteps
from bench.learning.trainer import Corpus, How, Run, Schedule, Trainer
from bench.learning.wires import AdamW

ROOT = Path(__file__).resolve().parents[2]
TOKENS_PER_PARAMETER = 20
HEAD = (
    "replicas", "exchange", "differences", "tokens per replica and step", "rate", "seeds",
    "held-out loss, nats per token, by seed", "over one job", "of each replica, last step",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Best:
    """Settings for a number of replicas that were published as the best for 35 million parameters
    (arXiv 2503.09799)."""

    batch: int
    """Number of sequences of 512 tokens per replica and step."""
    rate: float


BEST = {
    0: Best(batch=30, rate=1.1e-2),
    1: Best(batch=120, rate=1.1e-2),
    2: Best(batch=64, rate=7e-3),
    4: Best(batch=38, rate=5e-3),
    8: Best(batch=24, rate=4e-3),
}
"""Settings by number of replicas. 0 is the one job, which sums the gradients of four hosts."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=Path, default=ROOT / "build/learning/corpus", help="of tokens.py")
    add("--packs", type=int, default=7, help="training packs that are read (default: 7)")
    add("--out", type=Path, default=ROOT / "build/learning/local", help="results")
    add("--replicas", default="0,4,2,1", help="numbers of replicas (default: %(default)s)")
    add("--every", type=int, default=30, help="steps between exchanges (default: 30)")
    add("--after", type=int, default=0, help="steps with summed gradients first (default: 0)")
    add("--form", default="bf16", choices=("bf16", "int8", "int4"), help="of differences")
    add("--factors", default="1", help="of the best rate, e.g. 0.5,1,2 (default: 1)")
    add("--seeds", default="1", help="default: 1")
    add("--width", type=int, default=512, help="default: 512")
    add("--layers", type=int, default=6, help="default: 6")
    add("--vocabulary", type=int, default=32768, help="default: 32768")
    add("--batch", type=int, default=0, help="sequences per replica and step (0: the best)")
    add("--steps", type=int, default=0, help="default: of 20 tokens per parameter")
    add("--limit-s", type=float, default=86400, help="begin no run that would end after this")
    add("--eager", action="store_true", help="neither compile nor capture")
    add("--report", type=Path, nargs="+", help="show the results of these folders")
    options = parser.parse_args(arguments)
    options.counts = [int(word) for word in options.replicas.split(",")]
    if unknown := set(options.counts) - set(BEST):
        parser.error(f"--replicas: {sorted(unknown)} is none of {sorted(BEST)}")
    return options


def name_of(options: argparse.Namespace, count: int, rate: float, seed: int) -> str:
    if count == 0:
        return f"job-{rate:g}-{seed}"
    after = f"@{options.after}" if options.after else ""
    return f"{count}x{options.every}{after}-{options.form}-{rate:g}-{seed}"


def train(
    options: argparse.Namespace, trainer: Trainer, local: LocalSteps | None, seed: int
) -> dict[str, Any]:
    """Train one run. Return its result."""
    run = Run("bf16", seed, local=local)
    trainer.start(run)
    while run.step < trainer.schedule.steps:
        trainer.advance(run)
    trainer.hosts.finish()
    return {
        "replicas": local.replicas if local else 0,
        "local": asdict(local) if local else None,
        "seed": seed,
        "held_out": trainer.held_out_loss(),
        "by_replica": run.by_host,
        "losses": run.losses,
        "seconds": run.seconds,
        "size": asdict(trainer.size),
        "schedule": asdict(trainer.schedule),
        "adamw": asdict(trainer.adamw),
        "parameters": sum(p.numel() for p in trainer.flat.parameters),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def run_count(options: argparse.Namespace, count: int, until: float) -> bool:
    """Make the missing runs of a number of replicas. Return whether all are done."""
    best = BEST[count]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size(
        vocabulary=options.vocabulary,
        width=options.width,
        layers=options.layers,
        hosts=count or 4,
        batch=options.batch or best.batch,
    )
    corpus = Corpus(options.tokens, options.packs, size, device)
    is_fast = device.type == "cuda" and not options.eager
    trainer: Trainer | None = None
    longest = 0.0
    for factor in map(float, options.factors.split(",")):
        for seed in map(int, options.seeds.split(",")):
            rate = best.rate * factor
            path = options.out / f"{name_of(options, count, rate, seed)}.json"
            if path.exists():
                continue
            if time.time() + longest > until:
                return False
            began = time.time()
            if trainer is None:
                trainer = Trainer(
                    corpus,
                    size,
                    Schedule(),
                    How(compiled=is_fast, graph=is_fast),
                    device,
                    has_replicas=count > 0,
                )
            numel = sum(p.numel() for p in trainer.flat.parameters)
            steps = options.steps or TOKENS_PER_PARAMETER * numel // size.tokens
            trainer.schedule = replace(
                trainer.schedule, steps=steps, warm_up=min(1000, steps // 10), rate=rate
            )
            trainer.adamw = AdamW(beta2=0.99, weight_decay=1 / (rate * steps))
            local = None
            if count:
                local = LocalSteps(
                    replicas=count,
                    every=options.every,
                    lr=outer_rate(count),
                    after=options.after,
                    form=options.form,
                )
            result = train(options, trainer, local, seed)
            path.with_suffix(".tmp").write_text(json.dumps(result) + "\n", encoding="utf-8")
            path.with_suffix(".tmp").replace(path)
            print(f"{path.stem}: held-out {result['held_out']:.4f}", flush=True)
            longest = max(longest, time.time() - began)
    return True


def report(folders: Sequence[Path]) -> list[str]:
    """Return the table as lines of Markdown. For the one job, the best rate is compared."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            local = result["local"] or {"every": 1, "after": 0, "form": "bf16"}
            tokens = result["size"]["batch"] * result["size"]["sequence"]
            rate = result["schedule"]["rate"]
            key = (result["replicas"], local["every"], local["after"], local["form"], tokens, rate)
            groups.setdefault(key, []).append(result)
    means = {key: statistics.fmean(run["held_out"] for run in runs) for key, runs in groups.items()}
    job = min((mean for key, mean in means.items() if key[0] == 0), default=None)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for key, runs in sorted(groups.items()):
        count, every, after, form, tokens, rate = key
        runs.sort(key=lambda run: run["seed"])
        exchange = f"once in {every}" + (f", from step {after}" if after else "")
        cells = [str(count or "one job"), exchange if count else "", form if count else ""]
        cells += [str(tokens), f"{rate:g}", str(len(runs))]
        cells.append(f"{means[key]:.4f}: " + " ".join(f"{run['held_out']:.4f}" for run in runs))
        cells.append("" if job is None else f"{means[key] / job - 1:+.2%}")
        cells.append(" ".join(f"{loss:.3f}" for loss in runs[0]["by_replica"]) if count else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.report:
        print("\n".join(report(options.report)))
        return 0
    until = time.time() + options.limit_s
    options.out.mkdir(parents=True, exist_ok=True)
    done = [run_count(options, count, until) for count in options.counts]
    print("all runs are done" if all(done) else "the limit was reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
