"""Launches of Megatron's training loop through one backend, and the times of its steps."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.kit import machine
from bench.kit.emulation import Host
from bench.kit.errors import LaunchError
from bench.kit.launch import Placement, rank_variables, start_nodes
from bench.kit.plan import Plan
from bench.kit.processes import Processes, plain_environment
from scripts.gpus import count_gpus, some_gpus
from scripts.ports import free_ports
from scripts.trainkit.job import ENTRY, Record, read_record


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every launch trains."""

    tree: Path
    """The patched Megatron-LM."""
    arguments: Sequence[str]
    """Of the entry script, the same for all backends."""
    warmup: int
    """Steps at the beginning that are not timed."""


NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_SHARDED = ("--use-distributed-optimizer",)
_HALF = ("--grad-reduce-in-bf16",)
_OVERLAP = "--overlap-grad-reduce"
_TOLERANCES = {"bf16": 2e-2, "int8": 2e-2, "int4": 1e-1}
"""Of losses, where gradients are summed or travel in this type."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to sum gradients and to hold the optimizer's state."""

    name: str
    arguments: tuple[str, ...] = ()
    """Of the entry script, besides those of all ways. ``{hosts}`` is the number of hosts."""
    settings: Mapping[str, str] = NO_SETTINGS
    """Environment variables of all nodes."""
    through_servers: bool = False
    loss_tolerance: float = 1e-3
    """Its losses may differ by so much of them from those of another way."""

    def megatron_arguments(self, hosts: int, common: Sequence[str]) -> list[str]:
        """With parameters gathered during the forward pass, where gradients overlap too."""
        own = [word.format(hosts=hosts) for word in self.arguments]
        if _SHARDED[0] in own and _OVERLAP in common:
            own.append("--overlap-param-gather")
        return own


def _ways() -> Iterator[Way]:
    """Each layout by torch.distributed and, named ``byteps-...``, with ``--use-dpu-reduce``."""
    inside = (*_SHARDED, "--num-distributed-optimizer-instances", "{hosts}")
    for name, arguments in (
        ("all-reduce", ()),
        ("sharded", _SHARDED),
        ("sharded-bf16", (*_SHARDED, *_HALF)),
        # The optimizer sharded inside each host.
        ("by-host", inside),
        ("by-host-bf16", (*inside, *_HALF)),
    ):
        yield _way(name, arguments)
        short = "byteps" if name == "all-reduce" else f"byteps-{name}"
        asked = (*arguments, "--use-dpu-reduce")
        yield _way(short, asked)
        for wire in ("bf16", "int8", "int4") if not name.endswith("bf16") else ():
            yield _way(f"{short}-wire-{wire}", (*asked, "--dpu-reduce-wire-dtype", wire))
    # The sharded recipe as it stands, with one flag added.
    recipe = (*_SHARDED, *_HALF, "--dpu-optimizer")
    yield _way("sharded-bf16-on-servers", recipe)
    # The optimizer on the servers: parameters come down before the norm is known, or after; the
    # ranks of a host sum first where several share one, or never; servers copy their state.
    servers = (*_HALF, "--use-dpu-reduce", "--dpu-optimizer")
    for name, more in (
        ("servers-bf16", ("--dpu-optimizer-clip", "speculate")),
        ("servers-bf16-wait", ("--dpu-optimizer-clip", "wait")),
        ("servers-bf16-flat", ("--dpu-reduce-route", "flat")),
        ("servers-int8", ("--dpu-reduce-wire-dtype", "int8")),
    ):
        yield _way(name, (*servers, *more))
    copies = {"BYTEPS_BACKUP_STATE": "1", "BYTEPS_REPLACE_SERVERS_S": "60"}
    yield _way("servers-bf16-copies", servers, copies)


def _way(name: str, arguments: tuple[str, ...], settings: Mapping[str, str] = NO_SETTINGS) -> Way:
    types = set(name.split("-")) & set(_TOLERANCES)
    return Way(
        name=name,
        arguments=arguments,
        settings=settings,
        through_servers=any(flag in arguments for flag in ("--use-dpu-reduce", "--dpu-optimizer")),
        loss_tolerance=max((_TOLERANCES[one] for one in types), default=Way.loss_tolerance),
    )


