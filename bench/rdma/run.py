#!/usr/bin/env python3
"""Measures the RDMA transport in a virtual machine with soft-RoCE, and compares it with thresholds.

Measures, interleaved and repeated: perftest's plain writes, push_pull with one plane and with two,
and the delay of a control message while values fill the link. At the end it measures the CPU time
of an idle job. docs/results/method.md explains what such figures show.

Exit status: 0 success; 1 a measurement failed or a threshold was missed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.kit.processes import become_interruptible
from bench.kit.record import parse_size, show_size
from scripts.progress import Progress, aligned, pipes, put_between
from tests.rdma.vm.guest import Guest, address_of, compiled
from tests.rdma.vm.kernel import VmError

REPOSITORY = Path(__file__).resolve().parents[2]
BEGIN = "<!-- results: written by bench/rdma/run.py, not by hand -->"
END = "<!-- end of results -->"
LEAST_SHARE = 0.90
"""Fraction of ib_write_bw's rate that push_pull must reach with two planes."""
LEAST_GAIN = 3.0
"""Factor by which two planes must reduce the p99 of a control round trip."""
MOST_IDLE = 0.02
"""Largest fraction of a core that an idle process may use."""

Table = list[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Bar:
    what: str
    must: str
    value: float
    ok: bool


def goodput_table(result: Mapping[str, Any]) -> Table:
    base = result["goodput"]["ib_write_bw"]
    lines: Table = [("transport", "MB/s, median", "min..max", "of ib_write_bw")]
    for name, values in result["goodput"].items():
        shares = [value / other for value, other in zip(values, base, strict=True)]
        figures = [value / 1e6 for value in values]
        spread = f"{min(figures):.1f}..{max(figures):.1f}"
        lines.append((name, f"{median(figures):.1f}", spread, f"{median(shares):.2f}"))
    return lines


def delay_table(result: Mapping[str, Any]) -> Table:
    lines: Table = [("transport", "pings", "p50 ms", "p99 ms, median", "min..max")]
    for name, runs in result["delays"].items():
        p50, p99 = ([run[key] * 1e3 for run in runs] for key in ("p50", "p99"))
        pings = str(int(sum(run["pings"] for run in runs)))
        spread = f"{min(p99):.1f}..{max(p99):.1f}"
        lines.append((name, pings, f"{median(p50):.1f}", f"{median(p99):.1f}", spread))
    return lines


def idle_table(result: Mapping[str, Any]) -> Table:
    names = ("scheduler", "server", "worker")
    lines: Table = [("transport", *(f"{name}, of a core" for name in names))]
    for transport, spent in result["idle"].items():
        lines.append((transport, *(f"{spent[name]:.2%}" for name in names)))
    return lines


def judge(result: Mapping[str, Any]) -> list[Bar]:
    goodput, delays = result["goodput"], result["delays"]
    pairs = zip(goodput["two planes"], goodput["ib_write_bw"], strict=True)
    share = median(ours / theirs for ours, theirs in pairs)
    together, two = ([run["p99"] for run in delays[name]] for name in ("one plane", "two planes"))
    gain = median(a / b for a, b in zip(together, two, strict=True))
    idle = max(result["idle"]["rdma"].values())
    return [
        Bar(
            what="push_pull with two planes, of ib_write_bw",
            must=f">= {LEAST_SHARE:.2f}",
            value=share,
            ok=share >= LEAST_SHARE,
        ),
        Bar(
            what="p99 of control amid data: one plane over two",
            must=f">= {LEAST_GAIN:.1f}",
            value=gain,
            ok=gain >= LEAST_GAIN,
        ),
        Bar(
            what="busiest idle process, of a core",
            must=f"<= {MOST_IDLE:.2f}",
            value=idle,
            ok=idle <= MOST_IDLE,
        ),
    ]


def bar_table(bars: Sequence[Bar]) -> Table:
    lines: Table = [("threshold", "must be", "is", "")]
    lines += [(b.what, b.must, f"{b.value:.3f}", "ok" if b.ok else "MISS") for b in bars]
    return lines


def titled(result: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Return every table with its title."""
    spec = result["spec"]
    size, runs = show_size(spec["size"]), spec["repetitions"]
    amount = f"{spec['partitions']} partitions of {size}, a window of {show_size(spec['window'])}"
    return [
        (
            f"Both directions, 1 worker and 1 server, {amount}; {runs} runs of each, interleaved",
            goodput_table(result),
        ),
        (
            f"A control message and its answer while 16 values of {size} are in flight",
            delay_table(result),
        ),
        (f"CPU time while nothing is reduced, for {spec['idle_s']:g} s", idle_table(result)),
        ("Thresholds", bar_table(judge(result))),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1MiB", help="of a partition (default: %(default)s)")
    parser.add_argument("--partitions", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of a run (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--writes", type=int, default=200, help="perftest's (default: %(default)s)")
    parser.add_argument(
        "--window", default="512KiB", help="BYTEPS_RDMA_WINDOW_BYTES (default: %(default)s)"
    )
    parser.add_argument("--ping-ms", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite its results")
    options = parser.parse_args(arguments)
    try:
        options.size = parse_size(options.size)
        options.window = parse_size(options.window)
    except ValueError as error:
        parser.error(str(error))
    if options.size % 4096 or min(options.partitions, options.rounds, options.repetitions) < 1:
        parser.error("sizes are whole pages, and there is at least one of everything")
    return options


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the guest. Return its result. Raises VmError."""
    names = ("size", "partitions", "rounds", "repetitions", "writes", "window", "ping_ms", "idle_s")
    spec = {name: getattr(options, name) for name in names}
    spec |= {"address": address_of(1)}
    (folder / "spec.json").write_text(json.dumps(spec))
    program = [sys.executable, "-m", "bench.rdma.inside", "spec.json", "result.json"]
    env = {"PATH": os.environ["PATH"], **compiled(("byteps.torch",))}
    with Progress("rdma") as shown, Guest(folder, program, env=env) as guest:
        shown.update("a virtual machine starts, and imports torch: a minute or two")
        begun = ""

        def tell(text: str) -> None:
            nonlocal begun
            *lines, begun = (begun + text).split("\n")
            for line in lines:
                shown.say(line, stream=sys.stdout)
                shown.update(f"the last figure was: {line}")

        if guest.wait(options.timeout, tell) != 0:
            raise VmError(f"the measurement failed\n{guest.last_words()}")
    return json.loads((folder / "result.json").read_text())


def metadata(options: argparse.Namespace) -> dict[str, str]:
    version = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    made = subprocess.run(version, capture_output=True, text=True, check=False).stdout.strip()
    model = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    guest = f"{os.cpu_count()} cores, {'KVM or ' if Path('/dev/kvm').exists() else ''}emulated"
    command = f"bench/rdma/run.py --size {options.size} --repetitions {options.repetitions}"
    return {
        "version": made,
        "host": model.strip(": \t"),
        "guest": f"{guest}; soft-RoCE to itself, MTU 4096",
        "command": command,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="rdma-bench-") as folder:
        try:
            result = run(options, Path(folder))
        except VmError as error:
            print(f"bench/rdma/run.py: {error}", file=sys.stderr)
            return 1
    meta = metadata(options)
    for name, text in meta.items():
        print(f"# {name}: {text}")
    document = [f"- {name}: {text}" for name, text in meta.items()]
    for title, table in titled(result):
        print(f"\n# {title}\n{aligned(table)}")
        document += ["", f"{title}:", "", *pipes(table)]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"schema": 1, "meta": meta, **result}, indent=1) + "\n")
    if options.markdown:
        put_between(options.markdown, BEGIN, END, "\n".join(["", *document, ""]))
    return 0 if all(bar.ok for bar in judge(result)) else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
