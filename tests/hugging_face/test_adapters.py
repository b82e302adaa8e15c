"""Adapters: what is trained, what is sent, and recomputed layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.layouts.hugging_face.rows import LAYOUTS, STEPS, Layout
from tests.layouts.hugging_face.runs import make_model, train
from tests.layouts.rows import named

PLAIN, RECOMPUTED = named(LAYOUTS, ["dp2", "dp2-recompute"])


def _seen(
    layout: Layout, run_dir: Path, models: Path, data: list[str], name: str, **options: Any
) -> Any:
    model = make_model(layout.model, models)
    job = train(layout, model, run_dir / name, data, lora=True, through_byteps=True, **options)
    return job.result(0)


def test_frozen_parameters_never_reach_byteps(run_dir: Path, models: Path, data: list[str]) -> None:
    seen = _seen(PLAIN, run_dir, models, data, "job")
    parameters = seen.training.parameters
    adapters = [value for name, value in parameters.items() if ".adapter." in name]
    elements = sum(value.numel() for value in adapters)
    assert elements == seen.trained < sum(value.numel() for value in parameters.values()) / 2
    # Four layers with four adapters each, of two matrices.
    assert len(adapters) == 4 * 4 * 2
    # The engine counts what it sends: 4 bytes an element of adapters in a step, and no more.
    assert seen.training.pushed_bytes == 4 * elements * STEPS
    assert seen.training.pulled_bytes == 4 * elements * STEPS


def test_recomputed_layers_give_adapters_their_gradients(
    run_dir: Path, models: Path, data: list[str]
) -> None:
    plain = _seen(PLAIN, run_dir, models, data, "plain")
    recomputed = _seen(RECOMPUTED, run_dir, models, data, "recomputed")
    assert not recomputed.without_gradient
    assert [s.loss for s in recomputed.training.steps] == [s.loss for s in plain.training.steps]
    # The failure that this guards against: the input of a recomputed layer is frozen, so that
    # autograd never asks the layer for its gradients.
    unmended = _seen(RECOMPUTED, run_dir, models, data, "unmended", mended=False)
    assert len(unmended.without_gradient) == 4 * 4 * 2


def test_adapters_on_experts_of_several_ranks_are_refused(
    run_dir: Path, models: Path, data: list[str]
) -> None:
    layout = replace(named(LAYOUTS, ["ep2"])[0], extra=("--lora-targets", "linear_fc1"))
    model = make_model(layout.model, models)
    job = train(layout, model, run_dir / "job", data, lora=True, through_byteps=False, fails=True)
    assert "--lora on experts needs --expert-model-parallel-size 1" in job.logs()


def test_what_contradicts_the_model_is_refused(
    run_dir: Path, models: Path, data: list[str]
) -> None:
    model = make_model(PLAIN.model, models)
    for extra, message in (
        (("--hidden-size", "32"), "--hidden-size 32 contradicts --hf-model"),
        (("--lora-targets", "nothing"), "--lora-targets nothing: no such layer"),
    ):
        layout = replace(PLAIN, extra=extra)
        folder = run_dir / extra[1]
        job = train(layout, model, folder, data, lora=True, through_byteps=False, fails=True)
        assert message in job.logs()
