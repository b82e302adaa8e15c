"""Plans of a measurement: cases to measure, and hosts on which processes run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_COLLECTIVES = ("gloo", "nccl", "gloo-nodes", "nccl-nodes", "gloo-fp8", "nccl-fp8")
ONE_NIC = "byteps-one-nic"
BACKENDS = ("byteps", ONE_NIC, *_COLLECTIVES, "sockets")
"""Backends. ``byteps-one-nic`` uses only the first NIC of each host. Backends ending in ``-nodes``
sum in two levels: inside each host, then between hosts. Backends ending in ``-fp8`` send blocks of
fp8 by an all-to-all, add in fp32, and send the sums by an all-gather."""
_BYTEPS = ("byteps", ONE_NIC)
_THROUGH_SERVERS = (*_BYTEPS, "sockets")
DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
}


WIRE_BITS = {"bf16": 16.0, "fp16": 16.0, "int8": 8 * 130 / 128, "int4": 8 * 66 / 128}
"""Bits per value on the links."""
FP8_BITS = 8 * 130 / 128
SAME = "same"


def is_byteps(backend: str) -> bool:
    """Return whether a backend is BytePS, with all NICs or with one."""
    return backend in _BYTEPS


def through_servers(backend: str) -> bool:
    """Return whether a backend's bytes go through servers. Otherwise they go around a ring."""
    return backend in _THROUGH_SERVERS


