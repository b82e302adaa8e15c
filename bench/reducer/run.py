#!/usr/bin/env python3
"""Times a server's additions, each compared with a plain loop over the same memory.

It also times AdamW, which a server with parameters applies to each sum. It compiles
byteps/byteps/server/reducer.cc and optimizer/update.cc like the wheel does, and a program that runs
each of their functions in one thread. The working set exceeds the caches, because a server sums
data that the network has just written. The limit is a loop that reads and writes the same memory
and adds integers. For both, the fastest sample of the thread's CPU time counts, because other load
can only add time. Every operation's results are compared with independently computed values.

The threshold is a fraction of the plain loop's speed. On some CPUs arithmetic limits averages of
bf16: if a loop of the same arithmetic, compiled for this machine, is slower than the plain loop, it
is used instead. fp16 has no threshold, because many CPUs convert it slowly.

Exit status: 0 success; 1 a wrong result, a gated operation below --min-of-limit, or a failed build;
2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.kit import record
from bench.kit.record import parse_size, show_size
from scripts.children import captured
from scripts.progress import Progress, aligned

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("reducer_bench.cc")
OVERLAY = ROOT / "byteps"
BUILD = ROOT / "build" / "bench"
SCHEMA = 2
LIMIT_S = 540.0
UPDATE_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
GATED_TYPES = ("float32", "bfloat16")
HEAD = ("operation", "type", "read", "written", "GB/s", "plain GB/s", "of-limit", "gate", "#wrong")


class BenchError(Exception):
    """Error if the program could not be built or run. The text has its error output."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of an operation on a type."""

    operation: str
    type: str
    read: int
    """Bytes read per element."""
    written: int
    bytes: int
    """Bytes read and written per sample."""
    seconds: list[float]
    plain_seconds: list[float]
    """Samples of the plain loop, interleaved with the others."""
    arithmetic_seconds: list[float]
    """Samples of a plain loop of the same arithmetic; empty if only memory limits the operation."""
    wrong: int
    level: str
    """Instruction set for which the operation's loops were compiled, such as ``x86-64-v4``."""

    @property
    def speed(self) -> float:
        """Return bytes per second."""
        return self.bytes / min(self.seconds)

    @property
    def plain_speed(self) -> float:
        """Return bytes per second of the plain loop."""
        return self.bytes / min(self.plain_seconds)

    @property
    def of_limit(self) -> float:
        """Return the limit's time divided by the operation's time. The limit is the slower one of
        the plain loop and plain arithmetic."""
        computing = min(self.arithmetic_seconds, default=0.0)
        return max(min(self.plain_seconds), computing) / min(self.seconds)

    def misses(self, least: float | None) -> bool:
        """Return whether the operation misses the threshold."""
        return least is not None and self.type in GATED_TYPES and self.of_limit < least

    def cells(self, least: float | None) -> Sequence[str]:
        gated = least is not None and self.type in GATED_TYPES
        return (
            *(self.operation, self.type, str(self.read), str(self.written)),
            f"{self.speed / 1e9:.2f}",
            f"{self.plain_speed / 1e9:.2f}",
            f"{self.of_limit:.2f}",
            ("MISS" if self.misses(least) else "ok") if gated else "-",
            str(self.wrong),
        )


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def beyond_caches() -> int:
    """Return twice the largest cache's size, at least 256 MiB."""
    sizes = [256 << 20]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()  # for example 2048K
        if text.endswith("K"):
            sizes.append(2 * int(text[:-1]) << 10)
    return max(sizes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--partition", type=size, default=4_096_000, help="default: 4096000 bytes")
    add(
        "--working-set",
        type=size,
        default=beyond_caches(),
        help="bytes of all buffers together (default: twice the largest cache, at least 256MiB)",
    )
    add("--repeats", type=positive, default=5, help="samples (default: 5)")
    add("--min-of-limit", type=float, metavar="PART", help="threshold for each gated operation")
    add("--json", type=Path, metavar="FILE", help="all results, with raw samples")
    return parser.parse_args(arguments)


def build(folder: Path) -> Path:
    """Compile the reducer and the benchmark. Return the program's path. Raises BenchError."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    common = [compiler, "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra"]
    common += ["-I", str(OVERLAY)]
    reducer, program = folder / "reducer.o", folder / "reducer_bench"
    # The reducer is compiled as it ships, for any machine. The plain loop is compiled for this
    # machine.
    source = OVERLAY / "byteps" / "server" / "reducer.cc"
    run([*common, "-c", str(source), "-o", str(reducer)])
    updates, update = folder / "update.o", source.parent / "optimizer" / "update.cc"
    run([*common, *UPDATE_FLAGS, "-c", str(update), "-o", str(updates)])
    run([*common, native, str(SOURCE), str(reducer), str(updates), "-o", str(program)])
    return program


def run(command: Sequence[str]) -> str:
    """Return the output of a command. Raises BenchError."""
    try:
        done = captured(command, LIMIT_S)
    except OSError as error:
        raise BenchError(f"{command[0]}: {error}: install g++, or set CXX") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(
            f"{Path(command[0]).name} still ran after {LIMIT_S:g} s: take fewer --repeats, or "
            "a smaller --working-set"
        ) from error
    if done.returncode != 0:
        raise BenchError(
            f"`{' '.join(command)}` ended with exit status {done.returncode}\n{done.stderr.strip()}"
        )
    return done.stdout


def measure(options: argparse.Namespace) -> list[Result]:
    """Build and run. Raises BenchError."""
    numbers = (options.partition, options.working_set, options.repeats)
    with Progress("additions") as shown:
        shown.update("compiling")
        program = str(build(BUILD))
        shown.update("one thread adds")
        text = run([program, *map(str, numbers)])
    return [Result(**json.loads(line)) for line in text.splitlines()]


def metadata(options: argparse.Namespace, level: str) -> dict[str, str]:
    compiler = run([os.environ.get("CXX", "c++"), "--version"]).splitlines()[0]
    return {
        "hardware": record.hardware(),
        "compiler": compiler,
        "instructions": level,
        "partition": show_size(options.partition),
        "working set": show_size(options.working_set),
        "samples": f"{options.repeats}; the fastest counts; one thread, its CPU time",
        "units": "read and written: bytes of an element; GB/s: both together, 1e9 bytes",
    }


def report(results: Sequence[Result], options: argparse.Namespace, meta: dict[str, str]) -> int:
    """Print and write the results. Return the exit status."""
    least = options.min_of_limit
    print("\n".join(f"# {name}: {text}" for name, text in meta.items()))
    print(aligned([HEAD, *(result.cells(least) for result in results)]))
    if options.json:
        whole: dict[str, Any] = {"schema": SCHEMA, "meta": meta}
        whole["results"] = [{**asdict(result), "of_limit": result.of_limit} for result in results]
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result.wrong or result.misses(least) for result in results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        results = measure(options)
        return report(results, options, metadata(options, results[0].level))
    except BenchError as error:
        print(f"bench/reducer/run.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
