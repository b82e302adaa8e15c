#!/usr/bin/env python3
"""Trains a small GPT on text with Megatron-LM, its gradients summed by BytePS.

Prepares the data, runs the workers on this machine with a BytePS scheduler and servers next to them
(or, with DMLC_PS_ROOT_URI set, as workers of that cluster), shows the loss, and ends with a
summary, the loss curve as a picture and all losses as JSON in build/train. With --compare it also
trains the same seed with torch.distributed's all-reduce and overlays both. With --optimizer servers
the servers keep the optimizer, and --compare trains with Megatron's distributed optimizer. With
--mode ray the job runs under Ray (build/venv-ray), and goes on when a rank is lost. With --hf-model
it trains a Hugging Face model instead (build/venv-hf), as a whole or --lora adapters, and shows its
loss on held-out text, and a sample, before and after.

Exit status: 0 the loss (with --hf-model: on held-out text) fell as required, and the comparison
agreed; 1 it did not, or a worker failed (its log is shown); 2 bad usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts import children, prepare_data
from scripts.progress import Progress
from scripts.trainkit import hf
from scripts.trainkit.job import (
    Job,
    JobError,
    RayJob,
    Record,
    Result,
    draw,
    largest_difference,
    positive,
    same_parameters,
    table,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_STEPS = 400
DEFAULT_THRESHOLD = 2.5
# A run with fewer steps need only show a falling loss.
STEPS_TO_THRESHOLD = 200
EXACT_WORKERS = 2
# All ranks share this machine, so by default nothing would go to servers.
_THROUGH_SERVERS = ("--use-dpu-reduce", "--dpu-reduce-backend", "flat")
_OPTIMIZER_ON_SERVERS = ("--dpu-optimizer",)
_DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer",)
# Allowed relative difference between the optimizer on the servers and Megatron's, in the mean of
# the last ten losses.
CLOSE = 0.02
PROGRESS_S = 2.0

# 0.8 million parameters reach a loss below 2.5 after about a minute on two cores.
MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 8
    --hidden-dropout 0 --attention-dropout 0
    --optimizer adam --adam-beta2 0.95 --clip-grad 1.0
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine
    --split 100,0,0 --eval-iters 0 --eval-interval 1000000 --log-interval 20
""".split()  # noqa: SIM905

# Arguments for a GPU without Transformer Engine and Apex, which Megatron uses by default.
WITHOUT_TRANSFORMER_ENGINE = """
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
""".split()  # noqa: SIM905


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, help=f"default: {DEFAULT_STEPS}; --hf-model: {hf.STEPS}")
    add("--workers", type=positive, help="default: one for each GPU, 2 without")
    add("--servers", type=positive, default=1, help="BytePS servers on this machine (default: 1)")
    add("--compare", action="store_true", help="train through all-reduce too")
    add(
        "--optimizer",
        choices=("megatron", "servers"),
        default="megatron",
        help="where it is: on the workers (default), or on the servers",
    )
    add("--mode", choices=("local", "ray"), default="local", help="torchrun (default), or Ray")
    add("--spares", type=int, help="Ray: warm actors beyond the workers (default: 1 to lose one)")
    add("--address", help="Ray: of a cluster, or auto (default: start one on this machine)")
    add("--lose-rank-at", type=positive, metavar="STEP", help="Ray: kill a rank's actor there")
    add("--hf-model", metavar="FOLDER", help=f"a Hugging Face model, or {hf.SMOLLM2}")
    add("--lora", action="store_true", help="train adapters; --lora-rank and others after --")
    add("--seed", type=positive, default=1234, help="default: 1234")
    add(
        "--threshold",
        type=float,
        metavar="LOSS",
        help="fail unless the mean of the last ten losses is below this (default: "
        f"{DEFAULT_THRESHOLD} from {STEPS_TO_THRESHOLD} steps on, before that the first loss)",
    )
    add("--data", type=Path, nargs="+", default=[], help="text (default: Python's own library)")
    add(
        "--max-bytes",
        type=positive,
        help=f"of text (default: {prepare_data.DEFAULT_MAX_BYTES}; --hf-model: {hf.MAX_BYTES})",
    )
    add("--data-cache", type=Path, default=ROOT / "build" / "data", help="default: build/data")
    add("--out", type=Path, default=ROOT / "build" / "train", help="default: build/train")
    add("--tree", type=Path, default=ROOT / "build" / "Megatron-LM", help="patched Megatron-LM")
    add(
        "megatron",
        nargs="*",
        metavar="-- ARGUMENTS",
        help="for Megatron, after --; they win over those chosen here",
    )
    options = parser.parse_args(arguments)
    of_ray = {"--spares": options.spares, "--address": options.address}
    of_ray |= {"--lose-rank-at": options.lose_rank_at}
    for flag, value in of_ray.items():
        if value is not None and options.mode != "ray":
            parser.error(f"{flag} needs --mode ray")
    if options.lora and options.hf_model is None:
        parser.error("--lora needs --hf-model")
    if options.steps is None:
        options.steps = DEFAULT_STEPS if options.hf_model is None else hf.STEPS
    if options.spares is None:
        options.spares = int(options.lose_rank_at is not None)
    return options


