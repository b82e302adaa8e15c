"""A job whose checkpoints are in an object store survives the loss of a rank."""

from __future__ import annotations

import json
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
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings
from tests.layouts.under_ray.pools import warm_pool
from tests.object_store.stores import STORES


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
        # After the second checkpoint has been begun: written in the background, it is there or not.
        faults=[{**lost.faults[0], "when": STRIKE + 3}],
        blames=lost.blames,
        arguments=[
            *("--enable-msc", "--save", "msc://jobs{folder}/saved"),
            *("--use-distributed-optimizer", *IN_BACKGROUND),
        ],
    )
    environment = {**settings.environment, "MSC_CONFIG": str(config)}
    with STORES[kind]() as bucket:
        config.write_text(json.dumps({"profiles": {"jobs": bucket.profile}}))
        runner = Runner(pool, replace(settings, environment=environment), run_dir / "jobs")
        outcome, whole = runner.run("lost", case), runner.uninterrupted(case)
        # It went on from the store, which holds all of it; this machine holds nothing.
        prefix = str(outcome.folder).lstrip("/")
        names = [name for name in bucket.names() if name.startswith(prefix)]
        tracker = bucket.read(f"{prefix}/saved/latest_checkpointed_iteration.txt")
    assert problems(case, outcome, whole) == []
    assert min(s["step"] for s in outcome.steps if s["incarnation"] == 1) in (5, 9)
    assert tracker == str(STEPS).encode()
    assert any(f"iter_{STEPS:07d}/" in name and name.endswith(".distcp") for name in names)
    assert not (outcome.folder / "saved").exists()
