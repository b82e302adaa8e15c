#!/usr/bin/env python3
"""Trains a small GPT with every wire type and several seeds, as far as a time limit allows.

Makes the runs that neither the folder nor results.jsonl has, in order of importance. A finished run
is NAME.json in the folder. A run that the limit has stopped resumes from NAME.pt.
bench/learning/report.py makes the table, and adds a folder to results.jsonl.

  bench/learning/run.py --out FOLDER --limit-s 500
  bench/learning/run.py --out FOLDER --probe             how fast a step is, and how many at once

Exit status: 0 all runs are done or the limit was reached; 1 a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.learning.model import Size
from bench.learning.report import saved_results
from bench.learning.trainer import Corpus, How, Run, Schedule, Trainer
from bench.learning.wires import RECIPES

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("bf16", "int8-servers", "int4-int8-servers", "int8", "int4")
"""Wire types of which all seeds are trained before any other wire type."""
PROBED = 40
"""Number of steps that --probe measures."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=Path, default=ROOT / "build/learning/corpus", help="of tokens.py")
    add("--packs", type=int, default=2, help="training packs that are read (default: 2)")
    add("--out", type=Path, default=ROOT / "build/learning/runs", help="results")
    add("--wires", default=",".join(RECIPES), help="default: %(default)s")
    add("--seeds", type=int, default=8, help="default: 8")
    add("--first-seed", type=int, default=1, help="default: 1")
    add("--limit-s", type=float, default=86400, help="seconds from now on (default: a day)")
    add("--whole", action="store_true", help="begin no run that the limit would end")
    add("--at-once", type=int, default=0, help="processes that share the GPU (0: as --probe found)")
    add("--streams", type=int, default=0, help="of a process (0: as --probe found)")
    add("--eager", action="store_true", help="neither compile nor capture")
    add("--probe", action="store_true", help="measure, and write probe.json")
    for name, of in (("steps", Schedule), ("warm_up", Schedule), ("rate", Schedule)):
        add(
            f"--{name.replace('_', '-')}",
            type=type(getattr(of(), name)),
            default=getattr(of(), name),
        )
    for name, default in asdict(Size()).items():
        add(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    options.wires = options.wires.split(",")
    unknown = set(options.wires) - set(RECIPES)
    if unknown:
        parser.error(f"--wires: some of {', '.join(RECIPES)}")
    options.size = Size(**{name: getattr(options, name) for name in asdict(Size())})
    options.schedule = Schedule(steps=options.steps, warm_up=options.warm_up, rate=options.rate)
    return options


def wanted(options: argparse.Namespace) -> list[Run]:
    """Return all missing runs. The important ones come first, seed by seed."""
    runs = []
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for part in (True, False):
        wires = [wire for wire in options.wires if (wire in FIRST) == part]
        runs += [Run(wire, seed) for seed in seeds for wire in wires]
    done = saved_results()
    return [
        run
        for run in runs
        if run.seed not in done.get(run.wire, ())
        and not (options.out / f"{run.name}.json").exists()
    ]


def trainer_of(options: argparse.Namespace, how: How) -> Trainer:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    corpus = Corpus(options.tokens, options.packs, options.size, device)
    return Trainer(corpus, options.size, options.schedule, how, device)


def work(options: argparse.Namespace, how: How, runs: Any, until: float) -> None:
    """Train the runs of the queue, one after the other, until time.time() is `until`."""
    trainer = trainer_of(options, how)
    trainer.held_out_loss(options.size.batch)  # this call compiles it
    slowest = 0.0
    while True:
        try:
            run = runs.get(timeout=1)
        except queue.Empty:
            return
        if options.whole and time.time() + slowest * options.steps * 1.03 + 5 > until:
            return
        checkpoint = options.out / f"{run.name}.pt"
        trainer.start(run, checkpoint)
        while run.step < options.steps:
            trainer.advance(run)
            slowest = max(run.seconds / run.step, slowest)
            if time.time() > until - 3:
                if not options.whole:
                    trainer.save(run, checkpoint)
                print(f"{run.name}: stopped at step {run.step}", flush=True)
                return
        began = time.monotonic()
        held_out = trainer.held_out_loss()
        result = {
            "wire": run.wire,
            "seed": run.seed,
            "held_out": held_out,
            "losses": run.losses,
            "seconds": run.seconds,
            "size": asdict(options.size),
            "schedule": asdict(options.schedule),
            "parameters": sum(p.numel() for p in trainer.flat.parameters),
            "train_sequences": len(trainer.corpus.train),
            "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        }
        path = options.out / f"{run.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(result) + "\n", encoding="utf-8")
        path.with_suffix(".tmp").replace(path)
        checkpoint.unlink(missing_ok=True)
        print(
            f"{run.name}: held-out {held_out:.4f}, training {run.losses[-1]:.4f}, "
            f"{1000 * run.seconds / options.steps:.2f} ms per step, "
            f"held-out part {time.monotonic() - began:.1f} s",
            flush=True,
        )


def probe_one(options: argparse.Namespace, how: How, ready: Any, times_of: Any) -> None:
    """Measure a step of the first wire type and of a costly one, when all processes are ready."""
    began = time.monotonic()
    trainer = trainer_of(options, how)
    times = {}
    for wire in ("bf16", "int4-int8-servers"):
        run = Run(wire, 1)
        trainer.start(run)
        trainer.EVERY = 5
        trainer.advance(run)  # this call compiles the kernels
        made = time.monotonic() - began
        ready.wait(120)
        trainer.EVERY = PROBED
        run.seconds = 0.0
        trainer.advance(run)
        times[wire] = 1000 * run.seconds / PROBED
        times.setdefault("made_s", made)
    if trainer.device.type == "cuda":
        times["gb"] = torch.cuda.max_memory_allocated() / 1e9
    times_of.put(times)


def probe(options: argparse.Namespace, until: float) -> None:
    """Try settings for a step. Record the fastest."""
    context = multiprocessing.get_context("spawn")
    tried = []
    graph, streams = How(compiled=True, graph=True), How(compiled=True, graph=True, streams=4)
    cases = [(1, graph), (1, How()), (1, How(compiled=True)), (1, streams), (2, graph)]
    cases += [(4, graph), (2, streams), (3, streams)]
    if options.eager:
        cases = [(1, How()), (2, How())]
    cannot_capture = False
    for at_once, how in cases:
        if time.time() > until - 40:
            print("no time for more", flush=True)
            break
        if cannot_capture and how.graph:
            continue
        ready, times_of = context.Barrier(at_once), context.Queue()
        children = [
            context.Process(target=probe_one, args=(options, how, ready, times_of))
            for _ in range(at_once)
        ]
        began = time.monotonic()
        for child in children:
            child.start()
        results: list[dict[str, float]] = []
        while len(results) < at_once and time.monotonic() < began + 150:
            try:
                results.append(times_of.get(timeout=1))
            except queue.Empty:
                if any(child.exitcode for child in children):
                    break
        for child in children:
            child.join(1)
            if child.is_alive():
                child.terminate()
        case = {"at_once": at_once, **asdict(how), "results": results}
        if len(results) == at_once:
            case["steps_per_s"] = sum(1000 / times["int4-int8-servers"] for times in results)
            tried.append(case)
        else:
            cannot_capture = cannot_capture or (how.graph and how.streams == 1)
        print(json.dumps(case), flush=True)
    if not tried:
        raise RuntimeError("no kind of step works")
    best = max(tried, key=lambda case: case["steps_per_s"])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "probe.json").write_text(json.dumps(best) + "\n", encoding="utf-8")
    print(f"best: {json.dumps(best)}", flush=True)


def _child(options: argparse.Namespace, how: How, runs: Any, until: float) -> None:
    try:
        work(options, how, runs, until)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.time()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    until = began + options.limit_s
    if options.probe:
        probe(options, until)
        return 0
    file = options.out / "probe.json"
    best = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    at_once = options.at_once or best.get("at_once", 1)
    fast = torch.cuda.is_available() and not options.eager
    how = How(
        compiled=fast and best.get("compiled", True),
        graph=fast and best.get("graph", True),
        streams=options.streams or best.get("streams", 1),
    )
    context = multiprocessing.get_context("spawn")
    runs: Any = context.Queue()
    missing = wanted(options)
    for run in missing:
        runs.put(run)
    print(f"{len(missing)} runs to do, {at_once} at once, {how}", flush=True)
    children = [
        context.Process(target=_child, args=(options, how, runs, until)) for _ in range(at_once)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(max(1.0, until + 20 - time.time()))
        if child.is_alive():
            print(f"process {child.pid} is late and ended", file=sys.stderr)
            child.terminate()
    runs.cancel_join_thread()
    print(f"{len(wanted(options))} runs are left", flush=True)
    return 1 if any(child.exitcode for child in children) else 0


if __name__ == "__main__":
    sys.exit(main())
