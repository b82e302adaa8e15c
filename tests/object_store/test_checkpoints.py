"""Checkpoints in an object store: a job survives the loss of a rank, and parts travel
concurrently."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.ray_failures.cases import (
    CASES,
    IN_BACKGROUND,
    STEPS,
    STRIKE,
    Case,
    Runner,
    pool_settings,
    problems,
)
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.settings import Settings
from scripts.children import Spawned, end_all, last_lines
from tests.layouts.under_ray.modes import warm_pool
from tests.object_store.saver import NUMBERS, TENSORS
from tests.object_store.stores import BUCKET, STORES, Bucket, Transfers, s3


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Settings]]:
    """Actors that the tests share, and their settings."""
    settings = pool_settings(tmp_path_factory.mktemp("pool"), spares=1)
    with warm_pool(settings) as pool:
        yield pool, settings


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", STORES)
def test_checkpoints_in_a_store(kind: str, warm: tuple[Pool, Settings], run_dir: Path) -> None:
    pool, settings = warm
    config = run_dir / "storage.json"
    lost = CASES["actor"]
    case = Case(
        title="",
        # The fault comes after the second checkpoint has begun. It is written in the background,
        # and may exist or not.
        faults=[{**lost.faults[0], "when": STRIKE + 3}],
        blames=lost.blames,
        arguments=[
            *("--enable-msc", "--save", "msc://jobs{folder}/saved"),
            *("--use-distributed-optimizer", *IN_BACKGROUND),
        ],
    )
    with STORES[kind]() as bucket:
        environment = {**settings.environment, **bucket.environment, "MSC_CONFIG": str(config)}
        config.write_text(json.dumps({"profiles": {"jobs": bucket.profile}}))
        runner = Runner(pool, replace(settings, environment=environment), run_dir / "jobs")
        outcome, whole = runner.run("lost", case), runner.uninterrupted(case)
        # The job continued from the store, which has all files. This machine has none of them.
        prefix = str(outcome.folder).lstrip("/")
        names = [name for name in bucket.names() if name.startswith(prefix)]
        tracker = bucket.read(f"{prefix}/saved/latest_checkpointed_iteration.txt")
    assert problems(case, outcome, whole) == []
    assert min(s["step"] for s in outcome.steps if s["generation"] == 1) in (5, 9)
    assert tracker == str(STEPS).encode()
    assert any(f"iter_{STEPS:07d}/" in name and name.endswith(".distcp") for name in names)
    assert not (outcome.folder / "saved").exists()


# A checkpoint goes to a store in many concurrent parts; a refused part is an error.


ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
PART_BYTES = 5 << 20
"""Smallest part that S3 accepts."""
LIMIT_S = 400.0
HOW = ("sync", "async")


def saved(bucket: Bucket, how: str, folder: Path) -> Spawned:
    """Run ranks that save and read, to their end."""
    profile = dict(bucket.profile)
    provider = profile["storage_provider"]
    parts = {"multipart_threshold": PART_BYTES, "multipart_chunksize": PART_BYTES}
    profile["storage_provider"] = {**provider, "options": {**provider["options"], **parts}}
    config = folder / "storage.json"
    config.write_text(json.dumps({"profiles": {"jobs": profile}}))
    environment = {
        **os.environ,
        **bucket.environment,
        "PYTHONPATH": str(ROOT),
        "MSC_CONFIG": str(config),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", "tests.object_store.saver"]
    process = Spawned("saver", [*command, "msc://jobs/saved", how], environment, folder)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    return process


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOW)
def test_parts_of_several_files_are_in_flight_at_once(how: str, tmp_path: Path) -> None:
    # Each rank has a file. One part of each file is refused once.
    transfers = Transfers(
        together=3, objects=RANKS, refuses=lambda name, number, attempt: (number, attempt) == (2, 1)
    )
    with s3(transfers) as bucket:
        process = saved(bucket, how, tmp_path)
        assert process.status == 0, last_lines(process.log, 60)
        files = [name for name in bucket.names() if name.endswith(".distcp")]
        sizes = [len(bucket.read(name)) for name in files]
    assert transfers.met, "no three parts of both files were in flight at once"
    assert all(f"read {rank}" in process.text for rank in range(RANKS))
    assert len(files) == RANKS and all(size > 4 * NUMBERS * TENSORS for size in sizes)
    assert sorted(transfers.refused) == [(f"/{BUCKET}/{name}", 2) for name in sorted(files)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOW)
def test_a_part_that_is_refused_ends_the_save(how: str, tmp_path: Path) -> None:
    transfers = Transfers(
        refuses=lambda name, number, attempt: name.endswith("__1_0.distcp") and number == 2
    )
    with s3(transfers) as bucket:
        process = saved(bucket, how, tmp_path)
        names = bucket.names()
    assert process.status not in (0, None), last_lines(process.log, 60)
    assert "read" not in process.text.split()
    # Every rank reports the failed file of the single rank.
    assert process.text.count("CheckpointException") >= RANKS, last_lines(process.log, 80)
    assert "__1_0.distcp" in process.text and "500" in process.text
    assert len(transfers.refused) > 1
    # The store has no file that looks like a checkpoint.
    assert "saved/.metadata" not in names and "saved/__1_0.distcp" not in names
