"""A run as it is kept: metadata, raw samples and figures as JSON; and metadata as `#` lines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.launch import Launch, measured_from_json
from benchkit.plan import Plan, Topology, plan_from_json
from benchkit.summary import Run, rows
from benchkit.units import show_rate

SCHEMA = 1
_ROOT = Path(__file__).resolve().parents[2]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def series_hash() -> str:
    """Of all that this project adds to BytePS: its patches and its overlay.

    "not known" where they are not there, as where the benchmarks alone were unpacked.
    """
    digest = hashlib.sha256()
    folders = [_ROOT / folder for folder in ("patches/byteps", "byteps")]
    if not all(folder.is_dir() for folder in folders):
        return "not known"
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(_ROOT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def metadata(arguments: Sequence[str]) -> dict[str, str]:
    """What the figures depend on, apart from the plan."""
    engine = {k: v for k, v in sorted(os.environ.items()) if k.startswith("BYTEPS_")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([Path(sys.argv[0]).name, *arguments]),
        "byteps": f"{_version('byteps')}, patches and overlay {series_hash()}",
        "torch": _version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "hardware": machine.hardware(),
        "settings": " ".join(f"{k}={v}" for k, v in engine.items()) or "defaults",
    }


def topology_text(topology: Topology) -> str:
    """Hosts and links in words."""
    where = "on the workers' hosts" if topology.colocate else "on hosts of their own"
    what = f"{topology.workers} workers"
    if topology.ranks_per_host > 1:
        what += f" on {topology.worker_hosts} hosts"
    if topology.uneven > 1:
        what += f", one of each with {topology.uneven} connections a server and the others with 1"
    what += f", {topology.servers} servers"
    if topology.servers_per_machine > 1:
        what += f" of {topology.servers_per_machine} processes each"
    if topology.local_servers:
        where += f" and {topology.local_servers} on each of the workers'"
    if not topology.emulated_hosts:
        link = f", links of {show_rate(topology.link_bits)}" if topology.link_bits else ""
        place = "as the job was started" if topology.in_job else "on this machine's loopback"
        return f"{what}, {place}{link}"
    queue = "a class for each peer (HTB)" if topology.fair_queue else "one queue (TBF)"
    return (
        f"{what} {where}, the scheduler beside worker 0; {topology.emulated_hosts} network "
        f"namespaces on one switch, {show_rate(topology.link_bits)} each way; fair queue: {queue}; "
        f"congestion control {topology.congestion_control}; MTU {topology.mtu}"
    )


def header(meta: dict[str, str], plan: Plan) -> str:
    """The `#` lines above a table."""
    backends = " and ".join(plan.backends)
    lines = {
        **meta,
        "topology": topology_text(plan.topology),
        "launches": f"{plan.launches} of {backends}, in turn; slowest rank counts; GB is 1e9",
    }
    return "\n".join(f"# {name}: {text}" for name, text in lines.items())


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