def on_gpu() -> bool:
    return os.environ.get("MEGATRON_CPU") != "1" and children.count_gpus() > 0


def megatron_arguments(
    options: argparse.Namespace, prefix: Path, model: Sequence[str] = MODEL
) -> list[str]:
    """Return the arguments that both backends share."""
    arguments = [*model, "--seed", str(options.seed), "--train-iters", str(options.steps)]
    arguments += ["--lr-warmup-iters", str(min(10, options.steps // 10))]
    arguments += ["--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache")]
    if on_gpu() and importlib.util.find_spec("transformer_engine") is None:
        arguments += WITHOUT_TRANSFORMER_ENGINE
    return arguments + options.megatron


def environment(workers: int, servers: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    values = {"OMP_NUM_THREADS": str(max(1, cores // (workers + servers)))}
    values |= {"BYTEPS_EMBEDDED_SERVERS": str(servers), "PYTHONWARNINGS": "ignore"}
    # Megatron trains on the CPU only on request, so this asks for it if there is no GPU.
    values |= {} if on_gpu() else {"MEGATRON_CPU": "1"}
    # The user's variables win, except for the number of servers, which is a flag.
    return {k: v for k, v in values.items() if k not in os.environ or k.startswith("BYTEPS")}


def progress_printer(steps: int, bar: Progress) -> Callable[[Record], None]:
    """Return a function that prints a line from time to time."""
    shown = {"time": 0.0, "step": 0}

    def show(record: Record) -> None:
        if not record.steps or len(record.steps) == shown["step"]:
            return
        last = len(record.steps) == steps
        if not last and time.monotonic() - shown["time"] < PROGRESS_S:
            return
        step = record.steps[-1]
        bar.update("training", done=len(record.steps))
        shown.update(time=time.monotonic(), step=len(record.steps))
        rate = f"{record.tokens_per_s():8,.0f} tokens/s" if len(record.steps) > 1 else ""
        line = f"  step {step.iteration:5d}/{steps}  loss {step.loss:.4f}  {rate}"
        bar.say(line, stream=sys.stdout)

    return show


def run_folder(options: argparse.Namespace, backend: str) -> Path:
    """Return the folder of a run's record and logs."""
    return options.out / backend.lower()


def backends(options: argparse.Namespace) -> list[str]:
    """Return the backends to train with, in order."""
    other = "reduce-scatter" if options.optimizer == "servers" else "all-reduce"
    return ["BytePS", other] if options.compare else ["BytePS"]


def backend_arguments(options: argparse.Namespace, backend: str) -> list[str]:
    """Return a backend's additional arguments for Megatron."""
    if backend == "BytePS":
        servers = options.optimizer == "servers"
        return [*_THROUGH_SERVERS, *(_OPTIMIZER_ON_SERVERS if servers else ())]
    return [*_DISTRIBUTED_OPTIMIZER] if backend == "reduce-scatter" else []


def train(
    options: argparse.Namespace,
    prefix: Path,
    *,
    backend: str,
    pretrained: hf.HuggingFace | None = None,
) -> Result:
    """Make a run through ``BytePS``, or through torch.distributed: by ``all-reduce`` or, with the
    distributed optimizer, by ``reduce-scatter``."""
    through_byteps = backend == "BytePS"
    servers = options.servers if through_byteps else 0
    beside = f" and {_count(servers, 'server')}" if servers else ""
    where = ""
    if options.optimizer == "servers":
        where = (
            ", the optimizer on the servers" if through_byteps else ", the distributed optimizer"
        )
    workers = _count(options.workers, "worker")
    print(f"training through {backend}: {workers}{beside}{where}", flush=True)
    folder = run_folder(options, backend)
    model = MODEL if pretrained is None else pretrained.arguments(folder / hf.MODEL_FOLDER)
    arguments = [*megatron_arguments(options, prefix, model), *backend_arguments(options, backend)]
    shared = {
        "tree": options.tree,
        "folder": folder,
        "workers": options.workers,
        "arguments": arguments,
        # Both runs have the same number of threads, because it decides the order of additions in a
        # matrix product.
        "environment": environment(options.workers, options.servers),
    }
    job: Job | RayJob = Job(**shared)
    if options.mode == "ray":
        job = RayJob(
            **shared,
            servers=servers,
            spares=options.spares,
            address=options.address,
            lose_at=options.lose_rank_at if through_byteps else None,
            gpus=on_gpu(),
        )
    with Progress("train", total=options.steps) as bar:
        bar.update("the workers start, and import torch")
        record = job.run(progress_printer(options.steps, bar))
    return Result(backend=backend, workers=options.workers, servers=servers, record=record)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def check_fall(result: Result, options: argparse.Namespace) -> bool:
    """Return whether the loss fell as far as required."""
    limit = options.threshold
    if limit is None:
        long_enough = options.steps >= STEPS_TO_THRESHOLD
        limit = DEFAULT_THRESHOLD if long_enough else result.losses[0]
    fell = result.final_loss < limit
    word = "fell below" if fell else "did NOT fall below"
    print(f"loss: {word} {limit:.4f} ({result.losses[0]:.4f} -> {result.final_loss:.4f})")
    return fell


def check_equal(ours: Result, theirs: Result) -> bool:
    """Print the difference of the two backends. With two workers they must be equal."""
    difference = largest_difference(ours, theirs)
    same = same_parameters(ours, theirs)
    print(
        f"largest difference of the loss over {len(ours.losses)} steps: {difference!r}; "
        f"final parameters: {'the same to the last bit' if same else 'different'}"
    )
    if ours.workers > EXACT_WORKERS:
        return True
    equal = difference == 0.0 and same
    if not equal:
        print(f"with {ours.workers} workers both backends must give the same bits")
    return equal


def check_close(ours: Result, theirs: Result) -> bool:
    """Print the difference between the optimizer on the servers and Megatron's. Return whether it
    is no larger than that of two orders of addition."""
    difference = largest_difference(ours, theirs)
    apart = abs(ours.final_loss - theirs.final_loss) / theirs.final_loss
    print(
        f"largest difference of the loss over {len(ours.losses)} steps: {difference:.2g}; the mean "
        f"of the last ten differs by {apart:.2%}"
    )
    if ours.losses[0] != theirs.losses[0]:
        print("the first losses, before any update, must be the same")
        return False
    if not apart <= CLOSE:
        print(f"it may differ by {CLOSE:.0%}")
        return False
    return True


def check(ours: Result, theirs: Result, options: argparse.Namespace) -> bool:
    """Return whether a run through BytePS agrees with the other backend's."""
    held = check_close if options.optimizer == "servers" else check_equal
    return held(ours, theirs)


def run(options: argparse.Namespace) -> int:
    if not (options.tree / "pretrain_dpu_gpt.py").is_file():
        print(f"error: {options.tree} is no patched Megatron-LM: run `make setup`", file=sys.stderr)
        return 1
    if options.mode == "ray" and importlib.util.find_spec("ray") is None:
        print("error: Ray is not installed: use `make train MODE=ray`", file=sys.stderr)
        return 1
    if options.workers is None:
        options.workers = children.count_gpus() if on_gpu() else EXACT_WORKERS
    if options.hf_model is not None:
        return run_pretrained(options)
    max_bytes = options.max_bytes or prepare_data.DEFAULT_MAX_BYTES
    dataset = prepare_data.prepare(options.data, options.data_cache, max_bytes)
    print(f"data: {dataset.documents} documents, {dataset.tokens:,} tokens in {dataset.prefix}")

    results = [train(options, dataset.prefix, backend=backend) for backend in backends(options)]

    options.out.mkdir(parents=True, exist_ok=True)
    picture, losses = options.out / "loss.png", options.out / "losses.json"
    write_json(results, losses)
    draw(results, picture)
    print(f"\n{table(results)}\n")
    good = check_fall(results[0], options)
    if options.compare:
        ours, theirs = results
        good = check(ours, theirs, options) and good
    print(f"loss curve: {picture}\nall losses: {losses}")
    return 0 if good else 1


def run_pretrained(options: argparse.Namespace) -> int:
    """Train a Hugging Face model, and evaluate the written files."""
    if importlib.util.find_spec("transformers") is None:
        print("error: transformers is not installed: use `make train HF=1`", file=sys.stderr)
        return 1
    # All files are local, so nothing must be downloaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pretrained = hf.prepare(
        options.hf_model, options.data, options.data_cache, options.max_bytes, lora=options.lora
    )
    dataset = pretrained.dataset
    print(f"model: {pretrained.model}{', LoRA adapters on it' if options.lora else ''}")
    print(f"data: {dataset.documents} documents, {dataset.tokens:,} tokens in {dataset.prefix}")
    before = pretrained.evaluate("before", pretrained.model)
    print(f"loss on text that is held out, before: {before.loss:.4f}")
    results = [
        train(options, dataset.prefix, backend=backend, pretrained=pretrained)
        for backend in backends(options)
    ]
    written = run_folder(options, "BytePS") / hf.MODEL_FOLDER
    after = pretrained.evaluate("after", written)

    picture, losses = options.out / "loss.png", options.out / "losses.json"
    write_json(results, losses)
    title = f"{pretrained.model.name}: data-parallel gradients summed by BytePS"
    draw(results, picture, title=title, unit="token")
    print(f"\n{table(results)}\n")
    hf.show(before, after, pretrained.prompt)
    good = after.loss < before.loss
    if not good:
        print("the loss did NOT fall")
    if options.compare:
        ours, theirs = results
        good = check(ours, theirs, options) and good
    print(f"written: {written}\nloss curve: {picture}\nall losses: {losses}")
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except (JobError, prepare_data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the workers were ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # SIGTERM ends workers as Ctrl-C does. A shell that starts this in the background ignores SIGINT
    # by default, so both handlers are set.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
