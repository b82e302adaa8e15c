#!/usr/bin/env python3
"""Checks many recipes for compatibility with --use-dpu-reduce and --dpu-optimizer.

Recipes are the functional tests and examples of a Megatron-LM checkout, and those of
Megatron-Bridge if it is installed. Nothing is trained, and no GPU is needed. Writes the tables of
docs/results/recipes.md. Tables of recipes that were not checked are removed, so that all tables are
from the same run.

Exit status: 0 thresholds are reached, 1 a threshold was missed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.progress import Progress
from scripts.recipekit import features, megatron
from scripts.recipekit.features import Outcome

ROOT = Path(__file__).resolve().parent.parent
THRESHOLDS = {
    "functional tests": (0.98, 0.0),
    "examples": (0.97, 0.0),
    "library recipes": (0.98, 0.90),
    "performance recipes": (0.95, 0.85),
}
"""Smallest fractions that must be accepted: with --use-dpu-reduce, and with --dpu-optimizer."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="a Megatron-LM checkout")
    parser.add_argument("--bridge", action="store_true", help="ask about Megatron-Bridge's too")
    parser.add_argument("--markdown", type=Path, help="the page to write (default: none)")
    options = parser.parse_args(words)
    if options.megatron is None and not options.bridge:
        parser.error("give --megatron CHECKOUT, or --bridge, or both")
    if options.megatron is not None and not (options.megatron / "tests").is_dir():
        parser.error(f"{options.megatron} is no checkout of Megatron-LM: it has no tests/")
    warnings.simplefilter("ignore")
    outcomes: dict[str, list[Outcome]] = {}
    sources: dict[str, str] = {}
    if options.megatron is not None:
        version = f"Megatron-LM {_version(options.megatron)}"
        for kind, recipes in (
            ("functional tests", megatron.functional(options.megatron)),
            ("examples", megatron.examples(options.megatron)),
        ):
            outcomes[kind] = _examined(kind, list(recipes), megatron.examine)
            sources[kind] = version
    if options.bridge:
        from scripts.recipekit import bridge

        for kind, package in bridge.PACKAGES.items():
            outcomes[kind] = _examined(kind, list(bridge.names(package)), bridge.examine)
            sources[kind] = f"Megatron-Bridge {bridge.version()}"
    if options.markdown is not None:
        features.write(options.markdown, outcomes, sources)
    return _report(outcomes)


def _examined(
    kind: str, recipes: Sequence[Any], examine: Callable[[Any], Outcome]
) -> list[Outcome]:
    outcomes = []
    with Progress(kind, total=len(recipes), unit="recipes") as progress:
        for recipe in recipes:
            outcomes.append(examine(recipe))
            progress.step()
    return outcomes


def _version(checkout: Path) -> str:
    text = (checkout / "megatron/core/package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)$", text, re.M))


def _report(outcomes: dict[str, list[Outcome]]) -> int:
    missed = False
    for kind, all_of_kind in outcomes.items():
        known = [outcome for outcome in all_of_kind if not outcome.not_read]
        for flag, least, refused in zip(
            ("--use-dpu-reduce", "--dpu-optimizer"),
            THRESHOLDS[kind],
            (
                [outcome.refused for outcome in known],
                [outcome.optimizer_refused for outcome in known],
            ),
            strict=True,
        ):
            accepted = sum(not reason for reason in refused)
            short = accepted < least * len(known)
            missed |= short
            print(
                f"{kind}: {flag} accepted by {accepted} of {len(known)}"
                + (f", threshold {100 * least:g} %" if least else "")
                + (": MISSED" if short else "")
            )
        if len(known) < len(all_of_kind):
            print(f"{kind}: {len(all_of_kind) - len(known)} could not be read here")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
