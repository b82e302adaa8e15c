#!/usr/bin/env python3
"""Times sums of tensors over all workers, through BytePS's servers, gloo's ring, or NCCL.

The backend "sockets" sums nothing: plain sockets move the same bytes between the same processes.

Every result is compared with a closed form. The slowest rank determines the time of an iteration.
Several backends and launches are interleaved, and ratios are shown with their spread.

  bench/pushpull_bench.py                                          two workers on loopback
  bench/pushpull_bench.py --workers 4 --servers 4 --emulate 8@500mbit --sizes 64MiB \
      --iters 5 --launches 5                                       links of 500 Mbit/s
  torchrun --nproc-per-node 2 bench/pushpull_bench.py              an existing job

docs/results/method.md explains each figure.

Exit status: 0 success; 1 a wrong result, a missed threshold, or a failed process; 2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.emulation import EmulationError, remove_stale
from bench.kit.plan import BACKENDS, DTYPE_BYTES, SAME, WIRE_BITS, Case, Plan, Topology
from bench.kit.processes import LaunchError, become_interruptible
from bench.kit.record import header, metadata, parse_hosts, parse_rate, parse_size, sweep
from bench.pushpull.launch import MAX_BUSY, Run, run_in_cluster, run_plan, write
from bench.pushpull.tables import Gate, gate_table, judge_all, ratio_table, result_table
from scripts.progress import aligned

DEFAULT_SIZES = "4KiB,64KiB,1MiB,16MiB"


def parse(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is summed")
    what.add_argument("--sizes", metavar="LIST", help=f"such as {DEFAULT_SIZES} (the default)")
    what.add_argument("--min", metavar="SIZE", help="sweep from this size")
    what.add_argument("--max", metavar="SIZE", help="to this one")
    what.add_argument("--factor", type=float, default=4.0, help="by this factor (default: 4)")
    what.add_argument(
        "--dtype", default="float32", metavar="LIST", help=f"of {', '.join(DTYPE_BYTES)}"
    )
    what.add_argument(
        "--wire-dtype",
        default=SAME,
        metavar="LIST",
        help=f"in which BytePS sends float32: of {SAME} (the default), {', '.join(WIRE_BITS)}",
    )
    what.add_argument(
        "--tensors", type=int, default=1, help="split each size into so many, summed at once"
    )
    what.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--backends", default="byteps,gloo", metavar="LIST", help=f"of {', '.join(BACKENDS)}"
    )
    how.add_argument(
        "--flows", type=int, default=4, help="of sockets, between two processes (default: 4)"
    )
    how.add_argument("--iters", type=int, default=20, help="timed iterations (default: 20)")
    how.add_argument("--warmup", type=int, default=2, help="iterations before them (default: 2)")
    how.add_argument("--launches", type=int, default=1, help="of each backend, interleaved")
    how.add_argument(
        "--max-busy",
        type=float,
        help="repeat a launch that had a larger part of the cores busy "
        f"(default: {MAX_BUSY} with --emulate, else 1)",
    )
    how.add_argument("--retries", type=int, help="at most so often (default: as --launches)")
    how.add_argument("--timeout", type=float, default=600.0, help="s for a launch, against hangs")

    where = parser.add_argument_group(
        "where it runs",
        "Processes are started on this machine's loopback, or with --emulate in network namespaces "
        "of their own. Under torchrun, or with RANK and WORLD_SIZE set, every rank runs this "
        "program instead, and BytePS's cluster is that of the DMLC_* variables.",
    )
    where.add_argument("--workers", type=int, default=2)
    where.add_argument("--servers", type=int, default=1)
    where.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="R", help="workers that share a host"
    )
    where.add_argument(
        "--uneven",
        type=int,
        default=1,
        metavar="N",
        help="connections with each server of one rank of each host, the others have 1",
    )
    where.add_argument(
        "--servers-per-machine",
        type=int,
        default=1,
        metavar="N",
        help="processes on each of --servers: their weight compared with --local-servers",
    )
    where.add_argument(
        "--local-servers",
        type=int,
        default=0,
        metavar="N",
        help="on each of the workers' hosts, and --servers on hosts of their own",
    )
    where.add_argument("--colocate", action="store_true", help="servers on the workers' hosts")
    where.add_argument("--emulate", metavar="HOSTS@RATE", help="such as 8@500mbit; needs root")
    where.add_argument(
        "--nics-per-host",
        type=int,
        default=1,
        metavar="N",
        help="NICs of each emulated host, each with the rate of --emulate",
    )
    where.add_argument("--link", metavar="RATE", help="of real links, to compute their limit")
    where.add_argument("--mtu", type=int, default=9000, help="of emulated links")
    where.add_argument("--congestion-control", default="cubic", help="on emulated hosts")
    where.add_argument("--no-fair-queue", action="store_true", help="emulated links: one queue")
    where.add_argument(
        "--remove-stale", action="store_true", help="delete what killed runs left, and stop"
    )

    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, with raw samples")
    out.add_argument("--plot", type=Path, metavar="DIR", help="pictures")
    out.add_argument("--min-of-limit", type=float, metavar="PART", help="threshold for BytePS")
    out.add_argument("--min-ratio", type=float, metavar="X", help="threshold: speed over others'")
    out.add_argument("--max-ratio", type=float, metavar="X", help="for what must come out even")
    out.add_argument("--max-cpu-ratio", type=float, metavar="X", help="threshold: CPU time per GB")
    return parser.parse_args(arguments)


def _sizes(options: argparse.Namespace) -> list[int]:
    if options.min or options.max:
        if not (options.min and options.max) or options.sizes:
            raise ValueError("give --min and --max together, or --sizes")
        return sweep(parse_size(options.min), parse_size(options.max), options.factor)
    return [parse_size(text) for text in (options.sizes or DEFAULT_SIZES).split(",")]


def in_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def _topology(options: argparse.Namespace, environment: Mapping[str, str]) -> Topology:
    workers, servers, hosts, bits = options.workers, options.servers, 0, 0
    if in_cluster(environment):
        if options.emulate:
            raise ValueError("--emulate starts its own processes: unset RANK and WORLD_SIZE")
        workers = int(environment["WORLD_SIZE"])
        given = environment.get("DMLC_NUM_SERVER", environment.get("BYTEPS_EMBEDDED_SERVERS"))
        servers = int(given) if given else 1
    if options.emulate:
        hosts, bits = parse_hosts(options.emulate)
    elif options.link:
        bits = parse_rate(options.link)
    return Topology(
        workers=workers,
        servers=servers,
        ranks_per_host=options.ranks_per_host,
        uneven=options.uneven,
        colocate=options.colocate,
        servers_per_machine=options.servers_per_machine,
        local_servers=options.local_servers,
        in_job=in_cluster(environment),
        emulated_hosts=hosts,
        link_bits=bits,
        nics_per_host=options.nics_per_host,
        mtu=options.mtu,
        congestion_control=options.congestion_control,
        fair_queue=not options.no_fair_queue,
    )


def make_plan(options: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """Build the plan from the options and, under a launcher, its variables. Raises ValueError."""
    cases = tuple(
        Case(
            size=size,
            dtype=dtype,
            tensors=options.tensors,
            iters=options.iters,
            warmup=options.warmup,
            wire=wire,
        )
        for dtype in options.dtype.split(",")
        for wire in options.wire_dtype.split(",")
        for size in _sizes(options)
    )
    max_busy = options.max_busy
    if max_busy is None:
        max_busy = MAX_BUSY if options.emulate else 1.0
    return Plan(
        cases=cases,
        topology=_topology(options, environment),
        backends=tuple(options.backends.split(",")),
        launches=options.launches,
        device=options.device,
        max_busy=max_busy,
        retries=options.launches if options.retries is None else options.retries,
        timeout_s=options.timeout,
        flows=options.flows,
    )


def demand_device(device: str) -> None:
    """Raise ValueError if this machine does not have the device."""
    if device != "cuda":
        return
    import torch  # imported here, because the import takes seconds

    if torch.cuda.device_count() == 0:
        raise ValueError(
            "--device cuda: torch sees no GPU here (nvidia-smi, CUDA_VISIBLE_DEVICES, a torch that "
            "was built with CUDA); --device cpu measures tensors in memory"
        )


def make_gates(options: argparse.Namespace, plan: Plan) -> list[Gate]:
    """Return the gates of the options, for every case. Raises ValueError."""
    others = [backend for backend in plan.backends if backend != "byteps"]
    ratios = options.min_ratio is not None or options.max_ratio is not None
    bars = ratios or options.max_cpu_ratio is not None or options.min_of_limit is not None
    if bars and "byteps" not in plan.backends:
        raise ValueError("thresholds apply to byteps: add it to --backends")
    if (ratios or options.max_cpu_ratio is not None) and not others:
        raise ValueError("a threshold on a ratio needs a backend to compare byteps with")
    if options.min_of_limit is not None and not plan.topology.link_bits:
        raise ValueError("--min-of-limit needs the links' rate: --emulate or --link")
    gates = []
    for case in plan.cases:
        if options.min_of_limit is not None:
            gates.append(Gate(kind="of-limit", case=case, low=options.min_of_limit))
        for other in others:
            if ratios:
                low, high = options.min_ratio, options.max_ratio
                gates.append(Gate(kind="ratio", case=case, base=other, low=low, high=high))
            if options.max_cpu_ratio is not None:
                gates.append(Gate(kind="cpu", case=case, base=other, high=options.max_cpu_ratio))
    return gates


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, __doc__ or "")
    if options.remove_stale:
        print("\n".join(remove_stale()) or "nothing was left behind")
        return 0
    try:
        plan = make_plan(options, os.environ)
        gates = make_gates(options, plan)
        demand_device(plan.device)
    except ValueError as error:
        print(f"pushpull_bench.py: {error}", file=sys.stderr)
        return 2
    try:
        run = measure(plan)
    except (LaunchError, EmulationError) as error:
        print(f"pushpull_bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    if run is None:  # another rank reports
        return 0
    return report(run, gates, options, sys.argv[1:] if arguments is None else arguments)


def measure(plan: Plan) -> Run | None:
    """Run the plan. Return None on ranks of a job that do not report."""
    return run_in_cluster(plan) if in_cluster(os.environ) else run_plan(plan)


def report(
    run: Run, gates: Sequence[Gate], options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    """Print and write the results. Return the exit status."""
    meta = metadata(arguments)
    print(header(meta, run.plan))
    if not run.quiet:
        print("# machine: too busy in every round; none is left out")
    print(aligned(result_table(run)))
    if len(run.plan.backends) > 1:
        print("\n" + aligned(ratio_table(run)))
    verdicts = judge_all(gates, run)
    if verdicts:
        print("\n" + aligned(gate_table(verdicts)))
    if options.json:
        write([run], meta, options.json)
    if options.plot:
        from bench.pushpull.suite import draw

        draw(run, options.plot)
    return 1 if run.wrong or not all(verdict.ok for verdict in verdicts) else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
