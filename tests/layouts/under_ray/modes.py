"""Trains a layout locally and under Ray, on a pool of actors, and compares the two runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_byteps_ray.cluster import Pool, cluster
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.settings import PRELOAD, Limits, Settings
from tests.layouts.gpt.layout import RankSeen
from tests.layouts.hugging_face.runs import make_model
from tests.layouts.job import CPU, SMALL_PARTITIONS, THROUGH_SERVERS, Platform, gpus_to_offer
from tests.layouts.job import Job as LocalJob

from .rows import Cell

ROOT = Path(__file__).resolve().parents[3]


def environment_on(platform: Platform) -> dict[str, str]:
    """Get the environment variables of all ranks and servers."""
    return {
        **platform.environment,
        "PYTHONWARNINGS": "ignore",
        # Sums of more than two values get the same result in any order.
        "BYTEPS_DETERMINISTIC": "1",
    }


def settings_on(platform: Platform, folder: Path, **changes: Any) -> Settings:
    """Return settings of a pool whose actors can import the patched Megatron."""
    settings: dict[str, Any] = {
        "folder": folder,
        "arguments": platform.arguments,
        "gpus_per_rank": float(platform.shares_devices),
        "environment": environment_on(platform),
        "python_path": (str(ROOT / "build/Megatron-LM"),),
        "limits": Limits(warm=1200.0),
    }
    return Settings(**settings, **changes)


@contextmanager
def warm_pool(settings: Settings, *, of_cluster: Settings | None = None) -> Iterator[Pool]:
    """Run the actors of `settings` in a Ray cluster, sized for them or for `of_cluster`."""
    # Ray's sockets need a short path, and its processes may still write there when they end.
    with (
        tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster(of_cluster or settings, temp_dir=folder, gpus=gpus_to_offer(settings)),
    ):
        pool = Pool(settings)
        try:
            pool.open()
            yield pool
        finally:
            pool.close()


SERVERS = 2
MODULE = "tests.layouts.under_ray.witness"
ENTRY = f"{MODULE}:main"
PROGRAM = "tests.layouts.gpt.rank:train"
_ENVIRONMENT = {**SMALL_PARTITIONS, "HF_HUB_OFFLINE": "1"}


def settings_of_pool(folder: Path, ranks: int, platform: Platform = CPU) -> Settings:
    """Make settings of the actors that all cells share."""
    return settings_on(
        platform,
        folder,
        entry=ENTRY,
        ranks=ranks,
        spares=0,
        servers=SERVERS,
        # All actors are on this machine. With few cores Ray starts few workers ahead of time.
        cpus_per_rank=0.125,
        server_cpus=0.125,
        preload=(*PRELOAD, "pretrain_dpu_gpt", "megatron_byteps_hf.preload", MODULE),
    )


def run_locally(
    cell: Cell, folder: Path, arguments: Sequence[str], platform: Platform = CPU
) -> list[RankSeen]:
    """Train as under torchrun, with servers in the ranks, and get each rank's results.

    Raises:
        JobFailed: A rank failed; the text has its log.
    """
    own = {**environment_on(platform), **_ENVIRONMENT, "BYTEPS_EMBEDDED_SERVERS": str(SERVERS)}
    # The job sets the platform's GPU variables, because they differ by rank.
    environment = {name: value for name, value in own.items() if name not in platform.environment}
    everything = [*arguments, *THROUGH_SERVERS, *platform.arguments]
    settings = {"arguments": everything, "environment": environment}
    job = LocalJob(folder, PROGRAM, cell.ranks, settings, platform)
    job.run()
    return job.results()


def run_under_ray(
    cell: Cell, folder: Path, arguments: Sequence[str], pool: Pool, settings: Settings
) -> list[RankSeen]:
    """Train on the pool's actors and get each rank's results.

    Args:
        settings: Settings of the pool.

    Raises:
        JobError: A rank failed; the text has the end of its log.
    """
    import torch

    folder.mkdir(parents=True)
    own = replace(
        settings,
        entry=ENTRY,
        arguments=(*arguments, *THROUGH_SERVERS, *settings.arguments),
        ranks=cell.ranks,
        folder=folder,
        environment={**settings.environment, **_ENVIRONMENT, "LAYOUTS_SEEN": str(folder)},
        max_restarts=0,
    )

    def ignore(event: dict[str, Any]) -> None:
        del event

    Job(own, ignore, pool).run()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(cell.ranks)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a cell."""

    groups: int
    """Number of groups of ranks that sum gradients through BytePS."""
    sums: int
    """Number of sums in a step, over all groups."""
    differences: list[str]
    """Differences between the two runs; empty if every bit is equal."""
    problems: list[str]
    """Other failed checks."""

    @property
    def good(self) -> bool:
        return not self.differences and not self.problems


def compare(local: Sequence[RankSeen], ray: Sequence[RankSeen]) -> Outcome:
    """Compare a run under Ray with the local run, rank by rank."""
    from tests.layouts.gpt.compare import differences  # imports torch

    wrong = list(differences(local, ray))
    for rank, (here, other) in enumerate(zip(local, ray, strict=True)):
        if sorted(here.names) != sorted(other.names):
            wrong.append(f"rank {rank}: other sums by BytePS")
    sums = {
        (total.members, name)
        for seen in ray
        for name, total in seen.steps[0].sums.items()
        if len(total.members) > 1
    }
    shared = {rank for members, _ in sums for rank in members}
    problems = []
    for rank, seen in enumerate(ray):
        if bool(seen.pushed_bytes) != (rank in shared):
            problems.append(f"rank {rank} pushed {seen.pushed_bytes} bytes")
        if seen.steps[0].grad_norm in (None, 0.0):
            problems.append(f"rank {rank} has the gradients' norm {seen.steps[0].grad_norm}")
    if len(set(_losses(ray))) != len(_losses(ray)):
        problems.append(f"nothing was learned: {_losses(ray)}")
    return Outcome(
        groups=len({members for members, _ in sums}),
        sums=len(sums),
        differences=wrong,
        problems=problems,
    )


def _losses(seen: Sequence[RankSeen]) -> list[float]:
    """Get the loss of each step from a rank of the last pipeline stage."""
    known = next(rank for rank in seen if rank.steps[0].loss is not None)
    return [step.loss for step in known.steps if step.loss is not None]


def arguments_of(cell: Cell, data: Sequence[str], models: Path) -> list[str]:
    """Get the training script's arguments; a Hugging Face model is made if it does not exist."""
    model = ["--hf-model", str(make_model(cell.model, models))] if cell.model else []
    return [*model, *cell.arguments, *data]
