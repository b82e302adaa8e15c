"""Experiments of the project, and their thresholds: a quick set, the full set, fast links, and
GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from byteps import cost_model

from bench.kit.plan import ONE_NIC, WIRE_BITS, Case, Plan, Topology
from bench.kit.record import parse_rate, parse_size
from bench.pushpull.launch import MAX_BUSY
from bench.pushpull.tables import Experiment, Gate

BACKENDS = ("byteps", "gloo")
QUICK, FULL, GPU, FAST, FAST_GPU = "quick", "full", "gpu", "fast", "fast-gpu"
_FEW = 3  # number of launches
PROCESSORS = 16
"""Cores that experiments with fast links need."""
_FAST_LAUNCHES = 5
# The kernel's copies take most of the CPU time, and plain sockets make the same copies.
_MOST_CPU = 1.1


def _case(size: str, dtype: str = "float32", *, iters: int, warmup: int = 1) -> Case:
    return Case(size=parse_size(size), dtype=dtype, iters=iters, warmup=warmup)


def _fast_experiment(
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
        launches=_FAST_LAUNCHES,
        # On loopback the tensors are in host memory, because plain sockets have no other memory.
        device="cuda" if ring == "nccl" else "cpu",
        retries=_FAST_LAUNCHES if topology.emulated_hosts else 0,
        max_busy=0.95 if topology.emulated_hosts else 1.0,
    )
    return Experiment(name=name, why=why, plan=plan, gates=gates, processors=PROCESSORS)


def _fast_loopback(workers: int, servers: int, gates: Sequence[Gate], case: Case) -> Experiment:
    return _fast_experiment(
        f"{workers}+{servers}-loopback",
        "what the engine costs where no link limits",
        Topology(workers=workers, servers=servers),
        [case],
        gates,
        ring=None,
    )


def _fast_links(
    name: str,
    why: str,
    hosts: int,
    rate: str,
    ring: str,
    cases: Sequence[Case],
    gates: Sequence[Gate],
) -> Experiment:
    """Return an experiment with equally many workers and servers, each on a host of its own."""
    topology = Topology(
        workers=hosts, servers=hosts, emulated_hosts=2 * hosts, link_bits=parse_rate(rate)
    )
    return _fast_experiment(name, why, topology, cases, gates, ring=ring)


def _at_least(case: Case, base: str, low: float) -> Gate:
    return Gate(kind="ratio", case=case, base=base, low=low)


def _fast(ring: str) -> list[Experiment]:
    """Return the experiments with fast links. A run also has plain sockets and ``ring`` (``nccl``
    or ``gloo``).

    Thresholds are for links of 10 to 100 Gbit/s. Fractions are relative to plain sockets with the
    same traffic, interleaved with the engine.
    """
    large = _case("256MiB", iters=10, warmup=2)
    small = _case("4KiB", iters=300, warmup=20)
    short = _case("1MiB", iters=100, warmup=5)
    middle = _case("16MiB", iters=30, warmup=3)
    return [
        _fast_loopback(
            1,
            1,
            [Gate(kind="speed", case=large, low=5.0), _at_least(large, "sockets", 0.7)],
            large,
        ),
        _fast_loopback(1, 4, [Gate(kind="speed", case=large, low=10.0)], large),
        _fast_loopback(
            2,
            2,
            [
                Gate(kind="cpu-seconds", case=large, high=1.5),
                Gate(kind="cpu", case=large, base="sockets", high=_MOST_CPU),
            ],
            large,
        ),
        _fast_links(
            "4+4-10gbit",
            "the links allow 1.5 times a ring's speed",
            4,
            "10gbit",
            ring,
            [large],
            [Gate(kind="of-limit", case=large, low=0.958), _at_least(large, ring, 1.479)],
        ),
        _fast_links(
            "4+4-25gbit",
            "the same on links of today's clusters",
            4,
            "25gbit",
            ring,
            [large],
            [_at_least(large, "sockets", 0.95), _at_least(large, ring, 1.35)],
        ),
        _fast_links(
            "2+2-25gbit-small",
            "latency: two workers, whose ring sends as much as servers need",
            2,
            "25gbit",
            ring,
            [small, short, middle],
            [
                _at_least(small, ring, 1 / 1.35),
                _at_least(short, ring, 1 / 1.05),
                _at_least(middle, ring, 1 / 0.95),
            ],
        ),
        _fast_links(
            "2+2-100gbit",
            "links so fast that cores limit too",
            2,
            "100gbit",
            ring,
            [large],
            [_at_least(large, "sockets", 0.8)],
        ),
    ]


def _emulated(workers: int, servers: int, rate: str, *, colocate: bool = False) -> Topology:
    return Topology(
        workers=workers,
        servers=servers,
        colocate=colocate,
        emulated_hosts=workers + (0 if colocate else servers),
        link_bits=parse_rate(rate),
    )


def _plan(topology: Topology, cases: Sequence[Case], launches: int) -> Plan:
    return Plan(
        cases=tuple(cases),
        topology=topology,
        backends=BACKENDS,
        launches=launches,
        max_busy=MAX_BUSY if topology.emulated_hosts else 1.0,
        # The quick set must end soon, even on a busy machine.
        retries=launches if launches > _FEW else 1,
    )


def _four(rate: str, sizes: Sequence[str], launches: int, iters: int) -> Experiment:
    """Return an experiment with four workers and four servers, in fp32, and in bf16 with as many
    elements."""
    whole = [_case(size, iters=iters) for size in sizes]
    half = [
        Case(size=case.size // 2, dtype="bfloat16", iters=iters, warmup=case.warmup)
        for case in whole
    ]
    gates = [Gate(kind="ratio", case=case, low=1.45) for case in [*whole, *half]]
    gates += [
        Gate(kind="ratio", case=small, base_case=large, low=2.9)
        for small, large in zip(half, whole, strict=True)
    ]
    gates += [Gate(kind="of-limit", case=case, low=0.95) for case in whole]
    gates += [Gate(kind="cpu", case=case, high=3.0) for case in whole]
    return Experiment(
        name=f"4+4-{rate}",
        why="the links allow 1.5 times a ring's speed, and twice that with half the bytes",
        plan=_plan(_emulated(4, 4, rate), [*whole, *half], launches),
        gates=gates,
    )


def _eight(rate: str, size: str, launches: int, iters: int) -> Experiment:
    case = _case(size, iters=iters)
    return Experiment(
        name=f"8+8-{rate}",
        why="the links allow 1.75 times a ring's speed",
        plan=_plan(_emulated(8, 8, rate), [case], launches),
        gates=[Gate(kind="ratio", case=case, low=1.65)],
    )


def _few_bits(wire: str, rate: str, low: float, launches: int, iters: int) -> Experiment:
    """Return an experiment with four workers and four servers, and fp32 in blocks of few bits."""
    case = replace(_case("256MiB", iters=iters), wire=wire)
    return Experiment(
        name=f"4+4-{wire}-{rate}",
        why=f"{wire} takes {WIRE_BITS[wire] / 32:.3f} of the bytes of fp32",
        plan=_plan(_emulated(4, 4, rate), [case], launches),
        gates=[Gate(kind="ratio", case=case, low=low)],
    )


def _own_hosts(hosts: int, wire: str, rate: str, low: float, launches: int) -> Experiment:
    """Return an experiment with servers only on the workers' hosts, and fp32 in blocks of few
    bits."""
    case = replace(_case("64MiB", iters=3), wire=wire)
    limit = 32 / WIRE_BITS[wire]
    return Experiment(
        name=f"own-hosts-{hosts}-{wire}-{rate}",
        why=f"no machine but the hosts: {wire} can be {limit:.2f} times as fast as fp32 in a ring",
        plan=_plan(_emulated(hosts, hosts, rate, colocate=True), [case], launches),
        gates=[Gate(kind="ratio", case=case, low=low)],
    )


def _all_own_hosts(launches: int) -> list[Experiment]:
    return [
        _own_hosts(4, "int8", "500mbit", 3.7, launches),
        _own_hosts(4, "int4", "200mbit", 6.5, launches),
        _own_hosts(2, "int8", "500mbit", 3.7, launches),
    ]


def _control(name: str, why: str, topology: Topology, launches: int, iters: int) -> Experiment:
    case = _case("64MiB", iters=iters)
    return Experiment(
        name=name,
        why=f"a control: {why}",
        plan=_plan(topology, [case], launches),
        gates=[Gate(kind="ratio", case=case, low=0.95, high=1.05)],
    )


def _controls(launches: int, iters: int) -> list[Experiment]:
    return [
        _control(
            "2+2-500mbit",
            "between two workers a ring sends as much as servers need",
            _emulated(2, 2, "500mbit"),
            launches,
            iters,
        ),
        _control(
            "4+4-colocated-500mbit",
            "servers on the workers' own hosts share their links, and gain nothing",
            _emulated(4, 4, "500mbit", colocate=True),
            launches,
            iters,
        ),
    ]


def _small(launches: int, iters: int) -> Experiment:
    """Return an experiment that measures the latency of a sum of few bytes."""
    cases = [_case(size, iters=iters, warmup=10) for size in ("4KiB", "64KiB")]
    return Experiment(
        name="small-loopback",
        why="latency: two workers and a server, no limit on any link",
        plan=_plan(Topology(workers=2, servers=1), cases, launches),
        gates=[Gate(kind="ratio", case=case, low=0.5) for case in cases],
    )


def _node_topology(hosts: int, servers: int, ranks: int, rate: str) -> Topology:
    return Topology(
        workers=hosts * ranks,
        ranks_per_host=ranks,
        servers=servers,
        emulated_hosts=hosts + servers,
        link_bits=parse_rate(rate),
    )


def _nodes(ranks: int, rate: str, size: str, launches: int, iters: int) -> Experiment:
    """Return an experiment with four hosts of several ranks, and four servers."""
    case = _case(size, iters=iters)
    plan = _plan(_node_topology(4, 4, ranks, rate), [case], launches)
    return Experiment(
        name=f"nodes-{ranks}-a-host-{rate}",
        why="a host's NIC carries a tensor once, however many ranks it has",
        plan=replace(plan, backends=("byteps", "gloo-nodes", "gloo")),
        gates=[
            Gate(kind="ratio", case=case, base="gloo-nodes", low=1.45),
            Gate(kind="ratio", case=case, base="gloo", low=1.6),
        ],
    )


def _uneven(launches: int, iters: int) -> Experiment:
    """Return an experiment with two hosts of two ranks. TCP gives one rank of each host a larger
    share of the link."""
    case = _case("64MiB", iters=iters)
    topology = replace(_node_topology(2, 2, 2, "500mbit"), uneven=4)
    return Experiment(
        name="uneven-2-a-host-500mbit",
        why="a rank that gets more of its host's link does not run ahead of the sums",
        plan=replace(_plan(topology, [case], launches), backends=("byteps",)),
        gates=[Gate(kind="of-limit", case=case, low=0.9)],
    )


def _nodes_on_gpus(hosts: int, gates: Sequence[tuple[str, float]]) -> Experiment:
    """Return an experiment with two GPUs per host, and as many servers as hosts. Hosts share this
    machine's GPUs."""
    case = _case("256MiB", iters=5, warmup=2)
    plan = _plan(_node_topology(hosts, hosts, 2, "10gbit"), [case], launches=5)
    return Experiment(
        name=f"nodes-2-gpus-{hosts}+{hosts}-10gbit",
        why="GPUs of a host sum over NVLink before anything goes to servers",
        plan=replace(plan, backends=("byteps", "nccl"), device="cuda"),
        gates=[Gate(kind=kind, case=case, base="nccl", low=low) for kind, low in gates],
    )


