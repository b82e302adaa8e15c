"""Settings and limits of a job, and the places of its processes.

Ray names GPUs by the entries of its node's CUDA_VISIBLE_DEVICES: ``4`` in ``4,5``, or the UUID of a
GPU or a slice (MIG). CUDA numbers them by their index in that list. ``LOCAL_RANK`` must equal that
index for ``torch.cuda.set_device(LOCAL_RANK)``. BytePS counts ranks instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .profiling import Profile

_MODEL_PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


def option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of the last ``--name value`` or ``--name=value``."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    text = option(arguments, name)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} {text}: not a whole number from 1")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallelism of a job's ranks."""

    model: int
    """Number of ranks that hold a copy of the model: tensor times pipeline times context
    parallelism."""
    expert: int
    """Number of expert ranks; it must divide the number of ranks."""
    micro_batch: int
    global_batch: int | None
    """Sequences per step. None: as many as the copies process at the same time."""

    @classmethod
    def of(cls, arguments: Sequence[str], multiple: int | None = None) -> Layout:
        """Parse Megatron's arguments. Raises ValueError if a value is not a number."""
        model = 1
        for name in _MODEL_PARALLEL:
            model *= _number(arguments, name, 1)
        whole = option(arguments, "--global-batch-size")
        return cls(
            model=multiple or model,
            expert=_number(arguments, "--expert-model-parallel-size", 1),
            micro_batch=_number(arguments, "--micro-batch-size", 1),
            global_batch=_number(arguments, "--global-batch-size", 1) if whole else None,
        )

    def fits(self, ranks: int) -> bool:
        """Return whether a job of this many ranks can train with the same arguments."""
        if ranks < 1 or ranks % self.model or (ranks % self.expert):
            return False
        copies = ranks // self.model
        return self.global_batch is None or self.global_batch % (self.micro_batch * copies) == 0

    def largest(self, available: int) -> int:
        """Return the largest number of ranks that fits; 0 if there is none."""
        return next((ranks for ranks in range(available, 0, -1) if self.fits(ranks)), 0)


_SLICE = "MIG-"


def gpu_numbers(given: Sequence[str], mask: str | None) -> list[int]:
    """Return CUDA's numbers of these GPUs in a process with this ``mask``. None: the process sees
    all GPUs.

    Raises:
        ValueError: the mask lacks a GPU.
    """
    if mask is None:
        return [int(gpu) for gpu in given]
    visible = [gpu.strip() for gpu in mask.split(",")]
    for gpu in given:
        if gpu not in visible:
            raise ValueError(
                f"Ray gave GPU {gpu}, but ranks see CUDA_VISIBLE_DEVICES={mask}: set it for "
                "`ray start`, not for the ranks"
            )
    return [visible.index(gpu) for gpu in given]


def is_slice(given: Sequence[str]) -> bool:
    """Return whether the name is that of a slice of a GPU (MIG)."""
    return any(gpu.startswith(_SLICE) for gpu in given)


def local_variables(places: Sequence[Mapping[str, Any]], rank: int) -> dict[str, str]:
    """Return the variables for a rank's place on its machine.

    Args:
        places: for each rank, ``node``, ``gpus`` (CUDA's numbers) and ``slice``.
    """
    node, gpus = places[rank]["node"], places[rank]["gpus"]
    here = [other for other, facts in enumerate(places) if facts["node"] == node]
    number = here.index(rank)
    ours = {"BYTEPS_LOCAL_RANK": str(number), "BYTEPS_LOCAL_SIZE": str(len(here))}
    if not gpus:
        return {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(len(here)), **ours}
    highest = max(gpu for other in here for gpu in places[other]["gpus"])
    values = {"LOCAL_RANK": str(gpus[0]), "LOCAL_WORLD_SIZE": str(highest + 1), **ours}
    # NCCL does not allow two ranks of a host to share a GPU, so ranks that share one get different
    # host ids.
    if any(_sharers_before(places, here, other) for other in here):
        values["NCCL_HOSTID"] = f"{node}-{_sharers_before(places, here, rank)}"
    return values


def _sharers_before(places: Sequence[Mapping[str, Any]], here: Sequence[int], rank: int) -> int:
    """Return how many lower ranks have the same GPU. A slice's name does not identify its GPU, so
    all slices count as slices of one GPU."""
    own = places[rank]
    return sum(
        other < rank
        and (places[other]["gpus"] == own["gpus"] or (places[other]["slice"] and own["slice"]))
        for other in here
    )


_PORT_TRIES = 100