WAYS = {way.name: way for way in _ways()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One launch."""

    backend: str
    """The name of the way."""
    index: int
    step_s: list[float]
    """Each timed step."""
    tokens: int
    """Of a step, on all workers."""
    losses: list[float]
    """Of every step, not rounded."""
    checksum: str
    """Of the final parameters."""
    busy: float
    """Part of this machine's cores that was busy during the launch, its start included."""
    gpu_bytes: int = 0
    """What torch had in use at most on the GPU of a rank; 0 without GPUs."""
    routes: str = ""
    """How gradients were summed, as rank 0 told."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def step_seconds(record: Record, warmup: int) -> list[float]:
    """The time of each step after the first ``warmup`` ones. Raises LaunchError if none is left."""
    # The first step's own begin is not recorded, so that at least one is left out.
    ends = [step.seconds for step in record.steps][max(warmup, 1) - 1 :]
    spans = [after - before for before, after in itertools.pairwise(ends)]
    if not spans:
        raise LaunchError(f"{len(record.steps)} steps, {warmup} of them warm-up: nothing is timed")
    return spans


def arguments_of(what: Training, way: Way, hosts: int, route: str) -> list[str]:
    """For Megatron; a way that names its route keeps it."""
    routed = ("--dpu-reduce-route", route) if way.through_servers else ()
    return [*what.arguments, *routed, *way.megatron_arguments(hosts, what.arguments)]


def gpus_of(rank: int, ranks_per_host: int) -> str:
    """The GPUs that the host of a rank has, by CUDA_VISIBLE_DEVICES: one for each of its ranks.

    Hosts that outnumber GPUs share them evenly. A host sees no GPU that it does not use: torch
    takes a rank's number modulo those it sees for its GPU's, and hangs where that is wrong.

    Raises:
        LaunchError: a host has more ranks than there are GPUs.
    """
    if ranks_per_host > count_gpus():
        raise LaunchError(f"{ranks_per_host} ranks per host need as many GPUs, not {count_gpus()}")
    return some_gpus(rank // ranks_per_host * ranks_per_host, ranks_per_host)


def train(
    plan: Plan, what: Training, way: Way, index: int, hosts: Sequence[Host], route: str = "auto"
) -> Trained:
    """Start scheduler, servers and ranks, wait for their end, and read the record of the steps.

    Raises:
        LaunchError: a process failed or was late, or there is no record.
    """
    with (
        tempfile.TemporaryDirectory(prefix="train-bench-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(plan.topology, hosts, shares_gpus=plan.shares_gpus())
        record_file = Path(folder) / "steps.jsonl"
        environment = {**plain_environment(), "PYTHONWARNINGS": "ignore"}
        if plan.device == "cpu":
            environment["MEGATRON_CPU"] = "1"
        arguments = arguments_of(what, way, plan.topology.worker_hosts, route)
        arguments += ["--record-steps", str(record_file)]
        environment |= way.settings
        if way.through_servers:
            environment |= start_nodes(placement, processes, environment)[1]
        environment |= {
            "MASTER_ADDR": placement.workers[0].address,
            "MASTER_PORT": str(free_ports()),
        }
        before = machine.ticks()
        for rank, host in enumerate(placement.workers):
            command = [sys.executable, str(what.tree / ENTRY), *arguments]
            variables = rank_variables(rank, placement)
            if plan.device == "cuda":
                variables["CUDA_VISIBLE_DEVICES"] = gpus_of(rank, plan.topology.ranks_per_host)
            processes.start(f"worker-{rank}", command, host, {**environment, **variables})
        processes.wait_all(plan.timeout_s)
        busy = (machine.ticks() - before).fraction
        record = read_record(record_file)
        routes = routes_in(processes.text_of("worker-0"))
        if not record.checksum:
            raise LaunchError(f"training ended without its record\n{processes.logs()}")
    return Trained(
        backend=way.name,
        index=index,
        step_s=step_seconds(record, what.warmup),
        tokens=record.steps[-1].tokens,
        losses=[step.loss for step in record.steps],
        checksum=record.checksum,
        busy=busy,
        gpu_bytes=record.gpu_bytes,
        routes=routes,
    )


def routes_in(log: str) -> str:
    """The tables of how gradients are summed, and why, that a rank printed."""
    lines, inside = [], False
    for line in log.splitlines():
        inside = line.startswith("dpu_reduce: ") or (inside and line.startswith("  "))
        if inside:
            lines.append(line)
    return "\n".join(lines)


def show_memory(launches: Sequence[Trained]) -> str:
    """The most GPU memory of any launch, in GB."""
    most = max(one.gpu_bytes for one in launches)
    return f"{most / 1e9:.2f}" if most else "-"
