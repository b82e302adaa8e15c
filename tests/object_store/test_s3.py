"""A job whose checkpoints are in an object store survives the loss of a rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from megatron_byteps_ray.cluster import cluster
from megatron_byteps_ray.pool import Pool
from raykit.cases import CASES, STEPS, STRIKE, Case, Runner, pool_settings, problems

BUCKET = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An empty one, and how to reach it."""

    client: Any
    config: dict[str, Any]
    """Of Megatron's storage client: the profile ``jobs`` is the bucket."""

    def names(self) -> list[str]:
        """Of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        where = {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        client = boto3.client("s3", **where, **keys)
        client.create_bucket(Bucket=BUCKET)
        provider = {"type": "s3", "options": {"base_path": BUCKET, **where}}
        options = {"access_key": "any", "secret_key": "any"}
        credentials = {"type": "S3Credentials", "options": options}
        profile = {"storage_provider": provider, "credentials_provider": credentials}
        yield Bucket(client=client, config={"profiles": {"jobs": profile}})
    finally:
        server.stop()


@pytest.mark.timeout(1800)
def test_checkpoints_in_s3(bucket: Bucket, run_dir: Path) -> None:
    config = run_dir / "storage.json"
    config.write_text(json.dumps(bucket.config))
    settings = pool_settings(run_dir / "pool", spares=1)
    settings = replace(settings, environment={**settings.environment, "MSC_CONFIG": str(config)})
    in_store = ["--enable-msc", "--save", "msc://jobs{folder}/saved"]
    lost = CASES["actor"]
    case = Case(
        title="",
        # After the second checkpoint has been begun: written in the background, it is there or not.
        faults=[{**lost.faults[0], "when": STRIKE + 3}],
        blames=lost.blames,
        arguments=[*in_store, "--use-distributed-optimizer", "--async-save"],
    )
    # Ray's sockets need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="s3-", dir="/tmp") as scratch,
        cluster(settings, temp_dir=scratch),
    ):
        pool = Pool(settings)
        try:
            pool.open()
            runner = Runner(pool, settings, run_dir / "jobs")
            outcome, whole = runner.run("lost", case), runner.uninterrupted(case)
        finally:
            pool.close()
    assert problems(case, outcome, whole) == []
    # It went on from the store, which holds all of it; this machine holds nothing.
    assert min(s["step"] for s in outcome.steps if s["incarnation"] == 1) in (5, 9)
    prefix = str(outcome.folder).lstrip("/")
    names = [name for name in bucket.names() if name.startswith(prefix)]
    tracker = bucket.client.get_object(
        Bucket=BUCKET, Key=f"{prefix}/saved/latest_checkpointed_iteration.txt"
    )
    assert tracker["Body"].read() == str(STEPS).encode()
    assert any(f"iter_{STEPS:07d}/" in name and name.endswith(".distcp") for name in names)
    assert not (outcome.folder / "saved").exists()