def free_port() -> int:
    """Return a port on which no process listens. Another process binds it later.

    The port is outside the kernel's ephemeral range, from which an outgoing connection might take
    it meanwhile.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    lowest, highest = (int(number) for number in given.split())
    # Ray's workers use ports below 20000. If few are left there, a port above the range is used.
    ports = range(20_000, lowest) if lowest > 21_000 else range(highest + 1, 65_536)
    for _ in range(_PORT_TRIES if ports else 0):
        port = ports[secrets.randbelow(len(ports))]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


METRICS_PORT = "BYTEPS_METRICS_PORT"
"""Variable of the first metrics port. Each server has a port, on any machine, and the ranks have
the following ports. So no two processes of a machine have the same port."""
METRICS_FILE = "prometheus.json"
"""File in the job's folder. Prometheus reads it as ``file_sd_configs``, again after each change."""


def first_metrics_port(environment: Mapping[str, str]) -> int:
    """Return the first metrics port; 0: metrics are off.

    Raises:
        ValueError: the variable is not a port.
    """
    text = environment.get(METRICS_PORT, "0")
    if not (text.isdigit() and int(text) < 1 << 16):
        raise ValueError(
            f"{METRICS_PORT}={text} is no port: set it to the first of those to use, or 0"
        )
    return int(text)


def metrics_of_server(environment: Mapping[str, str], index: int) -> dict[str, str]:
    """Return the variable for a server."""
    first = first_metrics_port(environment)
    return {METRICS_PORT: str(first + index)} if first else {}


def metrics_of_ranks(environment: Mapping[str, str], servers: int) -> dict[str, str]:
    """Return the variable for ranks. Each rank adds its BYTEPS_LOCAL_RANK."""
    return metrics_of_server(environment, servers)


def write_metrics_list(
    folder: Path, ranks: int, servers: Sequence[str], places: Sequence[Mapping[str, Any]]
) -> None:
    """Replace the list of metrics addresses in this folder.

    Args:
        ranks: the first port of ranks.
        servers: metrics address of each server, ``address:port``.
        places: places of the ranks; see ``local_variables``. They also have ``address``.
    """
    targets = [
        {"targets": [where], "labels": {"job": folder.name, "server": str(index)}}
        for index, where in enumerate(servers)
    ]
    for rank, facts in enumerate(places):
        port = ranks + int(local_variables(places, rank)["BYTEPS_LOCAL_RANK"])
        labels = {"job": folder.name, "worker": str(rank)}
        targets.append({"targets": [f"{facts['address']}:{port}"], "labels": labels})
    new = folder / f"{METRICS_FILE}.new"
    new.write_text(json.dumps(targets, indent=1) + "\n", encoding="utf-8")
    new.replace(folder / METRICS_FILE)


FORWARDED = ("BYTEPS_", "DMLC_INTERFACE", "GLOO_", "MEGATRON_", "NCCL_", "OMP_", "TORCH_")
"""Prefixes of the driver's variables that are set in all ranks and servers."""

SET_BY_DRIVER = ("BYTEPS_SECRET_FILE",)
"""Variables that are not forwarded, because their file may exist on the driver's machine only."""


PRELOAD = ("torch", "byteps.torch", "megatron.training.training")
"""Modules that a Megatron script imports first."""
_NO_MEMORY = {
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--dpu-optimizer"),
    *("--dist-ckpt-optim-fully-reshardable", "--no-save-optim", "--no-save-rng"),
    *("--finetune", "--no-load-optim", "--no-load-rng"),
}
"""Arguments of jobs whose state Megatron's local checkpoints do not hold, or do not restore."""
_PRELOAD_HUGGING_FACE = "megatron_byteps_hf.preload"


