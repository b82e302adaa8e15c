"""A checkpoint goes to a store in many parts at once; one that the store refuses is an error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from scripts.children import Spawned, end_all, last_lines
from tests.object_store.saver import NUMBERS, TENSORS
from tests.object_store.stores import Bucket, s3
from tests.object_store.transfers import Transfers

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
PART_BYTES = 5 << 20
"""The smallest that S3 takes."""
LIMIT_S = 400.0
HOW = ("sync", "async")


def saved(bucket: Bucket, how: str, folder: Path) -> Spawned:
    """Ranks that save and read, and have ended."""
    profile = dict(bucket.profile)
    provider = profile["storage_provider"]
    parts = {"multipart_threshold": PART_BYTES, "multipart_chunksize": PART_BYTES}
    profile["storage_provider"] = {**provider, "options": {**provider["options"], **parts}}
    config = folder / "storage.json"
    config.write_text(json.dumps({"profiles": {"jobs": profile}}))
    environment = {
        **os.environ,
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
    # Each rank has a file. One part of each is refused, once.
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
    assert sorted(transfers.refused) == [(f"/checkpoints/{name}", 2) for name in sorted(files)]


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
    # Every rank says so, with the file of the one rank.
    assert process.text.count("CheckpointException") >= RANKS, last_lines(process.log, 80)
    assert "__1_0.distcp" in process.text and "500" in process.text
    assert len(transfers.refused) > 1
    # Nothing that could be taken for a checkpoint.
    assert "saved/.metadata" not in names and "saved/__1_0.distcp" not in names
