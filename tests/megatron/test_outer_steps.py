"""Contents and times of the outer steps of ``--dpu-outer``, without a job."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.dpu_reduce import job, outer_settings, outer_steps

ARGS = Namespace(
    dpu_outer="6,after=4,fragments=2,delay=1",
    deterministic_mode=False,
    curr_iteration=0,
    iteration=0,
    train_iters=100,
)


class Exchanged:
    """Replaces LocalSteps: records its arguments."""

    made: list[Exchanged]

    def __init__(self, parameters: list[torch.Tensor], **options: Any) -> None:
        self.parameters, self.options, self.steps = parameters, options, options["done"]
        Exchanged.made.append(self)

    def step(self) -> bool:
        self.steps += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Layer(torch.nn.Module):
    """A layer with a bias that is trained without gradients, and scratch memory."""

    expert_bias: torch.Tensor
    number: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("expert_bias", torch.ones(3))
        self.register_buffer("tokens", torch.zeros(3), persistent=False)
        self.register_buffer("number", torch.zeros(1, dtype=torch.int64))
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=False)


def optimizer_of(*parameters: torch.Tensor) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": list(parameters)}]))


NOTHING = SimpleNamespace(chained_optimizers=[SimpleNamespace(is_stub_optimizer=True)])
"""The optimizer of a rank that owns no parameters, like a frozen pipeline stage."""


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    Exchanged.made = []
    monkeypatch.setattr(outer_steps.bytepslib.diloco, "LocalSteps", Exchanged)
    monkeypatch.setattr(outer_steps, "_running", None)
    monkeypatch.setattr(job, "_each_step", True)
    monkeypatch.setattr(job, "_count", 2)
    monkeypatch.setattr(job.bytepslib.members, "are_alike", lambda *args: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


@pytest.mark.parametrize("optimizer", [NOTHING, optimizer_of(torch.empty(0))])
def test_a_rank_that_owns_nothing_steps_as_the_others(optimizer: Any, tmp_path: Path) -> None:
    """A rank that owns no parameters exchanges in the same steps as the others of its replica."""
    model = torch.nn.ModuleDict()
    model.ddp_config = SimpleNamespace(use_distributed_optimizer=False)  # type: ignore[assignment]
    rank = outer_steps.OuterSteps(ARGS, [model], optimizer, done=5)
    assert not Exchanged.made
    assert [rank.step() for _ in range(7)] == [True, False, False, True, False, False, True]
    rank.save(str(tmp_path / "outer.pt"))
    again = outer_steps.OuterSteps(ARGS, [model], optimizer, done=0)
    again.load(str(tmp_path / "outer.pt"))
    assert again.done == 12


def test_buffers_that_are_saved_become_the_mean() -> None:
    layer = Layer()
    outer_steps.OuterSteps(ARGS, [layer], optimizer_of(layer.weight), done=0)
    parameters, buffers = Exchanged.made
    assert parameters.parameters == [layer.weight]
    assert [tensor.data_ptr() for tensor in buffers.parameters] == [layer.expert_bias.data_ptr()]
    assert (buffers.options["lr"], buffers.options["momentum"]) == (1.0, 0.0)
    assert buffers.options["wire_dtype"] == torch.float32
    assert {exchange.options["every"] for exchange in Exchanged.made} == {6}


def test_buffers_that_are_saved_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def are_alike(tensors: list[torch.Tensor], *args: Any) -> bool:
        seen.extend(tensors)
        return True

    monkeypatch.setattr(job.bytepslib.members, "are_alike", are_alike)
    layer = Layer()
    assert job.replicas_are_alike([layer])
    wanted = [layer.weight, layer.expert_bias, layer.number]
    assert [tensor.data_ptr() for tensor in seen] == [tensor.data_ptr() for tensor in wanted]


def test_replicas_step_alone_after_the_summed_steps() -> None:
    layer = Layer()
    outer_steps.begin(ARGS, [layer], optimizer_of(layer.weight))
    for step in range(1, 13):
        assert job.sums_gradients() == (step <= 4)
        # An iteration of --iterations-to-skip is no step.
        outer_steps.iteration_ended(Namespace(**{**vars(ARGS), "curr_iteration": 5 + step}))
        assert outer_steps.done() == step
        assert outer_steps.steps_alone() == (step >= 4)
        assert outer_steps.meets(ARGS) == (step in (1, 2, 3, 6, 12))


def test_one_job_makes_outer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are summed in each step, and no buffer is averaged."""
    monkeypatch.setattr(job, "_count", 1)
    layer = Layer()
    outer_steps.begin(ARGS, [layer], optimizer_of(layer.weight))
    for _ in range(5):
        outer_steps.iteration_ended(ARGS)
    (parameters,) = Exchanged.made
    assert (parameters.options["group"], parameters.steps) == ((0,), 5)
    assert job.sums_gradients()


WRONG = {
    "": "STEPS must be a whole number of at least 0, not ''",
    "x": "STEPS must be a whole number of at least 0, not 'x'",
    "0": "STEPS must be 1 or more",
    "5,delay": "'delay' is not NAME=VALUE, where NAME is lr, momentum, after, delay, fragments, "
    "dtype",
    "5,steps=6": "'steps=6' is not NAME=VALUE, where NAME is lr,",
    "5,": "'' is not NAME=VALUE",
    "5,lr=1,lr=2": "lr is given twice",
    "5,delay=1.5": "delay must be a whole number of at least 0, not '1.5'",
    "5,lr=nan": "lr must be a number of at least 0, not 'nan'",
    "5,fragments=9": "fragments must be from 1 to STEPS, 5",
    "5,fragments=0": "fragments must be from 1 to STEPS, 5",
    "5,delay=5": "delay must be less than STEPS, 5",
    "5,lr=0": "lr must be more than 0, and momentum less than 1",
    "5,dtype=int2": "dtype must be one of int8, int4, bfloat16, float32, not 'int2'",
}


@pytest.mark.parametrize("text", WRONG)
def test_outer_steps_that_cannot_be_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--dpu-outer={text}: {WRONG[text]}")):
        outer_settings.parse(text)


def test_outer_steps_are_one_flag() -> None:
    assert outer_settings.parse(None).steps == 1
    assert outer_settings.parse("30") == outer_settings.Outer(steps=30)
    assert outer_settings.parse("8,momentum=0.5,lr=1,after=9,fragments=2,delay=3,dtype=int4") == (
        outer_settings.Outer(
            steps=8, momentum=0.5, lr=1.0, after=9, fragments=2, delay=3, dtype="int4"
        )
    )