def _few_servers(
    workers: int, machines: int, rate: str, low: float, launches: int, iters: int
) -> Experiment:
    """Return an experiment with fewer server machines than workers, and with servers on the
    workers' hosts in addition."""
    best = cost_model.best_servers(workers, machines)
    topology = Topology(
        workers=workers,
        servers=machines,
        servers_per_machine=best.per_machine,
        local_servers=best.local,
        emulated_hosts=workers + machines,
        link_bits=parse_rate(rate),
        # A fair queue gives each host an equal share, so a machine of three servers would get no
        # more than a host with one. On a network, each flow has an equal share; a single queue is
        # closer to that.
        fair_queue=False,
    )
    case = _case("64MiB", iters=iters)
    gain = cost_model.gain(workers, machines)
    return Experiment(
        name=f"few-servers-{workers}+{machines}-{rate}",
        why=f"servers of both kinds can be {gain:.3f} times as fast as a ring",
        plan=_plan(topology, [case], launches),
        gates=[Gate(kind="ratio", case=case, low=low)],
    )


def _nics(nics: int, rate: str, low: float, launches: int, iters: int) -> Experiment:
    """Return an experiment with four workers and four servers, on hosts of several NICs."""
    case = _case("64MiB", iters=iters)
    topology = replace(_emulated(4, 4, rate), nics_per_host=nics)
    return Experiment(
        name=f"nics-{nics}-4+4-{rate}",
        why=f"{nics} NICs carry {nics} times the bytes of one",
        plan=replace(_plan(topology, [case], launches), backends=("byteps", ONE_NIC)),
        gates=[Gate(kind="ratio", case=case, base=ONE_NIC, low=low)],
    )