@dataclass(frozen=True, kw_only=True)
class Case:
    """Size and element type to measure."""

    size: int
    """Bytes that each worker sums per iteration."""
    dtype: str
    tensors: int = 1
    """Number of tensors into which the size is split, all in flight at the same time."""
    iters: int
    """Number of timed iterations."""
    warmup: int
    """Number of iterations before the timed ones. Their results are checked."""
    wire: str = SAME
    """Type in which BytePS sends values. Plain sockets move as many bytes."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if self.size % DTYPE_BYTES[self.dtype]:
            raise ValueError(f"{self.size} bytes are no whole number of {self.dtype} elements")
        if self.wire not in (SAME, *WIRE_BITS):
            raise ValueError(f"wire type {self.wire!r} is none of {SAME}, {', '.join(WIRE_BITS)}")
        if self.wire != SAME and self.dtype != "float32":
            raise ValueError(f"the wire type {self.wire} is for float32, not {self.dtype}")
        if self.tensors < 1 or self.iters < 1 or self.warmup < 0:
            raise ValueError("tensors and iterations must be at least 1, warm-up at least 0")
        if self.count < self.tensors:
            raise ValueError(f"{self.count} elements cannot be split into {self.tensors} tensors")

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return self.size // DTYPE_BYTES[self.dtype]

    @property
    def type_name(self) -> str:
        """Return the type's name for tables."""
        return self.dtype if self.wire == SAME else f"{self.dtype} as {self.wire}"

    def sent_bytes(self, backend: str) -> int:
        """Return the bytes of the values as this backend sends them."""
        if backend.endswith("-fp8"):
            return round(self.count * FP8_BITS / 8)
        if self.wire == SAME or not through_servers(backend):
            return self.size
        return round(self.count * WIRE_BITS[self.wire] / 8)

    def lengths(self) -> list[int]:
        """Return the number of elements of each tensor, as equal as possible."""
        base, more = divmod(self.count, self.tensors)
        return [base + (index < more) for index in range(self.tensors)]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Numbers of processes, and the links between them."""

    workers: int
    servers: int
    """Number of BytePS servers besides ``local_servers``: on separate machines, unless
    ``colocate``. An all-reduce has none."""
    servers_per_machine: int = 1
    """Server processes per server machine."""
    ranks_per_host: int = 1
    """Number of workers that share a host and its link. The last host may have fewer."""
    uneven: int = 1
    """If above 1: number of TCP connections that one rank per host has to each server: the first
    rank on the first host, the second on the second, and so on. Other ranks have one connection,
    and so a smaller share of the link."""
    colocate: bool = False
    """Whether servers run on the workers' hosts: server i on host i mod hosts."""
    local_servers: int = 0
    """Number of servers on each of the workers' hosts, in addition to those on server machines."""
    in_job: bool = False
    """Whether the processes belong to a job that something else has started."""
    emulated_hosts: int = 0
    """Number of network namespaces, each with a link of its own; 0: all processes share
    loopback."""
    link_bits: int = 0
    """Bits per second of each NIC, in each direction; 0: unknown, so no limit is computed."""
    nics_per_host: int = 1
    """NICs of each emulated host, each on its own switch."""
    mtu: int = 9000
    congestion_control: str = "cubic"
    fair_queue: bool = True
    """Whether peers share a link fairly, packet by packet. Otherwise a link is a single queue, and
    TCP decides."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 1:
            raise ValueError("there must be at least one worker and one server")
        if self.ranks_per_host < 1 or self.local_servers < 0 or self.servers_per_machine < 1:
            raise ValueError(
                "hosts need at least 1 rank and 0 local servers, server machines at least 1 server"
            )
        if self.nics_per_host < 1 or (self.nics_per_host > 1 and not self.emulated_hosts):
            raise ValueError("--nics-per-host must be at least 1, and needs --emulate if above 1")
        if self.uneven < 1 or (self.uneven > 1 and self.ranks_per_host == 1):
            raise ValueError("--uneven must be at least 1, and needs --ranks-per-host if above 1")
        if (self.local_servers or self.servers_per_machine > 1) and self.colocate:
            raise ValueError("--colocate puts all servers on the workers' hosts already")
        if self.emulated_hosts and self.emulated_hosts < self.hosts_needed:
            raise ValueError(
                f"{self.workers} workers and {self.servers} servers need {self.hosts_needed} "
                f"hosts, and --emulate gives {self.emulated_hosts}"
            )

    @property
    def host_bits(self) -> int:
        """Return the bits per second of all NICs of a host."""
        return self.link_bits * self.nics_per_host

    def bits_of(self, backend: str) -> int:
        """Return the bits per second of a host's NICs that a backend uses."""
        return self.link_bits if backend == ONE_NIC else self.host_bits

    @property
    def hosts_needed(self) -> int:
        return self.worker_hosts + (0 if self.colocate else self.servers)

    @property
    def worker_hosts(self) -> int:
        return -(-self.workers // self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Run in which every backend is launched ``launches`` times, interleaved. Each launch measures
    all cases."""

    cases: tuple[Case, ...]
    topology: Topology
    backends: tuple[str, ...]
    launches: int = 1
    device: str = "cpu"
    """Device of the tensors: cpu or cuda."""
    max_busy: float = 1.0
    """Largest fraction of this machine's cores that a launch may keep busy. Launches above it do
    not count."""
    retries: int = 0
    """Number of rounds that may be repeated because the machine was too busy."""
    timeout_s: float = 600.0
    """Timeout of a launch."""
    flows: int = 4
    """Number of connections between a worker and a server, for the backend ``sockets``."""

    def __post_init__(self) -> None:
        for backend in self.backends:
            if backend not in BACKENDS:
                raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
        if len(set(self.backends)) != len(self.backends) or not self.backends:
            raise ValueError("name each backend once, and at least one")
        if any(name.startswith("nccl") for name in self.backends) and self.device != "cuda":
            raise ValueError("nccl sums GPU memory: add --device cuda")
        if ONE_NIC in self.backends and self.topology.nics_per_host == 1:
            raise ValueError(f"{ONE_NIC} is for hosts of several NICs: add --nics-per-host N")
        if "sockets" in self.backends and self.topology.in_job:
            raise ValueError("sockets needs servers of its own: run it without a launcher")
        if self.flows < 1:
            raise ValueError("there must be at least one flow")
        if self.launches < 1 or self.retries < 0:
            raise ValueError("there must be at least one launch, and no fewer than 0 retries")

    def shares_gpus(self) -> bool:
        """Return whether the plan has more ranks than this machine has GPUs."""
        if self.device != "cuda":
            return False
        from scripts.children import outnumbered

        return outnumbered(self.topology.workers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_from_json(entry: dict[str, Any]) -> Plan:
    """Build a plan from the output of ``as_json``."""
    values = dict(entry)
    values["cases"] = tuple(Case(**case) for case in entry["cases"])
    values["topology"] = Topology(**entry["topology"])
    values["backends"] = tuple(entry["backends"])
    return Plan(**values)
