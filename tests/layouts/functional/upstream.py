"""The arguments of functional tests, read from a checkout of Megatron-LM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..gpt.rows import Family
from .arguments import CannotRun, Value, small
from .runs import Case

FAMILIES: dict[str, Family] = {
    "bert": "bert",
    "gpt": "gpt",
    "mixtral": "gpt",
    "moe": "gpt",
    "t5": "t5",
}
"""Folders of tests whose models can be trained here: which model each has."""
_CASES = "tests/functional_tests/test_cases"
_NO_TRAINING = re.compile(r"inference|grpo")


@dataclass(frozen=True, kw_only=True)
class Test:
    """A functional test that trains."""

    name: str
    family: Family
    arguments: dict[str, Value]
    """By flag."""


def tests_of(checkout: Path) -> Iterator[Test]:
    """The tests that train one of the models of FAMILIES.

    Raises:
        ValueError: the folder has no functional tests.
    """
    found = sorted((checkout / _CASES).glob("*/*/model_config.yaml"))
    if not found:
        raise ValueError(
            f"{checkout} has no {_CASES}: give a checkout of Megatron-LM with its tests"
        )
    for file in found:
        folder, name = file.parts[-3:-1]
        if folder not in FAMILIES or _NO_TRAINING.search(name):
            continue
        given = yaml.safe_load(file.read_text(encoding="utf-8"))["MODEL_ARGS"]
        arguments = {flag: _value(value) for flag, value in given.items()}
        yield Test(name=name, family=FAMILIES[folder], arguments=arguments)


def cases_of(checkout: Path) -> tuple[list[Case], dict[str, str]]:
    """What a CPU can run of a checkout, tests with equal arguments as one case; and why it cannot
    run the others, by name.

    Raises:
        ValueError: the folder has no functional tests.
    """
    cases: dict[object, Case] = {}
    cannot: dict[str, str] = {}
    for test in tests_of(checkout):
        try:
            made = small(test.arguments)
        except CannotRun as reason:
            cannot[test.name] = str(reason)
            continue
        key = (test.family, made.ranks, made.arguments)
        if key in cases:
            cases[key] = replace(cases[key], others=(*cases[key].others, test.name))
            continue
        cases[key] = Case(
            name=test.name,
            family=test.family,
            ranks=made.ranks,
            arguments=made.arguments,
            left_out=made.left_out,
        )
    return sorted(cases.values(), key=lambda case: (case.ranks, case.name)), cannot


def strange(rows: Sequence[Case], cases: Sequence[Case]) -> list[str]:
    """How rows differ from the tests of a checkout that they repeat."""
    known = {name: case for case in cases for name in (case.name, *case.others)}
    found = []
    for row in rows:
        twin = known.get(row.name)
        if twin is None:
            found.append(f"{row.name}: the checkout has no such test that a CPU can run")
            continue
        mine, theirs = _pairs(row), _pairs(twin)
        if apart := sorted(mine ^ theirs):
            told = "; ".join(
                f"{'the row' if pair in mine else 'the checkout'} has {pair}" for pair in apart
            )
            found.append(f"{row.name}: {told}")
    return found


def _pairs(case: Case) -> set[str]:
    """The arguments, each flag with its values."""
    text = " ".join(case.arguments)
    pairs = {f"--{part.strip()}" for part in (" " + text).split(" --") if part.strip()}
    return {*pairs, f"{case.ranks} ranks", f"a {case.family}"}


def _value(given: Any) -> Value:
    """As the tests' own launcher hands it over, in its first run: words in brackets are several, in
    parentheses one."""
    if given is True:
        return True
    text = str(given).strip().replace("${REPEAT}", "1")
    if text.startswith("[") and text.endswith("]"):
        return tuple(text[1:-1].split())
    return text