def _nics_of_gpus() -> Experiment:
    """Return an experiment with two NICs per host, which NCCL uses, too. Hosts share this machine's
    GPUs."""
    case = _case("256MiB", iters=5, warmup=2)
    topology = replace(_emulated(4, 4, "5gbit"), nics_per_host=2)
    return Experiment(
        name="nics-2-4+4-5gbit",
        why="two NICs carry twice the bytes of one, for NCCL too",
        plan=replace(
            _plan(topology, [case], launches=5),
            backends=("byteps", ONE_NIC, "nccl"),
            device="cuda",
        ),
        gates=[
            Gate(kind="ratio", case=case, base=ONE_NIC, low=1.9),
            Gate(kind="ratio", case=case, base="nccl", low=1.36),
        ],
    )


def _gpu() -> list[Experiment]:
    return [
        _nodes_on_gpus(4, [("of-limit", 0.93), ("ratio", 1.5)]),
        _nodes_on_gpus(2, [("ratio", 0.98)]),
        _nics_of_gpus(),
    ]


def _quick() -> list[Experiment]:
    return [
        _four("500mbit", ["64MiB"], launches=3, iters=3),
        _eight("200mbit", "64MiB", launches=2, iters=3),
        _few_bits("int8", "500mbit", 5.3, launches=2, iters=2),
        _few_bits("int4", "200mbit", 9.5, launches=1, iters=2),
        *_all_own_hosts(launches=2),
        *_controls(launches=2, iters=3),
        _nodes(2, "100mbit", "64MiB", launches=2, iters=2),
        _uneven(launches=1, iters=3),
        _nics(2, "200mbit", 1.9, launches=2, iters=3),
        _nics(4, "100mbit", 3.6, launches=1, iters=2),
        _few_servers(4, 2, "500mbit", 1.2, launches=2, iters=3),
        _small(launches=3, iters=200),
    ]


