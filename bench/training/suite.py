#!/usr/bin/env python3
"""Times whole training steps on several emulated clusters, and checks thresholds.

Each experiment is a run of bench/train_bench.py: a GPT of a billion parameters on 4 or 8 hosts of
1, 2, 4 or 8 GPUs, links of 10 to 100 Gbit/s, through BytePS and by torch.distributed, unsharded and
with the distributed optimizer. It is meant for a machine with 8 GPUs; if hosts outnumber GPUs, they
share them. Experiments named optimizer-... have a smaller model, and also the optimizer on the
servers; of these, a machine without GPUs runs those with links of up to 100 Mbit/s. Tables are
printed as they are measured; the last table, in Markdown, has all experiments.

  bench/training/suite.py                                      all of it, about an hour
  bench/training/suite.py --only 4+4-10gbit 8+8-10gbit         some of it
  bench/training/suite.py --budget 480                         begin nothing new after 480 s
  bench/training/suite.py --only 4+4-10gbit -- --hidden-size 64 --num-layers 2      a smaller model
  bench/training/suite.py --only optimizer-4+4-10gbit          on two GPUs

Exit status: 0 all thresholds are reached; 1 a threshold was missed, a run failed or was not begun;
2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit.emulation import EmulationError
from bench.kit.processes import LaunchError, become_interruptible
from bench.kit.record import metadata
from bench.training import run as train_bench
from bench.training.run import Trained, show_memory
from scripts import prepare_data
from scripts import train as train_script
from scripts.progress import pipes

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
HEAD = (
    "hosts x GPUs + servers",
    "links",
    "backend",
    "ms per step",
    "min..max",
    "tokens/s",
    "GPU GB",
    "busy",
)
# With a billion parameters in the layers, a step waits for its gradients even on fast GPUs.
MODEL = """
    --bf16 --num-layers 20 --hidden-size 2048 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce
""".split()  # noqa: SIM905

# 340 million parameters fit four or eight ranks on two GPUs.
SMALLER = """
    --bf16 --num-layers 12 --hidden-size 1536 --num-attention-heads 12
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce
""".split()  # noqa: SIM905
# 12.6 million parameters and few tokens suit links of 100 Mbit/s and slower.
ON_CPU = """
    --bf16 --num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 4
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce --ddp-bucket-size 3200000
""".split()  # noqa: SIM905

FP32 = ("byteps", "all-reduce", "sharded")
SENT_AS_BF16 = ("byteps-wire-bf16", "sharded-bf16")
OPTIMIZER = ("servers-bf16", "sharded-bf16", "sharded")
RECIPE = ("sharded-bf16-on-servers", "sharded-bf16")
OPTIMIZER_BY_HOST = ("servers-bf16", "servers-bf16-flat", "sharded-bf16", "sharded")
BY_HOST = ("byteps-by-host-bf16", "by-host-bf16", "sharded-bf16")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Threshold of the relative speed of two ways."""

    ours: str
    theirs: str
    low: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Model that is trained in several ways on a cluster."""

    hosts: int
    ranks_per_host: int = 1
    rate: str
    """Rate of each host's link in each direction."""
    ways: tuple[str, ...]
    bars: tuple[Bar, ...] = ()
    label: str = ""
    """Distinguishes experiments on equal clusters."""
    model: Sequence[str] = tuple(MODEL)
    """Arguments of Megatron."""
    on_gpu: bool = True

    @property
    def name(self) -> str:
        many = f"{self.ranks_per_host}-a-host-" if self.ranks_per_host > 1 else ""
        return f"{self.label and self.label + '-'}{many}{self.hosts}+{self.hosts}-{self.rate}"

    def words(self, rest: Sequence[str] = ()) -> list[str]:
        """Return the arguments of bench/train_bench.py: as many servers as hosts, each on its own
        host."""
        return [
            *("--workers", str(self.hosts * self.ranks_per_host)),
            *("--ranks-per-host", str(self.ranks_per_host)),
            *("--servers", str(self.hosts), "--emulate", f"{2 * self.hosts}@{self.rate}"),
            *("--ways", ",".join(self.ways)),
            *rest,
        ]


