"""Starts the ranks of a job, on the CPU with gloo or on GPUs with NCCL, and collects their results.

The import of torch and Megatron takes seconds in a process. So ranks are forked from
multiprocessing's fork server, which imports both once. Ranks meet as under torchrun: through a
store in this process, on a port that the kernel chooses.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.prepare_data import Dataset, prepare

if TYPE_CHECKING:
    from megatron_byteps_ray.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Settings of a training job for a kind of device."""

    name: str
    environment: Mapping[str, str]
    """Environment variables of every rank."""
    arguments: tuple[str, ...] = ()
    """Arguments of Megatron, under either backend."""
    shares_devices: bool = False
    """Whether ranks have GPUs. Ranks of different assumed hosts share GPUs if hosts have several
    ranks."""
    preloaded: tuple[str, ...] | None = None
    """Modules that the fork server imports; None for the program's module, with all that it
    needs."""


CPU = Platform(
    name="cpu",
    # This variable is set on machines with GPUs, too.
    environment={"MEGATRON_CPU": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
)

CUDA = Platform(
    name="cuda",
    environment={
        "MEGATRON_CPU": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron requires it for tensor parallelism
        # The two runs are compared bit by bit, so matrix products and NCCL add in a fixed order.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    },
    shares_devices=True,
    # Options that work without Transformer Engine and Apex, and without a compiler at run time.
    arguments=(
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
        *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-bias-gelu-fusion"),
        *("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--disable-jit-fuser"),
    ),
    # The import of Megatron queries the number of GPUs, and CUDA cannot start in a forked child
    # after that.
    preloaded=("torch",),
)

CUDA_TE = dataclasses.replace(
    CUDA,
    # Transformer Engine's layers read this variable in their constructors.
    environment={**CUDA.environment, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    # There is no compiler at run time.
    arguments=("--transformer-impl", "transformer_engine", "--disable-jit-fuser"),
)
"""GPUs with layers of Transformer Engine."""

PLATFORMS = {platform.name: platform for platform in (CPU, CUDA)}

THROUGH_SERVERS = ("--use-dpu-reduce", "--dpu-reduce-backend", "flat")
"""Arguments of Megatron."""
SMALL_PARTITIONS = {"BYTEPS_PARTITION_BYTES": "4096"}
TWO_SERVERS = {"BYTEPS_EMBEDDED_SERVERS": "2", **SMALL_PARTITIONS}
"""Variables of ranks: with these, errors in the choice of a server or of the pulled part show."""


LIMIT_S = 240.0
STACKS_BEFORE_S = 10.0
"""Seconds before the limit at which a rank that still runs writes its threads' stacks."""
_STARTING = threading.Lock()
_CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
_started_for: Platform | None = None


class JobFailed(AssertionError):
    """Raised if ranks did not end as expected. The text has the end of their logs."""


@contextmanager
def _environment(values: Mapping[str, str]) -> Any:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_fork_server(modules: Sequence[str], platform: Platform = CPU) -> None:
    """Start the fork server, unless it runs.

    The server imports these modules first, or only those that the platform allows. Thread-safe.

    Raises:
        ValueError: This process's fork server has imported modules that the platform does not
            allow.
    """
    global _started_for
    # Some releases of Python do not pass sys.path to the server. If the server cannot import a
    # module, every child must import it.
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with _STARTING, _environment({**platform.environment, **path}):
        if _started_for is not None and _started_for.preloaded != platform.preloaded:
            raise ValueError(
                f"the fork server of this process is for {_started_for.name}, not for "
                f"{platform.name}: ranks of another platform need another process"
            )
        _started_for = platform
        _CONTEXT.set_forkserver_preload(list(platform.preloaded or modules))
        forkserver.ensure_running()


@contextmanager
def forked(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a function in a process of the fork server, which runs, until the context ends."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


@dataclass
class Job:
    """A program on some ranks, each with a log and a result in the job's folder.

    The program, ``module:function``, is called with the folder and the settings. The setting
    ``environment`` is added to the variables that torchrun would set.
    """

    folder: Path
    program: str
    ranks: int
    settings: Mapping[str, Any]
    platform: Platform = CPU
    per_host: int = 1
    """Number of consecutive ranks on an assumed host."""
    first_gpu: int = 0
    """Index of rank 0's GPU, if ranks have GPUs: concurrent jobs start at different GPUs."""

    def run(self, *, fails: bool = False) -> None:
        """Run to the end. Raises JobFailed unless all ranks succeed (with ``fails``: unless none
        does)."""
        from torch.distributed import TCPStore

        self.folder.mkdir(parents=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [
            _CONTEXT.Process(target=_rank, args=(self._environment(rank, store.port), self, rank))
            for rank in range(self.ranks)
        ]
        start_fork_server([self.program.partition(":")[0]], self.platform)
        for process in processes:
            process.start()
        try:
            self._wait(processes, fails=fails)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                # The rank's children are killed, too: Megatron's checkpoint writers would wait for
                # work.
                with suppress(ProcessLookupError):
                    assert process.pid is not None  # it was started
                    os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, processes: list[Any], *, fails: bool) -> None:
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode not in (0, None) and not fails:
                break  # the others would wait for this rank forever
        codes = [process.exitcode for process in processes]
        good = all(codes) and None not in codes if fails else codes == [0] * self.ranks
        if not good:
            raise JobFailed(f"{self.program}: exit codes {codes}\n{self.logs()}")

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """Make the environment that torchrun would set, with the store in this process."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DMLC_", "BYTEPS_", "MEGATRON_", "TORCHELASTIC_"))
        }
        size, host = str(self.ranks), rank // self.per_host
        own: dict[str, str] = {}
        if self.platform.shares_devices:
            own = self._gpus(rank)
        return {
            **inherited,
            **self.platform.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "BYTEPS_HOST_ID": f"host{host}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **own,
            **dict(self.settings.get("environment", {})),
        }

    def _gpus(self, rank: int) -> dict[str, str]:
        """Make the variables that give a rank its GPU.

        Hosts share GPUs if there are more hosts than GPUs. If each host has one rank, ranks share
        GPUs in this way. To NCCL, a host with more ranks than GPUs looks like several machines.
        """
        from scripts import children

        together = self.per_host if self.per_host > 1 else self.ranks
        per_machine = min(together, children.count_gpus())
        first = self.first_gpu + rank // per_machine * per_machine
        return {
            # No other GPU is visible: torch takes the rank modulo the number of GPUs as its index.
            "CUDA_VISIBLE_DEVICES": children.some_gpus(first, per_machine),
            **children.place_among(rank, per_machine),
        }

    def log_of(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def logs(self, lines: int = 40) -> str:
        parts = []
        for rank in range(self.ranks):
            if self.log_of(rank).exists():
                text = self.log_of(rank).read_text(errors="replace").splitlines()
                parts += [f"---- rank {rank}", *text[-lines:]]
        return "\n".join(parts)

    def result(self, rank: int) -> Any:
        """Load the program's result on this rank."""
        import torch

        return torch.load(self.folder / f"rank{rank}.pt", weights_only=False)

    def results(self) -> list[Any]:
        """Load the program's result on each rank."""
        return [self.result(rank) for rank in range(self.ranks)]


def _rank(environment: dict[str, str], job: Job, rank: int) -> None:
    """Run a rank in a process of its own."""
    # No object of the parent is garbage here. A collection would copy all of the parent's memory.
    gc.freeze()
    gc.enable()
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    # Megatron's own children are forked, like in any other process.
    multiprocessing.set_start_method("fork", force=True)
    log = os.open(job.log_of(rank), os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a crash leaves the stacks of all threads in the log
    faulthandler.dump_traceback_later(LIMIT_S - STACKS_BEFORE_S)  # and so does a rank that hangs
    try:
        import torch

        module, _, function = job.program.partition(":")
        program = getattr(importlib.import_module(module), function)
        result = program(job.folder, **job.settings)
        torch.save(result, job.folder / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def tiny_dataset(folder: Path) -> Dataset:
    """Write a few thousand bytes of text that a small model can learn, in Megatron's format, into
    an existing folder."""
    # Several documents: Megatron splits them between training and validation.
    sources = [folder / f"{number}.txt" for number in range(10)]
    for number, source in enumerate(sources):
        lines = (f"{number} times {n} is {number * n}.\n" for n in range(60))
        source.write_text("".join(lines))
    return prepare(sources, folder, 1 << 20)


def data_arguments(dataset: Dataset) -> list[str]:
    """Get Megatron's arguments to read the dataset."""
    cache = dataset.prefix.parent / "cache"
    return ["--data-path", str(dataset.prefix), "--data-cache-path", str(cache)]


# ----- sharing of GPUs by more ranks; scripts.children imports torch


def gpus_to_offer(settings: Settings) -> int | None:
    """Get the number of GPUs to give to ``cluster`` when Ray would find too few.

    This is a GPU for each rank and spare. None if ranks need no GPUs, or if the machine has enough
    GPUs.
    """
    from scripts.children import outnumbered

    wanted = int((settings.ranks + settings.spares) * settings.gpus_per_rank)
    return wanted if outnumbered(wanted) else None


def take_a_share() -> None:
    """Choose an existing GPU in a rank whose GPU index would be its local rank.

    Does nothing if ranks compute on the CPU or have a GPU each.
    """
    from scripts.children import count_gpus, outnumbered, place_among

    on_gpus = os.environ["MEGATRON_CPU"] != "1"
    if on_gpus and outnumbered(int(os.environ["LOCAL_WORLD_SIZE"])):
        os.environ |= place_among(int(os.environ["LOCAL_RANK"]), count_gpus())
