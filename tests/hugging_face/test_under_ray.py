"""Hugging Face models under Ray: the same script, and a job with adapters that loses a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ray_failures.cases import CASES, Case, Runner, pool_settings, problems
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings, preload_for
from tests.layouts.hugging_face.rows import Layout
from tests.layouts.hugging_face.runs import ADAPTER, make_model, same
from tests.layouts.under_ray.modes import arguments_of, compare, run_locally, run_under_ray
from tests.layouts.under_ray.pools import warm_pool
from tests.layouts.under_ray.rows import CELLS, LORA

_THROUGH_SERVERS = ("--use-dpu-reduce", "--dpu-reduce-route", "flat")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of the pool: two ranks and a spare."""
    preload = preload_for(["--hf-model", "any"])
    return pool_settings(tmp_path_factory.mktemp("pool"), spares=1, preload=preload)


@pytest.fixture(scope="module")
def pool(settings: Settings) -> Iterator[Pool]:
    """Actors that both tests share."""
    with warm_pool(settings) as pool:
        yield pool


def test_adapters_in_both_modes(
    pool: Pool, settings: Settings, run_dir: Path, models: Path, data: list[str]
) -> None:
    cell = next(cell for cell in CELLS if (cell.name, cell.trained) == ("cp2", LORA))
    arguments = arguments_of(cell, data, models)
    local = run_locally(cell, run_dir / "local", arguments)
    ray = run_under_ray(cell, run_dir / "ray", arguments, pool, settings)
    outcome = compare(local, ray)
    assert outcome.differences == [] and outcome.problems == []
    assert (outcome.groups, outcome.sums) == (1, 1)


def test_a_job_with_adapters_survives_a_lost_rank(
    pool: Pool, settings: Settings, run_dir: Path, models: Path
) -> None:
    model = make_model("llama", models)
    layout = Layout(name="dp2", model="llama", ranks=2)
    case = Case(
        title="",
        faults=CASES["actor"].faults,
        blames=CASES["actor"].blames,
        model=["--hf-model", str(model), *layout.arguments(lora=True), "--mock-data"],
        arguments=[*_THROUGH_SERVERS, "--lora-dropout", "0.1", "--hf-save", "{folder}/model"],
    )
    runner = Runner(pool, settings, run_dir / "jobs")
    outcome, whole = runner.run("lost", case), runner.uninterrupted(case)
    assert problems(case, outcome, whole) == []
    # What was written is what would have been without the loss, and not what was read.
    written, wanted = outcome.folder / "model", whole.folder / "model"
    assert same(written, wanted) and same(written / ADAPTER, wanted / ADAPTER)
    assert not same(written, model)