def preload_for(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to import beforehand for a Megatron script with these arguments.

    Megatron-Bridge, which ``--hf-model`` needs, takes as long to import as all others together.
    """
    pretrained = any(a.partition("=")[0] == "--hf-model" for a in arguments)
    return (*PRELOAD, _PRELOAD_HUGGING_FACE) if pretrained else PRELOAD


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits, in seconds."""

    place: float = 300.0
    """Ray's placement of all actors."""
    warm: float = 600.0
    """Time for an actor to import its modules."""
    start: float = 600.0
    """Time from a rank's start to its first step."""
    step: float = 600.0
    """Time from one step to the next."""
    save: float = 1800.0
    """A checkpoint, an evaluation, or the script's work after its last step."""
    beat: float = 300.0
    """Silence of a rank's process."""
    wait: float = 3600.0
    """Waiting for capacity after ranks were lost and there are no spares."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 < value < 1e9:
                raise ValueError(f"the limit {name!r} must be a positive number, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a job. Raises ValueError for invalid settings."""

    entry: str
    """Script to run: a path ending in .py, or ``module:function``."""
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    """Number of ranks of all replicas together."""
    replicas: int = 1
    """Number of replicas: jobs of equal size that train the same model, and meet only at the
    servers. Each restarts by itself. ``spares`` is per replica."""
    spares: int = 0
    """Number of additional actors, which have imported everything and wait."""
    servers: int = 1
    """Number of ``byteps-server`` processes. 0: BytePS is not used, or has a cluster of its own."""
    min_ranks: int | None = None
    """Smallest number of ranks with which the job goes on, if a lost rank cannot be replaced. None:
    it never goes on with fewer ranks."""
    rank_multiple: int | None = None
    """The number of ranks must be a multiple of this. None: from Megatron's arguments."""
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    """Number of GPUs per rank: 1, 0, or a fraction if ranks share a GPU."""
    server_cpus: float = 1.0
    server_resource: str | None = None
    """Ray resource of the machines on which scheduler and servers run, such as "byteps"."""
    folder: Path = Path("build/ray")
    """Folder for state, logs and the record of steps. It has the same path on each machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks and servers, in addition to the driver's that are forwarded."""
    python_path: tuple[str, ...] = ()
    """Folders from which ranks import first."""
    preload: tuple[str, ...] = PRELOAD
    """Modules that are imported before they are needed."""
    max_restarts: int = 20
    """Total number of restarts of the job."""
    max_fruitless: int = 3
    """Limit of restarts in a row without a single step."""
    memory_save_interval: int | None = None
    """Interval, in steps, at which each rank's training state is kept in the memory of machines.
    None: off. Needs a script that uses Megatron's loop, and nvidia-resiliency-ext."""
    limits: Limits = Limits()
    profile: Profile | None = None
    """Profile to make, if any."""
    resume: bool = False
    """Whether to continue the counts of generations and restarts in the folder, after the driver
    itself was lost."""

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("spares", 0), ("servers", 0), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")
        self._check_replicas()
        first_metrics_port(self.forwarded())
        if self.max_fruitless < 1:
            raise ValueError(f"max_fruitless must be 1 or more, not {self.max_fruitless}")
        if self.memory_save_interval is not None:
            if self.memory_save_interval < 1:
                raise ValueError(
                    f"memory_save_interval must be 1 or more, not {self.memory_save_interval}"
                )
            for name in _NO_MEMORY & {argument.partition("=")[0] for argument in self.arguments}:
                raise ValueError(f"memory_save_interval does not go with {name}")
            if option(self.arguments, "--save") is None:
                raise ValueError("memory_save_interval needs the script's --save, too")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= self.ranks:
            raise ValueError(f"min_ranks must be from 1 to {self.ranks}, not {self.min_ranks}")
        beyond = [rank for rank in self.profile.ranks if rank >= self.ranks] if self.profile else []
        if beyond:
            raise ValueError(f"rank {beyond[0]} cannot be profiled: there are {self.ranks} ranks")
        if not 0.0 <= self.gpus_per_rank <= 1.0:
            raise ValueError(
                f"a rank has one GPU, a part of one, or none: not {self.gpus_per_rank:g}"
            )
        if not self.entry.endswith(".py") and not all(self.entry.partition(":")):
            raise ValueError(f"the entry must be a .py file or module:function, not {self.entry!r}")

    def _check_replicas(self) -> None:
        if self.replicas == 1:
            return
        if self.replicas < 1 or self.ranks % self.replicas:
            raise ValueError(
                f"{self.ranks} ranks are not {self.replicas} replicas of equal size: make ranks a "
                "multiple of replicas"
            )
        if not self.servers:
            raise ValueError("replicas meet at servers: ask for at least one")
        for name in ("min_ranks", "memory_save_interval", "profile"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not go with replicas")
        if self.resume:
            raise ValueError("resume does not go with replicas: give the script --load")

    @property
    def is_replica(self) -> bool:
        """Return whether the job is one of several replicas that train the same model."""
        return "BYTEPS_REPLICA" in self.environment

    @property
    def leaves_when_told(self) -> bool:
        """Return whether ranks end after a step when they get SIGTERM. Ranks of a replica do, and
        so do ranks of a script that then saves a checkpoint."""
        return self.is_replica or "--exit-signal-handler" in self.arguments

    def secret(self) -> str:
        """Return the job's secret: that of the environment, or a new one. Empty without
        authentication.

        Raises:
            ValueError: BYTEPS_SECRET_FILE cannot be read.
        """
        if os.environ.get("BYTEPS_AUTH") == "0":
            return ""
        if os.environ.get("BYTEPS_SECRET"):
            return os.environ["BYTEPS_SECRET"]
        name = os.environ.get("BYTEPS_SECRET_FILE")
        if name:
            try:
                return Path(name).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(f"cannot read BYTEPS_SECRET_FILE: {error}") from error
        return secrets.token_hex(32) if self.servers else ""

    def forwarded(self) -> dict[str, str]:
        """Return the driver's variables that all processes get, and those of the settings."""
        # A job with servers of its own sets DMLC_ variables itself. The driver's variables name
        # another cluster.
        begins = FORWARDED if self.servers else (*FORWARDED, "DMLC_")
        own = {k: v for k, v in os.environ.items() if k.startswith(begins)}
        return {k: v for k, v in own.items() if k not in SET_BY_DRIVER} | dict(self.environment)
