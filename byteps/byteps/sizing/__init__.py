"""How many servers a model needs, and what they gain: ``python -m byteps.sizing -h``.

The times are those of :mod:`byteps.cost_model`: the busiest NIC sets them, or the cores where they
are too few. Cores and memory are estimates; docs/use/when-to-use.md says where the figures come
from and how to measure your own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from byteps import cost_model

OPTIMIZERS = ("replicated", "host", "ranks", "servers")
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
FEW_BITS = {"int8": 130 / 128, "int4": 66 / 128}
"""Bytes of a value in blocks of 128, with one scale."""
WIRE_BYTES = {**BYTES, **FEW_BITS}
BLOCK_VALUES_PER_CORE = 4.2e9
"""Values in blocks that a core adds per second, several pushes in one pass."""
FEEDBACK_BYTES = 2
"""Of a value on its server, with int4."""
SERVED_BYTES = {"fp32": 16, "bf16": 14, "fp16": 14, "int8": 18, "int4": 18}
"""Of a parameter that servers keep: Adam's state, a gradient, and what workers hold."""
TRANSPORTS = ("tcp", "rdma")
LEAST_PARAMETERS = 1e6
"""Fewer is no model's size, but a forgotten M or B."""
MOST_PARAMETERS = 1e12
"""Of one rank: twice as many bytes are more than any GPU has."""
MOST_NIC_GBPS = 1600.0
"""A higher rate is that of several NICs together."""
PARAMETER_BYTES = 2
"""Of a parameter that the distributed optimizer gathers: bf16."""
WORTH_IT = 1.1
"""The least gain for which servers are advised."""
ENOUGH = 1.03
"""The fewest machines are advised whose time is within this factor of the best."""
OTHER_CORES = 1
"""For all else than moving and adding bytes."""
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
    """With workers."""
    gpus: int
    """Ranks on each host."""
    link_gbps: float
    """Of one NIC of a worker's host, each way."""
    nics: int = 1
    """Of a worker's host. NCCL uses all of them, and so does BytePS."""
    server_link_gbps: float
    """Of the NICs of a server's machine together, each way."""
    transport: str = "tcp"
    """Between workers and servers, one of TRANSPORTS."""
    worker_cores: float = math.inf
    """On a worker's host, that the network may use."""
    server_cores: float = math.inf
    """Of a server's machine."""
    optimizer: str
    """One of OPTIMIZERS: on every rank, sharded in each host or over all ranks, or on servers."""
    gradients: str
    """Type in which NCCL would reduce, a key of BYTES."""
    wire: str
    """Type in which values go to servers, a key of WIRE_BYTES."""
    core_bytes_per_s: float
    """What one core sends or receives over TCP."""
    core_add_bytes_per_s: float
    """What one core of a server adds."""
    backup: bool = False
    """Whether each server keeps a copy of another one's optimizer state (BYTEPS_BACKUP_STATE)."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no size, and for what BytePS cannot use."""
        if not LEAST_PARAMETERS <= self.parameters <= MOST_PARAMETERS:
            raise ValueError(
                f"{self.parameters:g} parameters: a rank has 1 million (1M) to 1 trillion (1T) of "
                "them; 7B is 7 billion. Divide by tensor and pipeline parallelism"
            )
        for name in ("hosts", "gpus", "nics"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ValueError(f"{getattr(self, name)} {name}: there must be 1 to 65535")
        for name in ("link_gbps", "server_link_gbps", "core_bytes_per_s", "core_add_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}: it must be above 0")
        for name, allowed in (
            ("optimizer", OPTIMIZERS), ("gradients", BYTES), ("wire", WIRE_BYTES),
            ("transport", TRANSPORTS),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is '{getattr(self, name)}', not {' or '.join(allowed)}")
        for whose, number in (
            ("worker's host", self.worker_cores), ("server's machine", self.server_cores),
        ):  # fmt: skip
            if not number > OTHER_CORES:
                raise ValueError(
                    f"{cores_text(number)} of a {whose}: there must be more than {OTHER_CORES}, "
                    "which is for all else than moving and adding bytes"
                )
        if self.backup and (self.optimizer != "servers" or self.transport != "tcp"):
            raise ValueError(
                "copies are of optimizer state on the servers (--optimizer servers), over TCP"
            )
        self._check_link("a worker's host", "--link-gbps", self.link_gbps, self.nics)
        self._check_link("a server", "--server-link-gbps", self.server_link_gbps, 1)

    def _check_link(self, whose: str, option: str, nic_gbps: float, nics: int) -> None:
        gbps = nic_gbps * nics
        if nic_gbps > MOST_NIC_GBPS:
            text = f"{nic_gbps:g} Gbit/s of {whose}: no NIC is faster than {MOST_NIC_GBPS:g}. Give "
            text += f"the rate of one NIC ({option}); --nics says how many a worker's host has"
            raise ValueError(text)
        if self.transport == "tcp" and gbps > cost_model.TCP_GBPS:
            rate = gbps * 1e9 / 8
            cores = 2 * rate / self.core_bytes_per_s + rate / self.add_rate
            raise ValueError(
                f"{gbps:g} Gbit/s of {whose}: TCP is for up to {cost_model.TCP_GBPS:g} Gbit/s. For "
                f"this link a server would need {_whole_cores(cores)} cores. Use RDMA (--transport "
                f"rdma), or plan with what TCP carries ({option} {cost_model.TCP_GBPS / nics:g})"
            )

    @property
    def host_rate(self) -> float:
        """Bytes per second of all NICs of a worker's host."""
        return self.nics * self.link_gbps * 1e9 / 8

    @property
    def add_rate(self) -> float:
        """Bytes of pushes that a core of a server adds per second."""
        if self.wire in FEW_BITS:
            return BLOCK_VALUES_PER_CORE * FEW_BITS[self.wire]
        return self.core_add_bytes_per_s

    @property
    def server_rate(self) -> float:
        """Bytes per second."""
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
    """Of one step's reductions, nothing overlapping; with the gathering of parameters, if any."""
    gain: float
    """NCCL's time over this one."""
    nic_gbps: float
    """What a server machine's NIC carries meanwhile, each way."""
    cores: int
    """Of a server's machine."""
    worker_cores: int
    """Of a worker's host, for the network and the servers on it."""
    memory_bytes: int
    """Of a server's machine."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What :func:`advise` found."""

    nccl_seconds: float
    rows: tuple[Row, ...]
    chosen: Row | None
    """None: NCCL alone."""
    why: str


def nccl_seconds(job: Job) -> float:
    """Seconds that torch.distributed needs at best, on all NICs of the hosts."""
    size = job.parameters * BYTES[job.gradients]
    hosts, ranks = job.hosts, job.hosts * job.gpus
    if hosts == 1:
        return 0.0
    if job.optimizer in ("ranks", "servers"):
        return (size * (ranks - 1) / ranks) / job.host_rate + _gather_seconds(job)
    return cost_model.ring(hosts, size, job.host_rate)


def _gather_seconds(job: Job) -> float:
    """Of the parameters, where every rank updates its shard."""
    ranks = job.hosts * job.gpus
    return job.parameters * PARAMETER_BYTES * (ranks - 1) / ranks / job.host_rate


def row(job: Job, machines: int) -> Row:
    """What that many machines with servers give, and need.

    The ranks of a host reduce among themselves first, so that the host pushes the model once.
    """
    pushed = job.parameters * WIRE_BYTES[job.wire]
    sharded = job.optimizer == "ranks"
    pulled = pushed / job.hosts if sharded else pushed
    if job.optimizer == "servers":  # at least differences in 8 bits
        pulled = max(pushed, job.parameters * FEW_BITS["int8"])
    core_rate = math.inf if job.transport == "rdma" else job.core_bytes_per_s

    def busy(servers: cost_model.Servers) -> cost_model.CoreSeconds:
        cores = cost_model.core_seconds(
            servers, pushed, pulled, core_rate=core_rate, add_rate=job.add_rate
        )
        copies = 2 * _copied_bytes(job) / servers.count / core_rate  # sent, and received
        return cost_model.CoreSeconds(
            host=cores.host + copies * servers.local,
            server=cores.server + (copies * servers.per_machine if servers.extra else 0.0),
        )

    def nics(servers: cost_model.Servers) -> cost_model.Load:
        """With what servers send to those that have copies, and receive as such."""
        load = cost_model.push_pull(servers, pushed, pulled)
        share = _copied_bytes(job) / servers.count
        return cost_model.Load(
            host=load.host + share * servers.local,
            server=load.server + (share * servers.per_machine if servers.extra else 0.0),
        )

    def sum_seconds(servers: cost_model.Servers) -> float:
        """What the NICs need, or the cores where there are too few of them."""
        load, busiest = nics(servers), busy(servers)
        return max(
            load.seconds(job.host_rate, job.server_rate),
            busiest.host / (job.worker_cores - OTHER_CORES),
            busiest.server / (job.server_cores - OTHER_CORES),
        )

    choices = [cost_model.best_servers(job.hosts, machines)]
    if machines:
        choices.append(cost_model.Servers(hosts=job.hosts, extra=machines))
    servers = min(choices, key=lambda one: (sum_seconds(one), one.count))
    sums = sum_seconds(servers)
    load = nics(servers)
    seconds = sums + (_gather_seconds(job) if sharded else 0.0)
    cores = busy(servers).server if machines else busy(servers).host
    share = pushed * (servers.shares().extra if machines else servers.shares().beside)
    memory = share * _held(job) + (POOL_BYTES + BASE_BYTES) * max(servers.per_machine, 1)
    return Row(
        machines=machines,
        processes=servers.per_machine if machines else 0,
        local=servers.local,
        seconds=seconds,
        gain=nccl_seconds(job) / seconds,
        nic_gbps=(load.server if machines else load.host) / sums * 8 / 1e9,
        cores=_whole_cores(cores / sums),
        worker_cores=_whole_cores(busy(servers).host / sums),
        memory_bytes=math.ceil(memory),
    )


def _held(job: Job) -> float:
    """Bytes that a server holds of a byte that is pushed to it: as it came, as it is added, in a
    type twice as wide, or fp32, and of the optimizer."""
    served = SERVED_BYTES[job.wire] / WIRE_BYTES[job.wire] if job.optimizer == "servers" else 0
    if job.backup:  # the copy, and the last answer on both sides
        served = 2 * (served + 1)
    if job.wire not in FEW_BITS:
        return 3 + served
    feedback = FEEDBACK_BYTES if job.wire == "int4" and not served else 0
    return 1 + (4 + feedback) / FEW_BITS[job.wire] + served


def _copied_bytes(job: Job) -> float:
    """Of a step's summed gradients, which go to the servers that have copies."""
    if not job.backup:
        return 0.0
    return job.parameters * (4.0 if job.wire in FEW_BITS else WIRE_BYTES[job.wire])


def _whole_cores(busy: float) -> int:
    # What division leaves of a whole number is no core.
    return math.ceil(busy - 1e-6) + OTHER_CORES


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
            nccl_seconds=0.0,
            rows=(),
            chosen=None,
            why="all ranks are on one host, and reduce over NVLink",
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
    worth_it = chosen.gain >= WORTH_IT
    why = f"{chosen.gain:.2f} times as fast as NCCL at its best"
    if not worth_it:
        why = f"servers would be only {why}"
    why += _lacking_cores(job, chosen)
    return Advice(
        nccl_seconds=nccl_seconds(job), rows=rows, chosen=chosen if worth_it else None, why=why
    )


def _lacking_cores(job: Job, chosen: Row) -> str:
    """What more cores would give; empty where they are enough."""
    enough = row(
        dataclasses.replace(job, worker_cores=math.inf, server_cores=math.inf), chosen.machines
    )
    if chosen.seconds <= enough.seconds * ENOUGH:
        return ""
    lacking = []
    if enough.worker_cores > job.worker_cores:
        lacking.append(f"{enough.worker_cores} cores on a worker's host")
    if enough.cores > job.server_cores:
        lacking.append(f"{enough.cores} cores on a server's machine")
    text = f". With {' and '.join(lacking)} it would be {enough.gain:.2f} times as fast"
    if job.transport == "tcp":
        text += "; or use RDMA (--transport rdma), where the NIC moves the bytes"
    return text


def cores_text(number: float) -> str:
    return f"{number:g} core{'s' if number != 1 else ''}"


def _slower_links(job: Job) -> float:
    """How many server machines carry as much as one worker's host."""
    return max(1.0, job.host_rate / job.server_rate)
