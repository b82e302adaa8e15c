"""Runs as they are kept: metadata, raw samples and figures, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kit.plan import plan_from_json
from bench.pushpull.launch import Launch, measured_from_json
from bench.pushpull.summary import Run, rows

SCHEMA = 1


def as_json(runs: Sequence[Run], meta: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "meta": meta,
        "runs": [
            {
                "name": run.name,
                "plan": run.plan.as_json(),
                "launches": [one.as_json() for one in run.launches],
                "rows": [row.as_json() for row in rows(run)],
            }
            for run in runs
        ],
    }


def write(runs: Sequence[Run], meta: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(runs, meta), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[list[Run], dict[str, str]]:
    """What `write` wrote. Raises ValueError for another schema."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')!r}; this reads {SCHEMA}")
    runs = []
    for entry in content["runs"]:
        launches = [
            Launch(**{**one, "measured": [measured_from_json(m) for m in one["measured"]]})
            for one in entry["launches"]
        ]
        plan = plan_from_json(entry["plan"])
        runs.append(Run(plan=plan, name=entry["name"], launches=launches))
    return runs, content["meta"]
