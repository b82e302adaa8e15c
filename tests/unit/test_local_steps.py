"""Outer steps of a single member, which sends nothing, and so needs no servers."""

from __future__ import annotations

import pytest
import torch
from byteps.torch.diloco import LocalSteps

NUMEL, EVERY, AFTER, STEPS = 256, 3, 6, 14


def moves() -> torch.Tensor:
    """Return what each inner step adds to the parameters."""
    return torch.randn(STEPS, NUMEL, generator=torch.Generator().manual_seed(3))


def single(parameter: torch.Tensor, **options: object) -> LocalSteps:
    given = {"every": EVERY, "after": AFTER, "group": (0,), **options}
    return LocalSteps([parameter], **given)  # type: ignore[arg-type]


def test_outer_steps_of_one_member_are_those_of_torch() -> None:
    """The momentum is filled in the first steps, which change no parameter."""
    parameter = torch.zeros(NUMEL)
    steps = single(parameter)
    outer = torch.nn.Parameter(parameter.clone())
    nesterov = torch.optim.SGD([outer], lr=0.4, momentum=0.9, nesterov=True)
    own = parameter.clone()
    for number, move in enumerate(moves(), 1):
        parameter += move
        own += move
        steps.step()
        if number % EVERY == 0:
            outer.grad = outer.detach() - own
            nesterov.step()
            if number <= AFTER:
                outer.data.copy_(own)
            own.copy_(outer.detach())
        torch.testing.assert_close(parameter, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_evaluation_finds_the_outer_parameters(delay: int) -> None:
    parameter = torch.zeros(NUMEL)
    steps = single(parameter, delay=delay, fragments=2)
    for number, move in enumerate(moves(), 1):
        parameter += move
        steps.step()
        before = parameter.clone()
        with steps.outer_parameters():
            outer = torch.cat(steps.state()[::2])
            assert torch.equal(parameter, before if number <= AFTER else outer)
        assert torch.equal(parameter, before)


def test_an_exchange_after_no_step_changes_nothing() -> None:
    """So a checkpoint that is saved right after an exchange does not change the training."""
    parameter = torch.zeros(NUMEL)
    steps = single(parameter)
    for number, move in enumerate(moves(), 1):
        parameter += move
        steps.step()
        before = parameter.clone()
        if number % EVERY == 0:
            steps.exchange()
            assert torch.equal(parameter, before)
    steps.exchange()
    assert not torch.equal(parameter, before)


@pytest.mark.parametrize("saved_at", [AFTER - 1, AFTER + 2])
def test_a_state_goes_on_with_the_same_bits(saved_at: int) -> None:
    parameter = torch.zeros(NUMEL)
    steps = single(parameter)
    for number, move in enumerate(moves(), 1):
        parameter += move
        steps.step()
        if number == saved_at:
            steps.exchange()
            other = parameter.clone()
            again = single(other, done=number)
            again.load_state_dict(steps.state_dict())
        elif number > saved_at:
            other += move
            again.step()
            assert torch.equal(other, parameter)
