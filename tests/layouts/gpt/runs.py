"""Trains a layout through both backends and hands what was seen to the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.prepare_data import Dataset

from ..data import data_arguments
from ..job import Job
from ..platforms import CPU, TWO_SERVERS, Platform
from . import few_bits
from .compare import compare
from .outcome import Report
from .rows import LAYOUTS, Layout
from .updates import compare_updates

PROGRAM = "tests.layouts.gpt.rank:train"
FLAG = "--use-dpu-reduce"
GPUS_APART = 3
"""From the first GPU of one layout to that of the next: layouts side by side spread evenly."""
# Small pieces: those of a bucket are summed inside the host and between hosts at the same time.
_SERVERS = {**TWO_SERVERS, "BYTEPS_NODE_PIECE_BYTES": "2048"}


def train(
    layout: Layout,
    folder: Path,
    data: Sequence[str],
    *,
    through_byteps: bool,
    platform: Platform = CPU,
    program: str = PROGRAM,
    fails: bool = False,
    options: Mapping[str, object] | None = None,
) -> Job:
    """One run, each rank a process.

    Raises:
        JobFailed: a rank failed, or with ``fails`` one did not.
    """
    arguments = [*platform.arguments, *layout.megatron_arguments(), *data]
    environment: dict[str, str] = {}
    few: dict[str, str] = {}
    if through_byteps:
        arguments += layout.byteps_arguments()
        few = few_bits.ENVIRONMENT if layout.has_few_bits else {}
        environment = {**_SERVERS, **few, **dict(layout.environment)}
    settings = {
        "arguments": arguments,
        "environment": environment,
        "frozen": layout.frozen,
        "exact": layout.is_held_against_fp64,
        "bits_per_host": layout.per_host if few and layout.servers else 0,
        "packed": layout.packed,
        "graphed": layout.graphed,
        "family": layout.family,
        **(options or {}),
    }
    first_gpu = GPUS_APART * LAYOUTS.index(layout) if layout in LAYOUTS else 0
    job = Job(folder, program, layout.ranks, settings, platform, layout.per_host, first_gpu)
    job.run(fails=fails)
    return job


def check(layout: Layout, folder: Path, dataset: Dataset, platform: Platform = CPU) -> Report:
    """Train the layout both ways, in a new folder, and compare.

    Raises:
        JobFailed: a run failed, or one that must be refused did not.
    """
    data = data_arguments(dataset)
    folder.mkdir(parents=True)
    if layout.refused:
        return _check_refused(layout, folder, data, platform)
    ours = train(layout, folder / "byteps", data, through_byteps=True, platform=platform)
    theirs = train(layout, folder / "all-reduce", data, through_byteps=False, platform=platform)
    held = compare_updates if layout.servers else compare
    return held(layout, ours.results(), theirs.results())


def _check_refused(layout: Layout, folder: Path, data: Sequence[str], platform: Platform) -> Report:
    job = train(layout, folder / "byteps", data, through_byteps=True, platform=platform, fails=True)
    report = Report(layout=layout)
    flag = "--dpu-optimizer" if layout.servers else FLAG
    text = f"{flag} does not work with {layout.refused}"
    for rank in range(layout.ranks):
        if text not in job.log_of(rank).read_text(errors="replace"):
            report.misses.append(f"rank {rank} did not say '{text}'")
    return report