def _full() -> list[Experiment]:
    return [
        *(_four(rate, ["64MiB", "256MiB"], launches=5, iters=5) for rate in ("500mbit", "1gbit")),
        *(_eight(rate, "256MiB", launches=5, iters=3) for rate in ("200mbit", "500mbit")),
        _few_bits("int8", "500mbit", 5.3, launches=5, iters=3),
        _few_bits("int4", "200mbit", 9.5, launches=5, iters=3),
        *_all_own_hosts(launches=5),
        *_controls(launches=5, iters=5),
        *(_nodes(ranks, "500mbit", "64MiB", launches=5, iters=3) for ranks in (2, 4)),
        _uneven(launches=3, iters=3),
        _nics(2, "200mbit", 1.9, launches=5, iters=3),
        _nics(4, "100mbit", 3.6, launches=5, iters=3),
        _few_servers(4, 2, "500mbit", 1.2, launches=5, iters=5),
        _few_servers(8, 2, "200mbit", 1.13, launches=5, iters=3),
        _small(launches=5, iters=1000),
    ]


SETS: dict[str, Callable[[], list[Experiment]]] = {
    QUICK: _quick,
    FULL: _full,
    GPU: _gpu,
    FAST: lambda: _fast("gloo"),
    FAST_GPU: lambda: _fast("nccl"),
}


def choose(set_name: str, names: Sequence[str] = ()) -> list[Experiment]:
    """Return the experiments of a set, all or those named. Raises ValueError for an unknown
    name."""
    everything = {experiment.name: experiment for experiment in SETS[set_name]()}
    for name in names:
        if name not in everything:
            raise ValueError(
                f"the set {set_name!r} has no experiment {name!r}, but {', '.join(everything)}"
            )
    return [experiment for name, experiment in everything.items() if not names or name in names]
