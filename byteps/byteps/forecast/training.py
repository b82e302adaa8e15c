"""Description of how a job reduces its gradients, and where its optimizer is."""

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
"""Preset that stands for `USE`, `OPTIMIZER` and int8. A `WIRE` that the user gives overrides
int8."""

FEW_BITS = {"int8": 130 / 128, "int4": 66 / 128}
"""Bytes per value in blocks of 128 values with one scale of 16 bits."""
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, **FEW_BITS}
"""Bytes per value, by the type in which values travel."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Training program, and the words with which its users write the compared arguments."""

    name: str
    script: str
    """Placeholder for the user's script and its arguments."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that stand for Megatron's arguments, by argument; empty for
    Megatron."""
    same: str = ""
    """Variable that sends gradients in their own type; empty: none is needed for that."""
    gathers: int = 0
    """Number of times that a micro-batch gathers all parameters, because ranks keep only shards.
    With few bits for gradients, parameters are gathered in int8."""

    @property
    def unit(self) -> str:
        """Part of the training that communicates once: a step or, with `gathers`, a micro-batch."""
        return "micro-batch" if self.gathers else "step"

    def typed(self, flags: Collection[str], *, on_hosts: bool) -> tuple[str, ...]:
        """Return the words that a user types for these arguments.

        Args:
            on_hosts: whether all servers are on the workers' hosts.
        """
        if self.variables:
            words = [self.variables[flag] for flag in flags]
            if self.same and USE in flags and not wire_of(flags):
                words.append(self.same)
            return tuple(words)
        if not (on_hosts and OPTIMIZER in flags and wire_of(flags) in FEW_BITS):
            return tuple(flags)
        stood_for = (USE, OPTIMIZER, f"{WIRE} int8")
        return (OWN_HOSTS, *(flag for flag in flags if flag not in stood_for))

    def line(self, launcher: str, words: Collection[str]) -> str:
        """Return a launch line with these words."""
        words = " ".join(words)
        after = f"{launcher} ... {self.script}"
        return f"{words} {after}" if self.variables else f"{after} {words}"


def wire_of(flags: Collection[str]) -> str:
    """Return the type in which these arguments send gradients; empty: their own type."""
    return next((flag.split()[1] for flag in flags if flag.split()[0] == WIRE), "")


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
"""DistributedDataParallel, and other programs that all-reduce gradients, such as HSDP."""
FSDP2 = Program(
    name="FSDP2",
    script="train.py",
    variables={
        USE: "BYTEPS_C10D=1",
        f"{WIRE} bf16": "BYTEPS_FSDP_DTYPES=bf16",
        **{f"{WIRE} {wire}": f"BYTEPS_FSDP_DTYPES={wire},int8" for wire in FEW_BITS},
        HALF: "reduce_dtype=torch.bfloat16",
    },
    same="BYTEPS_FSDP_DTYPES=same",
    gathers=2,
)
"""Programs that use `fully_shard` on a mesh of one dimension, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The gradients of one kind, dense or expert."""

    name: str
    groups: Mapping[tuple[int, ...], float]
    """Data-parallel groups. Key: the host of each member, in the order of the group. Value: the
    number of groups with these hosts."""
    elements: float
    """Number of gradient elements on each rank."""
    left: float = 0.0
    """Number of elements that ranks update even if servers keep the optimizer: the matrices of
    Muon."""

    @property
    def most_hosts(self) -> int:
        """Largest number of hosts of a group."""
        return max((len(per_host(hosts)) for hosts in self.groups), default=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job's present arguments, as far as they decide which bytes cross hosts."""

    kinds: tuple[Kind, ...]
    gradient_bytes: float = 4
    """Bytes per element in the type in which gradients are reduced."""
    wire: str | None = None
    """Type in which gradients travel to servers, a key of WIRE_BYTES; None: the type in which they
    are reduced."""
    accepts: str | None = None
    """Shortest type that the user accepts, a key of WIRE_BYTES; None: `wire`, or 16 bits."""
    parameter_bytes: int = 2
    """Bytes per parameter in the distributed optimizer's all-gather."""
    bf16: bool = True
    """Whether parameters are bf16, so that gradients can be reduced in bf16 too."""
    sharded: bool = False
    """Whether the job uses the distributed optimizer."""
    can_shard: bool = False
    """Whether the job could use the distributed optimizer: it uses Adam, and its parameters are not
    sharded otherwise."""
    instances: int = 1
    """Number of instances of the distributed optimizer."""
    updated: bool = False
    """Whether servers keep the optimizer."""
    used: bool = False
    """Whether the job has the flag `USE`."""
    preset: bool = False
    """Whether the job has the preset `OWN_HOSTS`, and not the flags for which it stands."""
    by_layer: bool = False
    """With the optimizer on the servers: whether ranks also gather parameters, those that they
    update."""
    program: Program = MEGATRON
    missing_overlaps: tuple[str, ...] = ()
    """Flags of Megatron that hide communication, and that the job lacks."""

    @property
    def flags(self) -> frozenset[str]:
        """The job's arguments that the forecast compares."""
        has = {USE: self.used, OPTIMIZER: self.updated}
        wire = [] if self.wire is None else [f"{WIRE} {self.wire}"]
        return frozenset([*wire, *(flag for flag, given in has.items() if given)])

    @property
    def least_bytes(self) -> float:
        """Least bytes per value at which the forecast does not warn of lost bits."""
        agreed = [WIRE_BYTES[dtype] for dtype in (self.accepts, self.wire) if dtype is not None]
        return min([2.0, *agreed])

    @property
    def crossing(self) -> tuple[Kind, ...]:
        """Kinds of gradients with a group on several hosts."""
        return tuple(kind for kind in self.kinds if kind.most_hosts > 1)


@functools.lru_cache(maxsize=64)
def instances_of_one_host(hosts: tuple[int, ...]) -> int | None:
    """Return how many optimizer instances a group has if each instance is one host with several
    ranks.

    None if this is impossible; 1 if the group is on a single host.
    """
    counts = per_host(hosts)
    if len(counts) == 1:
        return 1
    each = len(hosts) // len(counts)
    runs = {hosts[first : first + each] for first in range(0, len(hosts), each)}
    return None if each == 1 or any(len(set(run)) > 1 for run in runs) else len(counts)


def instances_for_hosts(training: Training) -> int | None:
    """Return how many optimizer instances a job has if each instance is one host.

    None if the job has as many instances already, or if this is impossible.
    """
    if not training.sharded or training.program is not MEGATRON:
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
