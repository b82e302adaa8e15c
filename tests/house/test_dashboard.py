"""The Grafana dashboard asks for metrics that exist, and its panels have a place each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy/grafana/byteps.json").read_text())
SUFFIXES = ("_sum", "_count", "_bucket")


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_exists() -> None:
    server = Path(sys.executable).parent / "byteps-server"
    table = subprocess.run(
        [server, "--metrics-markdown"], capture_output=True, text=True, check=True
    ).stdout
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.M))
    asked = {name for text in expressions() for name in re.findall(r"byteps_\w+", text)}
    assert len(asked) >= 10
    for name in asked:
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        kind = kinds.get(name) or kinds.get(base)
        assert kind is not None, f"{name} is no metric of ours"
        assert (kind == "histogram") == (base != name and name not in kinds), name


def test_counters_are_asked_for_their_rates() -> None:
    failures = "byteps_server_failed_sums_total"  # shown as a number of its own
    for text in expressions():
        for name in re.findall(r"byteps_\w+(?:_total|_sum|_count|_bucket)\b", text):
            assert f"rate({name}" in text or failures in text, text


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for a in places:
        assert a["x"] + a["w"] <= 24
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)
