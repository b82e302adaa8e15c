"""CPU time and memory, as the kernel counts them."""

from __future__ import annotations

import os
import subprocess
import sys

from bench.kit import machine


def test_another_process_clock_counts_what_it_used() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        first = machine.process_cpu_ns(child.pid)
        assert first >= 0.3e9
        assert machine.total_cpu_ns([child.pid, child.pid]) >= 2 * first
        child.communicate(b"\n")


def test_busy_is_all_but_idle() -> None:
    one = machine.parse_ticks("cpu  10 0 5 80 5 0 0 0 0 0\ncpu0 1 1 1 1\n")
    other = machine.parse_ticks("cpu  40 0 15 130 15 0 0 0 0 0\n")
    assert (other - one).fraction == 0.4
    assert machine.Ticks(busy=0, all=0).fraction == 0.0


def test_memory_of_its_own() -> None:
    before = machine.resident_bytes(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 32)
    assert machine.resident_bytes(os.getpid()) - before > 24 << 20
    assert len(held) == 32 << 20
