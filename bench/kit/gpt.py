"""Code that benchmarks share which train a small GPT on text."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts import prepare_data
from scripts import train as train_script

ROOT = Path(__file__).resolve().parents[2]
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t, two-sided 95 %, by degrees of freedom."""


def add_model(add: Callable[..., Any]) -> None:
    """Add flags of the model and its training."""
    positive = train_script.positive
    add("--steps", type=positive, default=300, help="default: 300")
    add("--layers", type=positive, default=4, help="default: 4")
    add("--hidden", type=positive, default=128, help="default: 128")
    add("--sequence", type=positive, default=128, help="default: 128")
    add("--rate", type=float, default=1e-3, help="learning rate (default: 1e-3)")


def add_files(add: Callable[..., Any], name: str) -> None:
    """Add flags of text and results, which are in `build/NAME`, and of Megatron's extra
    arguments."""
    positive = train_script.positive
    add("--data", type=Path, nargs="+", default=[], help="text (default: Python's own library)")
    add("--max-bytes", type=positive, default=prepare_data.DEFAULT_MAX_BYTES, help="of text")
    add("--data-cache", type=Path, default=ROOT / "build/data", help="default: build/data")
    add("--tree", type=Path, default=ROOT / "build/Megatron-LM", help="patched Megatron-LM")
    add("--out", type=Path, default=ROOT / "build" / name, help=f"default: build/{name}")
    add("--from-json", type=Path, metavar="FILE", help="show that result, and train nothing")
    add("--plot", type=Path, metavar="FILE", help="draw the curves")
    add("megatron", nargs="*", metavar="-- ARGUMENTS", help="for Megatron, after --")


def limits[Key](text: str, key: Callable[[str], Key]) -> dict[Key, float]:
    """Parse `A=X,B=Y`. Raises ValueError for other forms."""
    pairs = (pair.split("=") for pair in filter(None, text.split(",")))
    return {key(name): float(limit) for name, limit in pairs}


def megatron_arguments(options: argparse.Namespace, prefix: Path, seed: int) -> list[str]:
    """Return the arguments that all runs of a seed share, and the user's arguments for Megatron."""
    length = str(options.sequence)
    heads = str(max(1, options.hidden // 64))
    arguments = train_script.megatron_arguments(
        argparse.Namespace(seed=seed, steps=options.steps, megatron=[]), prefix
    )
    arguments += ["--num-layers", str(options.layers), "--hidden-size", str(options.hidden)]
    arguments += ["--num-attention-heads", heads, "--seq-length", length]
    arguments += ["--max-position-embeddings", length, "--micro-batch-size", str(options.batch)]
    arguments += ["--lr", str(options.rate), "--min-lr", str(options.rate / 10)]
    # Without warm-up the initial rate would be high, and the smallest differences would make runs
    # diverge.
    arguments += ["--lr-warmup-iters", str(options.steps // 10)]
    return [*arguments, *options.megatron]


def result_of(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    name: str,
) -> dict[str, Any]:
    """Return the result in ``--from-json``. Without it, measure, and write the result to ``--out``.
    Prints the result's metadata. Raises the errors of ``measure``."""
    if options.from_json:
        result: dict[str, Any] = json.loads(options.from_json.read_text(encoding="utf-8"))
    else:
        result = measure(options)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(json.dumps(result) + "\n", encoding="utf-8")
    print("\n".join(f"# {key}: {text}" for key, text in result["meta"].items()))
    return result


def smooth(values: Sequence[float], over: int = 20) -> list[float]:
    """Return, for each value, the mean of the last `over` values up to it."""
    return [statistics.fmean(values[max(0, i - over + 1) : i + 1]) for i in range(len(values))]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    reach = _T95.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach
