"""The experiments of fast links, with plain sockets and NCCL's or gloo's ring in the same run.

Thresholds are what links of 10 to 100 Gbit/s must give; shares are of what plain sockets carry in
the same pattern, interleaved with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.kit.plan import Case, Plan, Topology
from bench.kit.units import parse_rate, parse_size
from bench.pushpull.experiment import Experiment
from bench.pushpull.gates import Gate

PROCESSORS = 16
_LAUNCHES = 5
_LARGE = "256MiB"
# The kernel's copies take most of the cores' time, and plain sockets make the same ones.
_MOST_CPU = 1.1


def _case(size: str, *, iters: int, warmup: int = 2) -> Case:
    return Case(size=parse_size(size), dtype="float32", iters=iters, warmup=warmup)


def _experiment(
    name: str,
    why: str,
    topology: Topology,
    cases: Sequence[Case],
    gates: Sequence[Gate],
    *,
    ring: str | None,
) -> Experiment:
    others = ("sockets",) if ring is None else ("sockets", ring)
    plan = Plan(
        cases=tuple(cases),
        topology=topology,
        backends=("byteps", *others),
        launches=_LAUNCHES,
        # Sums of loopback are of the host's memory: plain sockets know no other.
        device="cuda" if ring == "nccl" else "cpu",
        retries=_LAUNCHES if topology.emulated_hosts else 0,
        max_busy=0.95 if topology.emulated_hosts else 1.0,
    )
    return Experiment(name=name, why=why, plan=plan, gates=gates, processors=PROCESSORS)


def _loopback(workers: int, servers: int, gates: Sequence[Gate], case: Case) -> Experiment:
    return _experiment(
        f"{workers}+{servers}-loopback",
        "what the engine costs where no link limits",
        Topology(workers=workers, servers=servers),
        [case],
        gates,
        ring=None,
    )


def _links(
    name: str,
    why: str,
    hosts: int,
    rate: str,
    ring: str,
    cases: Sequence[Case],
    gates: Sequence[Gate],
) -> Experiment:
    """As many servers as workers, each on a host of its own."""
    topology = Topology(
        workers=hosts, servers=hosts, emulated_hosts=2 * hosts, link_bits=parse_rate(rate)
    )
    return _experiment(name, why, topology, cases, gates, ring=ring)


def _at_least(case: Case, base: str, low: float) -> Gate:
    return Gate(kind="ratio", case=case, base=base, low=low)


def experiments(ring: str) -> list[Experiment]:
    """All of them, with ``ring`` (``nccl`` or ``gloo``) as the all-reduce to compare with."""
    large = _case(_LARGE, iters=10)
    small = _case("4KiB", iters=300, warmup=20)
    middle = [_case("1MiB", iters=100, warmup=5), _case("16MiB", iters=30, warmup=3)]
    return [
        _loopback(
            1,
            1,
            [Gate(kind="speed", case=large, low=5.0), _at_least(large, "sockets", 0.7)],
            large,
        ),
        _loopback(1, 4, [Gate(kind="speed", case=large, low=10.0)], large),
        _loopback(
            2,
            2,
            [
                Gate(kind="cpu-seconds", case=large, high=1.5),
                Gate(kind="cpu", case=large, base="sockets", high=_MOST_CPU),
            ],
            large,
        ),
        _links(
            "4+4-10gbit",
            "the links allow 1.5 times a ring's speed",
            4,
            "10gbit",
            ring,
            [large],
            [Gate(kind="of-limit", case=large, low=0.958), _at_least(large, ring, 1.479)],
        ),
        _links(
            "4+4-25gbit",
            "the same on links of today's clusters",
            4,
            "25gbit",
            ring,
            [large],
            [_at_least(large, "sockets", 0.95), _at_least(large, ring, 1.35)],
        ),
        _links(
            "2+2-25gbit-small",
            "latency: two workers, whose ring sends as much as servers need",
            2,
            "25gbit",
            ring,
            [small, *middle],
            [
                _at_least(small, ring, 1 / 1.5),
                *(_at_least(case, ring, 1.0) for case in middle),
            ],
        ),
        _links(
            "2+2-100gbit",
            "links so fast that cores limit too",
            2,
            "100gbit",
            ring,
            [large],
            [_at_least(large, "sockets", 0.8)],
        ),
    ]
