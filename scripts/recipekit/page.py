"""docs/results/recipes.md, made of outcomes."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.recipekit.features import FEATURES, row_of, rows_of_results
from scripts.recipekit.outcome import Outcome

MARKS = ("counts", "features", "refused")


def write(
    page: Path, outcomes: Mapping[str, Sequence[Outcome]], sources: Mapping[str, str]
) -> None:
    """Put the tables of these kinds of recipes into the page; what is around them stays.

    Args:
        page: with a mark for each table.
        outcomes: of each kind, in the order of the tables.
        sources: of each kind, where its recipes are from.

    Raises:
        ValueError: the page has not all marks.
    """
    rows = rows_of_results(page.parents[1])
    text = page.read_text()
    for mark, table in zip(
        MARKS,
        (_counts(outcomes, sources, rows), _features(outcomes, rows), _refused(outcomes)),
        strict=True,
    ):
        begin, end = f"<!-- {mark}: ", "<!-- end -->"
        if text.count(begin) != 1:
            raise ValueError(f"{page} has no mark {begin.strip()}")
        head, rest = text.split(begin)
        told, _, tail = rest.partition("-->\n")
        text = f"{head}{begin}{told}-->\n{table}\n{end}{tail.split(end, 1)[1]}"
    page.write_text(text)


def _counts(
    outcomes: Mapping[str, Sequence[Outcome]], sources: Mapping[str, str], rows: set[str]
) -> str:
    head = (
        *("recipes", "from", "number", "accepted", "accepted with `--dpu-optimizer`"),
        *("a bucket goes to servers", "dense gradients on 3 hosts or more", "run"),
    )
    lines = []
    for kind, all_of_kind in outcomes.items():
        known = [one for one in all_of_kind if not one.not_read]
        accepted = [one for one in known if not one.refused]
        lines.append(
            (
                *(kind, sources[kind], str(len(known))),
                _part(len(accepted), known),
                _part(sum(not one.optimizer_refused for one in known), known),
                str(sum(one.reaches_servers for one in accepted)),
                str(sum(one.most_hosts > 2 for one in known)),
                _part(sum(was_run(one, rows) for one in accepted), known),
            )
        )
    return _table(head, lines)


def was_run(outcome: Outcome, rows: set[str]) -> bool:
    """Whether every feature of the recipe that bears on its gradients' way was run with servers."""
    by_name = {feature.name: feature for feature in FEATURES}
    return not outcome.left and all(row_of(by_name[name], rows) for name in outcome.features)


def _part(count: int, whole: Sequence[Outcome]) -> str:
    return f"{count} ({100 * count / len(whole):.1f} %)" if whole else "0"


def _features(outcomes: Mapping[str, Sequence[Outcome]], rows: set[str]) -> str:
    used = {
        kind: Counter(name for one in all_of_kind if not one.refused for name in one.features)
        for kind, all_of_kind in outcomes.items()
    }
    lines = [
        (
            feature.name,
            row_of(feature, rows) or "accepted, never run",
            *(str(used[kind][feature.name]) for kind in outcomes),
        )
        for feature in FEATURES
        if any(used[kind][feature.name] for kind in outcomes)
    ]
    return _table(("feature", "run in the layout", *outcomes), lines)


def _refused(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    found: Counter[tuple[str, str, str]] = Counter()
    for kind, all_of_kind in outcomes.items():
        for one in all_of_kind:
            for flag, reason in (
                ("`--use-dpu-reduce`", one.refused),
                ("`--dpu-optimizer`", one.optimizer_refused),
                ("not read", one.not_read),
            ):
                if reason and not (flag == "`--dpu-optimizer`" and one.refused):
                    found[kind, flag, _short(reason)] += 1
    lines = [
        (kind, flag, reason, str(count))
        for (kind, flag, reason), count in sorted(
            found.items(), key=lambda one: (list(outcomes).index(one[0][0]), one[0][1], -one[1])
        )
    ]
    return _table(("recipes", "flag", "why", "number"), lines)


def _short(reason: str) -> str:
    """Without what every reason says, nor what is in the way of a table."""
    text = re.sub(r"^--[\w-]+ does not work with ", "", reason)
    text = re.sub(r" Drop one of the two\.$", "", text)
    text = re.sub(r"'?https?://\S+", "the hub", " ".join(text.split()))
    text = re.sub(r"/(?:[\w.@+-]+/)+", "", text)  # where this machine has a file
    return textwrap.shorten(text.replace("|", "/"), 90, placeholder=" …")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)
    )
