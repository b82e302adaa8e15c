"""What figures depend on: versions, machine, settings and topology, in words."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.kit import machine
from bench.kit.plan import Plan, Topology
from bench.kit.units import show_rate

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


def _program() -> str:
    """The script that runs, by its path in the repository."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def metadata(arguments: Sequence[str]) -> dict[str, str]:
    """What the figures depend on, apart from the plan."""
    engine = {k: v for k, v in sorted(os.environ.items()) if k.startswith("BYTEPS_")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([_program(), *arguments]),
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
        what += f", one of each with {topology.uneven} connections per server and the others with 1"
    what += f", {topology.servers} servers"
    if topology.servers_per_machine > 1:
        what += f" of {topology.servers_per_machine} processes each"
    if topology.local_servers:
        where += f" and {topology.local_servers} on each of the workers'"
    if not topology.emulated_hosts:
        link = f", links of {show_rate(topology.link_bits)}" if topology.link_bits else ""
        place = "as the job was started" if topology.in_job else "on this machine's loopback"
        return f"{what}, {place}{link}"
    nics, switches = "", "one switch"
    if topology.nics_per_host > 1:
        nics = f"{topology.nics_per_host} NICs of "
        switches = f"{topology.nics_per_host} switches, one per NIC"
    queue = "a class for each peer (HTB)" if topology.fair_queue else "one queue (TBF)"
    return (
        f"{what} {where}, the scheduler on worker 0's host; {topology.emulated_hosts} network "
        f"namespaces on {switches}, {nics}{show_rate(topology.link_bits)} each way; "
        f"fair queue: {queue}; "
        f"congestion control {topology.congestion_control}; MTU {topology.mtu}"
    )


def header(meta: dict[str, str], plan: Plan) -> str:
    """The `#` lines above a table."""
    backends = " and ".join(plan.backends)
    lines = {
        **meta,
        "topology": topology_text(plan.topology),
        "launches": f"{plan.launches} of {backends}, interleaved; slowest rank counts; GB is 1e9",
    }
    return "\n".join(f"# {name}: {text}" for name, text in lines.items())
