"""What the kernel says of this machine: CPU time, how busy it is, what it is made of."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def process_cpu_ns(pid: int) -> int:
    """CPU time, user and system, of all threads of another process."""
    # The kernel's encoding of "the clock of that process" (clock_getcpuclockid(3)).
    per_process_clock = 2
    return time.clock_gettime_ns(~pid << 3 | per_process_clock)


def total_cpu_ns(pids: Sequence[int]) -> int:
    """Sum over processes."""
    return sum(process_cpu_ns(pid) for pid in pids)


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """CPU time of the whole machine since it started, in the kernel's ticks."""

    busy: int
    all: int

    def __sub__(self, before: Ticks) -> Ticks:
        return Ticks(busy=self.busy - before.busy, all=self.all - before.all)

    def __add__(self, other: Ticks) -> Ticks:
        return Ticks(busy=self.busy + other.busy, all=self.all + other.all)

    @property
    def fraction(self) -> float:
        """Busy part, of all cores; 0 where no time has passed."""
        return self.busy / self.all if self.all else 0.0


def parse_ticks(stat: str) -> Ticks:
    """The first line of /proc/stat."""
    values = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    idle = values[3] + values[4]  # and waiting for a disk
    return Ticks(busy=sum(values) - idle, all=sum(values))


def ticks() -> Ticks:
    return parse_ticks(Path("/proc/stat").read_text())


def resident_bytes(pid: int) -> int:
    """Memory that a process has in RAM and shares with no file or other process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/{pid}/smaps_rollup has no line Anonymous")


def hardware() -> str:
    """Processor, cores and memory, in a line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"
