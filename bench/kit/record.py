"""Text and figures for records: metadata of measurements (versions, machine, settings, topology),
sizes and rates, the kernel's counts of CPU time and memory."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.kit.plan import Plan, Topology

_ROOT = Path(__file__).resolve().parents[2]
_SIZES = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def _scaled(text: str, units: dict[str, int], example: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{text!r} is not understood: write it like {example}")
    value = float(match.group(1)) * units[unit]
    if value < 1 or value != int(value):
        raise ValueError(f"{text!r} is not a whole, positive number")
    return int(value)


def parse_size(text: str) -> int:
    """Return the bytes of ``4096``, ``64KiB``, ``1.5MiB`` or ``1GB`` (a GB is 1e9). Raises
    ValueError."""
    return _scaled(text, _SIZES, "64KiB, 256MiB or 1GB")


def parse_rate(text: str) -> int:
    """Return the bits per second of ``500mbit`` or ``2.5gbit``. Raises ValueError."""
    return _scaled(text, _RATES, "500mbit or 1gbit")


def parse_hosts(text: str) -> tuple[int, int]:
    """Parse ``8@500mbit``: number of hosts, and bits per second of their links. Raises
    ValueError."""
    count, at, rate = text.partition("@")
    if not at or not count.isdigit() or int(count) < 1:
        raise ValueError(f"--emulate {text!r} is not understood: write it like 8@500mbit")
    return int(count), parse_rate(rate)


def sweep(smallest: int, largest: int, factor: float) -> list[int]:
    """Return sizes from the smallest up to the largest, each ``factor`` times the previous one."""
    if factor <= 1:
        raise ValueError(f"--factor must be larger than 1, not {factor:g}")
    if smallest > largest:
        raise ValueError(f"--min {smallest} is larger than --max {largest}")
    sizes, size = [], float(smallest)
    while round(size) <= largest:
        sizes.append(round(size))
        size *= factor
    return sizes


def show_size(count: int) -> str:
    """Format a number of bytes, exact and as short as possible."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % scale == 0 and count:
            return f"{count // scale}{unit}"
    return f"{count}B"


def show_rate(bits: int) -> str:
    """Format a number of bits per second, exact and as short as possible."""
    for unit, scale in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if bits % scale == 0 and bits:
            return f"{bits // scale}{unit}"
    return f"{bits}bit"


def process_cpu_ns(pid: int) -> int:
    """Return the CPU time, user and system, of all threads of another process, in ns."""
    # This is how the kernel encodes a process's CPU clock (clock_getcpuclockid(3)).
    per_process_clock = 2
    return time.clock_gettime_ns(~pid << 3 | per_process_clock)


def total_cpu_ns(pids: Sequence[int]) -> int:
    """Return the CPU time of processes together, in ns."""
    return sum(process_cpu_ns(pid) for pid in pids)


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """CPU time of the whole machine since it booted, in kernel ticks."""

    busy: int
    all: int

    def __sub__(self, before: Ticks) -> Ticks:
        return Ticks(busy=self.busy - before.busy, all=self.all - before.all)

    def __add__(self, other: Ticks) -> Ticks:
        return Ticks(busy=self.busy + other.busy, all=self.all + other.all)

    @property
    def fraction(self) -> float:
        """Return the busy fraction of all cores; 0 if no time has passed."""
        return self.busy / self.all if self.all else 0.0


def parse_ticks(stat: str) -> Ticks:
    """Parse the first line of /proc/stat."""
    values = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    idle = values[3] + values[4]  # Idle, and waiting for a disk.
    return Ticks(busy=sum(values) - idle, all=sum(values))


def ticks() -> Ticks:
    return parse_ticks(Path("/proc/stat").read_text())


def resident_bytes(pid: int) -> int:
    """Return the resident memory that a process shares with no file and no other process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/{pid}/smaps_rollup has no line Anonymous")


def hardware() -> str:
    """Describe CPU, cores and memory in a line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def series_hash() -> str:
    """Return a hash of everything that this project adds to BytePS: its patches and its overlay.

    Returns "not known" if they are missing, for example in a copy of only the benchmarks.
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
    """Return the running script's path in the repository."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def metadata(arguments: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a measurement, without the plan."""
    engine = {k: v for k, v in sorted(os.environ.items()) if k.startswith("BYTEPS_")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([_program(), *arguments]),
        "byteps": f"{_version('megatron-byteps')}, patches and overlay {series_hash()}",
        "torch": _version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "hardware": hardware(),
        "settings": " ".join(f"{k}={v}" for k, v in engine.items()) or "defaults",
    }


def topology_text(topology: Topology) -> str:
    """Describe hosts and links."""
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
        origin = "as the job was started" if topology.in_job else "on this machine's loopback"
        return f"{what}, {origin}{link}"
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
    """Return the `#` lines above a table."""
    backends = " and ".join(plan.backends)
    lines = {
        **meta,
        "topology": topology_text(plan.topology),
        "launches": f"{plan.launches} of {backends}, interleaved; slowest rank counts; GB is 1e9",
    }
    return "\n".join(f"# {name}: {text}" for name, text in lines.items())
