"""Reduction of a job's gradients, and the place of its optimizer."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from byteps.routing import per_host

USE, WIRE = "--use-dpu-reduce", "--dpu-reduce-wire-dtype"
OPTIMIZER = "--dpu-optimizer"
SHARDED, INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
HALF = "--grad-reduce-in-bf16"
PRESET = "--dpu-preset"
OWN_HOSTS = f"{PRESET} own-hosts"
"""Stands for `USE`, `OPTIMIZER` and int8; another `WIRE` next to it wins."""

FEW_BITS = {"int8": 130 / 128, "int4": 66 / 128}
"""Bytes of a value in blocks of 128, which have one scale of 16 bits."""
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, **FEW_BITS}
"""Bytes of a value by the type in which it travels."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program, and the words with which users write the compared arguments."""

    name: str
    script: str
    """Stands for the user's script and its arguments."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables in place of Megatron's arguments; empty for Megatron."""

    def typed(self, flags: Collection[str], *, on_hosts: bool) -> tuple[str, ...]:
        """The words that a user types for these arguments.

        Args:
            on_hosts: all servers are on the workers' hosts.
        """
        if self.variables:
            return tuple(self.variables[flag] for flag in flags)
        wire = next((flag for flag in flags if flag.split()[0] == WIRE), "").removeprefix(WIRE)
        if not (on_hosts and OPTIMIZER in flags and wire.strip() in FEW_BITS):
            return tuple(flags)
        stood_for = (USE, OPTIMIZER, f"{WIRE} int8")
        return (OWN_HOSTS, *(flag for flag in flags if flag not in stood_for))

    def line(self, launcher: str, words: Collection[str]) -> str:
        """A launch line with these words."""
        words = " ".join(words)
        after = f"{launcher} ... {self.script}"
        return f"{words} {after}" if self.variables else f"{after} {words}"


MEGATRON = Program(name="Megatron", script="pretrain_gpt.py ...")
DDP = Program(
    name="DDP",
    script="train.py",
    variables={
        USE: "BYTEPS_C10D=1",
        **{f"{WIRE} {wire}": f"BYTEPS_C10D_WIRE_DTYPE={wire}" for wire in ("bf16", *FEW_BITS)},
        HALF: "bf16_compress_hook",
    },
)
"""DistributedDataParallel, and what else all-reduces gradients, such as HSDP."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The gradients of one kind, dense or expert."""

    name: str
    groups: Mapping[tuple[int, ...], float]
    """Data-parallel groups: the host of each member, in the order of the group, and how many such
    groups there are."""
    elements: float
    """On each rank."""
    left: float = 0.0
    """Elements that ranks update even where servers keep the optimizer: Muon's matrices."""

    @property
    def most_hosts(self) -> int:
        """Hosts of the group that is spread over the most of them."""
        return max((len(per_host(hosts)) for hosts in self.groups), default=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job's present arguments, as far as they decide what crosses hosts."""

    kinds: tuple[Kind, ...]
    gradient_bytes: float = 4
    """Bytes of an element as it is reduced."""
    wire: str | None = None
    """Type in which gradients travel to servers, a key of WIRE_BYTES; None: as they are reduced."""
    accepts: str | None = None
    """Type with which the user agrees, a key of WIRE_BYTES; None: that of `wire`, or 16 bits."""
    parameter_bytes: int = 2
    """Bytes of a parameter as the distributed optimizer gathers it."""
    bf16: bool = True
    """Parameters are bf16, so that gradients can be reduced in bf16 too."""
    sharded: bool = False
    """The job uses the distributed optimizer."""
    can_shard: bool = False
    """The job could use the distributed optimizer: it has Adam, and no wrapper of its own."""
    instances: int = 1
    """Instances of the distributed optimizer."""
    updated: bool = False
    """Servers keep the optimizer."""
    used: bool = False
    """The job has `USE`."""
    by_layer: bool = False
    """With the optimizer on the servers: parameters that are left to ranks are gathered."""
    program: Program = MEGATRON
    missing_overlaps: tuple[str, ...] = ()
    """Megatron's flags that hide communication, and that the job does not have."""

    @property
    def flags(self) -> frozenset[str]:
        """The arguments that are compared and that the job has."""
        has = {USE: self.used, OPTIMIZER: self.updated}
        wire = [] if self.wire is None else [f"{WIRE} {self.wire}"]
        return frozenset([*wire, *(flag for flag, given in has.items() if given)])

    @property
    def least_bytes(self) -> float:
        """Bytes of a value that may travel without a word about lost bits."""
        agreed = [WIRE_BYTES[one] for one in (self.accepts, self.wire) if one is not None]
        return min([2.0, *agreed])

    @property
    def crossing(self) -> tuple[Kind, ...]:
        """Kinds of which a group is on several hosts."""
        return tuple(kind for kind in self.kinds if kind.most_hosts > 1)


@functools.lru_cache(maxsize=64)
def instances_of_one_host(hosts: tuple[int, ...]) -> int | None:
    """Count a group's instances if each is a host with several ranks.

    None: impossible. 1: the group is on one host.
    """
    counts = per_host(hosts)
    if len(counts) == 1:
        return 1
    each = len(hosts) // len(counts)
    runs = {hosts[first : first + each] for first in range(0, len(hosts), each)}
    return None if each == 1 or any(len(set(run)) > 1 for run in runs) else len(counts)


def instances_for_hosts(training: Training) -> int | None:
    """Count the optimizer instances if each is a host.

    None: the job has as many already, or it is impossible.
    """
    if not training.sharded:
        return None
    wanted: set[int] = set()
    for kind in training.kinds:
        for hosts in kind.groups:
            instances = instances_of_one_host(hosts)
            if instances is None:
                return None
            if kind.name == "dense":  # instances cut experts, too
                wanted.add(instances)
    if len(wanted) != 1 or 1 in wanted:
        return None
    count = wanted.pop()
    divides = all(len(hosts) % count == 0 for kind in training.kinds for hosts in kind.groups)
    return count if divides and count != training.instances else None