def _bars(*bars: tuple[str, str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(ours=ours, theirs=theirs, low=low) for ours, theirs, low in bars)


_PLAIN = _bars(
    ("byteps", "all-reduce", 1.0),
    ("byteps-wire-bf16", "all-reduce", 1.0),
    ("byteps-wire-bf16", "sharded-bf16", 1.0),
)

_ON_SERVERS = _bars(
    ("servers-bf16", "sharded-bf16", 1.35),
    ("servers-bf16", "sharded", 2.0),
)
_ON_MORE_SERVERS = _bars(
    ("servers-bf16", "sharded-bf16", 1.55),
    ("servers-bf16", "sharded", 2.0),
)
# With two ranks per host, the backend flat sends twice as many bytes over each NIC.
_ON_SERVERS_BY_HOST = (*_ON_SERVERS, *_bars(("servers-bf16", "servers-bf16-flat", 1.6)))

STEPS: tuple[Steps, ...] = (
    Steps(
        hosts=4,
        rate="10gbit",
        ways=(*FP32, *SENT_AS_BF16),
        bars=_bars(
            ("byteps", "all-reduce", 1.45),
            ("byteps-wire-bf16", "all-reduce", 2.7),
            ("byteps-wire-bf16", "sharded", 1.25),
            ("byteps-wire-bf16", "sharded-bf16", 1.0),
        ),
    ),
    Steps(
        hosts=4,
        ranks_per_host=2,
        rate="10gbit",
        model=SMALLER,
        ways=(*BY_HOST, "sharded"),
        bars=_bars(
            ("byteps-by-host-bf16", "by-host-bf16", 1.25),
            ("byteps-by-host-bf16", "sharded-bf16", 1.25),
            ("byteps-by-host-bf16", "sharded", 1.8),
        ),
    ),
    Steps(hosts=8, rate="10gbit", ways=(*FP32, *SENT_AS_BF16), bars=_PLAIN),
    *(
        Steps(hosts=hosts, rate=rate, ways=("byteps", "all-reduce", *SENT_AS_BF16), bars=_PLAIN)
        for rate in ("25gbit", "100gbit")
        for hosts in (4, 8)
    ),
    *(
        Steps(
            hosts=4,
            ranks_per_host=ranks,
            rate=rate,
            ways=BY_HOST,
            bars=_bars(
                ("byteps-by-host-bf16", "by-host-bf16", 1.0),
                ("byteps-by-host-bf16", "sharded-bf16", 1.0),
            ),
        )
        for ranks, rates in ((4, ("10gbit", "25gbit", "100gbit")), (8, ("25gbit",)))
        for rate in rates
    ),
    # The optimizer is on the servers, with a norm that is never clipped.
    *(
        Steps(
            label="optimizer",
            hosts=hosts,
            rate=rate,
            model=(*model, "--clip-grad", "1e6"),
            on_gpu=model is SMALLER,
            ways=OPTIMIZER,
            bars=bars,
        )
        for hosts, rate, model, bars in (
            (4, "10gbit", SMALLER, _ON_SERVERS),
            (4, "100mbit", ON_CPU, _ON_SERVERS),
            (8, "50mbit", ON_CPU, _ON_MORE_SERVERS),
        )
    ),
    *(
        Steps(
            label="optimizer",
            hosts=4,
            ranks_per_host=2,
            rate=rate,
            model=(*model, "--clip-grad", "1e6"),
            on_gpu=model is SMALLER,
            ways=OPTIMIZER_BY_HOST,
            bars=_ON_SERVERS_BY_HOST,
        )
        for rate, model in (("10gbit", SMALLER), ("100mbit", ON_CPU))
    ),
    # The optimizer is on the servers. Pushes and pulls travel in eight bits.
    Steps(
        label="few-bits",
        hosts=4,
        ranks_per_host=2,
        rate="10gbit",
        model=(*SMALLER, "--clip-grad", "1e6"),
        ways=("servers-int8", "servers-bf16", "sharded-bf16"),
        bars=_bars(("servers-int8", "servers-bf16", 1.5), ("servers-int8", "sharded-bf16", 2.2)),
    ),
    # These recipes shard the optimizer, and add only --dpu-optimizer.
    *(
        Steps(
            label="recipe",
            hosts=4,
            ranks_per_host=ranks,
            rate=rate,
            model=(*model, "--clip-grad", "1e6"),
            on_gpu=model is SMALLER,
            ways=RECIPE,
            bars=_bars((*RECIPE, low)),
        )
        for ranks, rate, model, low in (
            (2, "10gbit", SMALLER, 1.45),
            (1, "10gbit", SMALLER, 1.3),
            (2, "100mbit", ON_CPU, 1.45),
        )
    ),
)


def choose(names: Sequence[str] = (), *, on_gpu: bool = True) -> list[Steps]:
    """Return the named experiments, in the order named. Without names, return all for such a
    machine. Raises ValueError for an unknown name."""
    known = {steps.name: steps for steps in STEPS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no experiment {name!r}, but {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [steps for steps in STEPS if steps.on_gpu == on_gpu]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(steps.name for steps in STEPS)
    add("--only", nargs="+", default=[], metavar="NAME", help=f"in this order, of {names}")
    add("--launches", type=int, default=1, help="of each backend, interleaved (default: 1)")
    add("--steps", type=int, default=5, help="of a launch (default: 5)")
    add("--warmup", type=int, default=1, help="of these, not timed (default: 1)")
    add("--timeout", type=float, default=300.0, help="s for a launch, against hangs")
    add("--budget", type=float, metavar="S", help="begin nothing new after so long")
    add("--tree", type=Path, default=ROOT / "build" / "Megatron-LM", help="patched Megatron-LM")
    add("--json", type=Path, metavar="FILE", help="everything, written after each experiment")
    add("megatron", nargs="*", metavar="-- ARGUMENTS", help="for Megatron; they win")
    options = parser.parse_args(arguments)
    options.begun = time.monotonic()
    try:
        options.chosen = choose(options.only, on_gpu=train_script.on_gpu())
    except ValueError as error:
        parser.error(str(error))
    return options


def words_of(steps: Steps, options: argparse.Namespace) -> list[str]:
    """Return the command line of bench/train_bench.py."""
    own = [
        *("--launches", str(options.launches), "--steps", str(options.steps)),
        *("--warmup", str(options.warmup), "--timeout", str(options.timeout)),
        *("--tree", str(options.tree), "--", *steps.model, *options.megatron),
    ]
    return steps.words(own)


def measure(options: argparse.Namespace) -> Iterator[tuple[Steps, list[Trained], bool]]:
    """Run experiments one after the other. A failure does not stop the rest. Yield each with its
    launches (empty: it failed or was not begun), and whether their losses agree."""
    for steps in options.chosen:
        if options.budget is not None and time.monotonic() - options.begun > options.budget:
            print(f"{steps.name}: not begun, since --budget is used up", flush=True)
            yield steps, [], False
            continue
        bench = train_bench.parse(words_of(steps, options))
        try:
            done = train_bench.run(bench)
        except (LaunchError, EmulationError, prepare_data.DataError) as error:
            print(f"{steps.name} FAILED: {error}", flush=True)
            yield steps, [], False
            continue
        print(f"== {steps.name}")
        agreed = train_bench.report(done, bench, words_of(steps, options)) == 0
        sys.stdout.flush()
        yield steps, done, agreed


def rows_of(steps: Steps, done: Sequence[Trained]) -> list[tuple[str, ...]]:
    """Return a row for each way."""
    rows: list[tuple[str, ...]] = []
    for way in steps.ways:
        own = [launch for launch in done if launch.backend == way]
        medians = [launch.median_s for launch in own]
        each = [step for launch in own for step in launch.step_s]
        middle = statistics.median(medians)
        rows.append(
            (
                f"{steps.hosts} x {steps.ranks_per_host} + {steps.hosts}",
                steps.rate.replace("gbit", " Gbit/s"),
                way,
                f"{middle * 1e3:.0f}",
                f"{min(each) * 1e3:.0f}..{max(each) * 1e3:.0f}",
                f"{own[0].tokens / middle:,.0f}",
                show_memory(own),
                f"{max(launch.busy for launch in own):.0%}",
            )
        )
    return rows


def verdict(steps: Steps, bar: Bar, done: Sequence[Trained]) -> tuple[bool, str]:
    """Return whether a threshold is reached, and a line about it."""
    value, low, high = train_bench.ratio(done, (bar.ours, bar.theirs))
    ok = value >= bar.low
    text = (
        f"{'ok    ' if ok else 'MISSED'} {steps.name}: {bar.ours} over {bar.theirs} "
        f"{value:.3f} ({low:.3f}..{high:.3f}), threshold {bar.low:g}"
    )
    return ok, text


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.tree / "pretrain_dpu_gpt.py").is_file():
        print(f"train_suite.py: {options.tree} is no patched Megatron-LM: run `make setup`")
        return 1
    good = True
    table: list[tuple[str, ...]] = [HEAD]
    verdicts: list[str] = []
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "meta": metadata(sys.argv[1:] if arguments is None else arguments),
        "experiments": {},
    }
    try:
        for steps, done, agreed in measure(options):
            good &= agreed
            if not done:
                continue
            table += rows_of(steps, done)
            judged = [verdict(steps, bar, done) for bar in steps.bars]
            good &= all(ok for ok, _ in judged)
            verdicts += [text for _, text in judged]
            record["experiments"][steps.name] = [vars(launch) for launch in done]
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    print("\n".join(["", *pipes(table), "", *verdicts]))
    return 0 if good else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
