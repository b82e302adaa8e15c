"""The phases of a step of an optimizer on the servers, over its buckets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from byteps.torch import BytePSError
from byteps.torch.server_rule import Rule, Step
from byteps.torch.speculation import Speculation
from byteps.torch.step_machine import StepMachine, clip_scale

GROUPS: list[dict[str, Any]] = [
    {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
]
RATES = [(0.1, 0.01)]
RULE = Rule(is_adamw=False, groups=[(0.0, 0.0, 0.0, False)])


class Bucket:
    """Notes its calls in a list that all share, and tries steps as ServerBucket does."""

    def __init__(self, name: str, calls: list[tuple[str, ...]], fails: str = "") -> None:
        self.name, self.calls, self.fails = name, calls, fails
        self.tried: Step | None = None

    def _note(self, call: str, *about: str) -> str:
        self.calls.append((self.name, call, *about))
        return call

    def push_step(self, step: Step) -> str:
        assert step.rates == RATES
        return self._note("push_step", str(step.number))

    def push(self, attempt: Step | None) -> str:
        self.tried = attempt
        return self._note("push", "tried" if attempt else "norm")

    def finish(self, step: Step) -> str | None:
        if self.tried is not None and (step.skip or step == self.tried):
            self._note("finish", "drop" if step.skip else "keep")
            return None
        return self._note("finish", "skip" if step.skip else f"{step.scale:g}")

    def wait(self, started: str, *, failed: bool) -> None:
        self._note("wait", started)
        if started == self.fails:
            raise BytePSError("server 0 was lost")

    def take_parameters(self) -> None:
        self._note("take")

    def give_up(self) -> None:
        self._note("give_up")


def machine_of(clip: str, fails: str = "") -> tuple[StepMachine, list[tuple[str, ...]]]:
    calls: list[tuple[str, ...]] = []
    buckets: list[Any] = [Bucket("a", calls), Bucket("b", calls, fails)]
    return StepMachine(buckets, RULE, Speculation(clip), name="it"), calls


def both(*call: str) -> list[tuple[str, ...]]:
    return [("a", *call), ("b", *call)]


@pytest.mark.parametrize(
    ("clip", "scale", "skip", "said", "waits"),
    [
        pytest.param("speculate", 1.0, False, "keep", False, id="kept"),
        pytest.param("speculate", 0.5, False, "0.5", True, id="made-again"),
        pytest.param("speculate", 0.5, True, "drop", False, id="dropped"),
        pytest.param("wait", 0.5, False, "0.5", True, id="made"),
        pytest.param("wait", 1.0, True, "skip", True, id="skipped"),
    ],
)
def test_a_step_of_two_phases(clip: str, scale: float, skip: bool, said: str, waits: bool) -> None:
    """Parameters are taken once all buckets have theirs: a rank has those of one step."""
    machine, calls = machine_of(clip)
    machine.push(GROUPS)
    assert calls == both("push", "tried" if clip == "speculate" else "norm") + both("wait", "push")
    calls.clear()
    machine.finish(scale=scale, skip=skip)
    waited = both("wait", "finish") if waits else []
    assert calls == both("finish", said) + waited + both("take")
    assert machine.steps == (not skip)


def test_a_bucket_that_is_clipped_by_itself() -> None:
    """The other one's parameters are those that were tried."""
    machine, calls = machine_of("speculate")
    machine.push(GROUPS)
    calls.clear()
    machine.finish(scale=1.0, skip=False, own={machine._buckets[1]: 0.5})
    assert calls == [("a", "finish", "keep"), ("b", "finish", "0.5"), ("b", "wait", "finish"),
                     *both("take")]  # fmt: skip


@pytest.mark.parametrize("clip", ["speculate", "wait"])
def test_gradients_of_a_scaled_loss(clip: str) -> None:
    """A step that is tried is of gradients that are scaled back, and so is one that is clipped."""
    machine, calls = machine_of(clip)
    machine.push(GROUPS, 0.25)
    calls.clear()
    machine.finish(scale=1.0, skip=False)
    said = "keep" if clip == "speculate" else "0.25"
    assert [call for call in calls if call[1] == "finish"] == both("finish", said)
    machine.push(GROUPS, 0.25)
    calls.clear()
    machine.finish(scale=0.5, skip=False)
    assert [call for call in calls if call[1] == "finish"] == both("finish", "0.125")


def test_a_step_of_one_phase() -> None:
    machine, calls = machine_of("wait")
    for number in (1, 2):
        calls.clear()
        machine.update(GROUPS)
        assert calls == both("push_step", str(number)) + both("wait", "push_step") + both("take")
    assert machine.steps == 2


def test_after_two_clipped_steps_nothing_is_tried_before_one_that_is_not() -> None:
    machine, calls = machine_of("speculate")
    tried = []
    for scale, own in ((0.5, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.0, 1.0)):
        calls.clear()
        machine.push(GROUPS)
        tried.append(calls[0][2])
        machine.finish(scale=scale, skip=False, own={machine._buckets[1]: own})
    assert tried == ["tried", "tried", "norm", "norm", "tried"]


@pytest.mark.parametrize("phase", ["push", "finish"])
def test_no_parameters_are_taken_of_a_step_that_failed(phase: str) -> None:
    """Both buckets are waited for, nothing goes on before a state is loaded."""
    machine, calls = machine_of("wait", fails=phase)
    with pytest.raises(BytePSError, match="server 0 was lost"), machine.failing():
        machine.push(GROUPS)
        machine.finish(scale=1.0, skip=False)
    assert both("wait", phase)[0] in calls and calls[-1] == ("b", "wait", phase)
    assert machine.steps == 0
    with pytest.raises(BytePSError, match=r"it: an earlier step failed \(server 0 was lost\)"):
        machine.demand_no_failure()
    calls.clear()
    machine.begin_load()
    machine.end_load(7)
    assert calls == both("give_up")
    machine.demand_no_failure()
    assert machine.next_step(GROUPS) == (8, 1.0, False, RATES)


def test_groups_change_in_rate_and_decay_alone() -> None:
    machine, _ = machine_of("wait")
    machine.demand_same_rule([GROUPS[0] | {"lr": 7.0, "weight_decay": 0.0}])
    with pytest.raises(ValueError, match="it: parameter groups changed in more than"):
        machine.demand_same_rule([GROUPS[0] | {"momentum": 0.9}])


def test_gradients_are_scaled_down_to_the_limit_alone() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert math.isclose(clip_scale(4.0, 1.0), 0.25, rel_tol=1e-6)
    assert clip_scale(math.nan, 1.0) == clip_scale(math.inf, 1.0) == 1.0
