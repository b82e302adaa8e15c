"""How many servers a model needs, and what they gain: ``python -m byteps.sizing -h``.

The times are those of :mod:`byteps.cost_model`: what the busiest card carries. Cores and memory are
estimates from figures that can be given, and measured (docs/use/when-to-use.md says how).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from byteps import cost_model

OPTIMIZERS = ("replicated", "host", "ranks")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PARAMETER_BYTES = 2
"""Of a parameter that the distributed optimizer gathers: bf16."""
WORTH_IT = 1.1
"""From this gain on, servers are advised."""
ENOUGH = 1.03
"""The fewest machines are advised whose time is within this factor of the best."""
GIB = 2**30
POOL_BYTES = GIB
"""BYTEPS_RECEIVE_POOL_BYTES."""
BASE_BYTES = GIB // 4
"""Code, threads, connections."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what."""

    parameters: float
    """Of the model, on one rank: after tensor and pipeline parallelism."""
    hosts: int
    """With workers, each with one network card that its ranks share."""
    gpus: int
    """Ranks on each host."""
    link_gbps: float
    """Of a worker's host, each way."""
    server_link_gbps: float
    """Of a server's machine, each way."""
    optimizer: str
    """One of OPTIMIZERS: on every rank, sharded inside each host, or sharded over all ranks."""
    gradients: str
    """Type in which NCCL would sum, a key of BYTES."""
    wire: str
    """Type in which values go to servers."""
    core_bytes_per_s: float
    """What one core of a server moves over the network, one way."""
    core_add_bytes_per_s: float
    """What one core of a server adds."""

    def __post_init__(self) -> None:
        if not 1 <= self.parameters < 1e15:
            raise ValueError(f"{self.parameters:g} parameters: there must be 1 to 1e15")
        for name in ("hosts", "gpus"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ValueError(f"{getattr(self, name)} {name}: there must be 1 to 65535")
        for name in ("link_gbps", "server_link_gbps", "core_bytes_per_s", "core_add_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}: it must be above 0")
        for name, allowed in (("optimizer", OPTIMIZERS), ("gradients", BYTES), ("wire", BYTES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is '{getattr(self, name)}', not {' or '.join(allowed)}")

    @property
    def host_rate(self) -> float:
        """Bytes a second."""
        return self.link_gbps * 1e9 / 8

    @property
    def server_rate(self) -> float:
        """Bytes a second."""
        return self.server_link_gbps * 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of server machines."""

    machines: int
    processes: int
    """Server processes on each of them."""
    local: int
    """Server processes on each worker's host."""
    seconds: float
    """Of the sums of one step, nothing overlapping; with the gathering of parameters, if any."""
    gain: float
    """NCCL's time over this one."""
    card_gbps: float
    """What a server machine's card carries meanwhile, each way."""
    cores: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What :func:`advise` found."""

    nccl_seconds: float
    rows: tuple[Row, ...]
    chosen: Row | None
    """None: NCCL alone."""
    why: str


def nccl_seconds(job: Job) -> float:
    """Seconds that torch.distributed needs at best, on the hosts' cards."""
    size = job.parameters * BYTES[job.gradients]
    hosts, ranks = job.hosts, job.hosts * job.gpus
    if hosts == 1:
        return 0.0
    if job.optimizer == "ranks":
        return (size * (ranks - 1) / ranks) / job.host_rate + _gather_seconds(job)
    return cost_model.ring(hosts, size, job.host_rate)


def _gather_seconds(job: Job) -> float:
    """Of the parameters, where every rank updates its shard."""
    ranks = job.hosts * job.gpus
    return job.parameters * PARAMETER_BYTES * (ranks - 1) / ranks / job.host_rate


def row(job: Job, machines: int) -> Row:
    """What that many machines with servers give, and need.

    The ranks of a host sum first, so that the host pushes the model once.
    """
    pushed = job.parameters * BYTES[job.wire]
    sharded = job.optimizer == "ranks"
    pulled = pushed / job.hosts if sharded else pushed

    def sum_seconds(servers: cost_model.Servers) -> float:
        load = cost_model.push_pull(servers, pushed, pulled)
        return load.seconds(job.host_rate, job.server_rate)

    choices = [cost_model.best_servers(job.hosts, machines)]
    if machines:
        choices.append(cost_model.Servers(hosts=job.hosts, extra=machines))
    servers = min(choices, key=lambda one: (sum_seconds(one), one.count))
    sums = sum_seconds(servers)
    load = cost_model.push_pull(servers, pushed, pulled)
    seconds = sums + (_gather_seconds(job) if sharded else 0.0)
    rate = load.server / sums if machines else load.host / sums
    out_rate = rate * pulled / pushed
    cores = (rate + out_rate) / job.core_bytes_per_s + rate / job.core_add_bytes_per_s
    share = pushed * (servers.shares().extra if machines else servers.shares().beside)
    # A sum under way is held as it came, and in a type twice as wide.
    memory = 3 * share + (POOL_BYTES + BASE_BYTES) * max(servers.per_machine, 1)
    return Row(
        machines=machines,
        processes=servers.per_machine if machines else 0,
        local=servers.local,
        seconds=seconds,
        gain=nccl_seconds(job) / seconds,
        card_gbps=rate * 8 / 1e9,
        cores=math.ceil(cores + 1),
        memory_bytes=math.ceil(memory),
    )


def advise(job: Job, machines: int | None = None) -> Advice:
    """The rows to choose from, and the choice.

    Args:
        machines: that there are for servers; None: as many as are of use.
    """
    if machines is not None and machines < 0:
        raise ValueError(f"{machines} server machines: there cannot be fewer than 0")
    hosts = job.hosts
    if hosts == 1:
        return Advice(
            nccl_seconds=0.0, rows=(), chosen=None, why="all ranks are on one host: NVLink sums"
        )
    if machines is None:
        wanted = {1, hosts // 4, hosts // 2, hosts, math.ceil(hosts * _slower_links(job))}
    else:
        wanted = {machines}
    rows = tuple(row(job, count) for count in sorted(wanted) if count > 0)
    if not rows:
        return Advice(
            nccl_seconds=nccl_seconds(job), rows=(), chosen=None, why="no machines for servers"
        )
    best = min(one.seconds for one in rows)
    chosen = next(one for one in rows if one.seconds <= best * ENOUGH)
    why = f"{chosen.gain:.2f} times as fast as NCCL at its best"
    if chosen.gain < WORTH_IT:
        return Advice(
            nccl_seconds=nccl_seconds(job),
            rows=rows,
            chosen=None,
            why=f"servers would be only {why}",
        )
    return Advice(nccl_seconds=nccl_seconds(job), rows=rows, chosen=chosen, why=why)


def _slower_links(job: Job) -> float:
    """How many server cards carry as much as one worker's."""
    return max(1.0, job.link_gbps / job.server_link_gbps)


def count(text: str) -> float:
    """'7B', '340M' or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)([kKmMbBgGtT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no number such as 7B, 340M or 1e9")
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    return float(match[1]) * scale[match[2].lower()]


def render(job: Job, advice: Advice) -> str:
    """The advice as text."""
    ranks = job.hosts * job.gpus
    lines = [
        f"{job.parameters / 1e6:,.0f} million parameters, {job.hosts} hosts with {job.gpus} "
        f"GPU{'s' if job.gpus > 1 else ''} each, {job.link_gbps:g} Gbit/s a host, "
        f"{job.server_link_gbps:g} Gbit/s a server",
        f"NCCL at its best: {1000 * advice.nccl_seconds:,.1f} ms a step for the sums"
        + (" and the parameters" if job.optimizer == "ranks" else ""),
        "",
    ]
    if advice.rows:
        lines.append(
            "machines  servers on each  on a worker's host  ms a step   gain  "
            "Gbit/s a card  cores  memory GiB"
        )
    for one in advice.rows:
        mark = "  <- advised" if one == advice.chosen else ""
        lines.append(
            f"{one.machines:8d}  {one.processes:15d}  {one.local:18d}  {1000 * one.seconds:9,.1f}  "
            f"{one.gain:5.2f}  {one.card_gbps:13.1f}  {one.cores:5d}  "
            f"{one.memory_bytes / GIB:10.1f}{mark}"
        )
    lines.append("")
    if advice.chosen is None:
        lines.append(f"Advice: NCCL alone; {advice.why}.")
        return "\n".join(lines)
    best = advice.chosen
    total = best.machines * best.processes + best.local * job.hosts
    lines += [
        f"Advice: {best.machines} server machine{'s' if best.machines > 1 else ''}, each with "
        f"{best.cores} cores and {best.memory_bytes / GIB:.1f} GiB; {advice.why}.",
        f"  scripts/scheduler.sh --workers {ranks} --servers {total} ...",
        f"  scripts/server.sh --workers {ranks} --servers {total} --instances {best.processes} ...",
    ]
    if best.local:
        lines.append(f"  scripts/worker.sh --servers {total} --local-servers {best.local} ...")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m byteps.sizing",
        description="Tells how many servers a model needs, and what they gain over NCCL.",
    )
    parser.add_argument(
        "--parameters", type=count, required=True, metavar="N",
        help="parameters on one rank, such as 7B or 340M",
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, required=True, help="hosts with workers")
    parser.add_argument("--gpus", type=int, default=8, help="ranks on each host (default: 8)")
    parser.add_argument(
        "--link-gbps", type=float, required=True, metavar="G",
        help="network card of a worker's host, Gbit/s each way",
    )  # fmt: skip
    parser.add_argument(
        "--server-link-gbps", type=float, metavar="G",
        help="network card of a server's machine (default: as --link-gbps)",
    )  # fmt: skip
    parser.add_argument(
        "--machines", type=int, metavar="K",
        help="machines that there are for servers (default: a table of several numbers)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="host",
        help="replicated; sharded inside each host (--num-distributed-optimizer-instances = "
        "hosts); or sharded over all ranks (default: host)",
    )  # fmt: skip
    parser.add_argument(
        "--gradients",
        choices=tuple(BYTES),
        default="bf16",
        help="type NCCL sums in (default: bf16)",
    )
    parser.add_argument(
        "--wire", choices=tuple(BYTES), help="type on the way to servers (default: as --gradients)"
    )
    parser.add_argument(
        "--core-gbps", type=float, default=20.0, metavar="G",
        help="what a server's core moves over TCP one way, Gbit/s (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--core-add-gbs", type=float, default=6.0, metavar="G",
        help="what a server's core adds, GB/s: make bench-reducer measures it (default: 6)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args(arguments)
    try:
        job = Job(
            parameters=chosen.parameters,
            hosts=chosen.hosts,
            gpus=chosen.gpus,
            link_gbps=chosen.link_gbps,
            server_link_gbps=chosen.server_link_gbps or chosen.link_gbps,
            optimizer=chosen.optimizer,
            gradients=chosen.gradients,
            wire=chosen.wire or chosen.gradients,
            core_bytes_per_s=chosen.core_gbps * 1e9 / 8,
            core_add_bytes_per_s=chosen.core_add_gbs * 1e9,
        )
        advice = advise(job, chosen.machines)
    except ValueError as error:
        parser.error(str(error))
    if chosen.json:
        print(json.dumps({"job": dataclasses.asdict(job), **dataclasses.asdict(advice)}, indent=1))
    else:
        print(render(job, advice))
    return 0


if __name__ == "__main__":
    sys.exit(main())
