"""The emulated replicas of bench/learning compute what torch's optimizers compute."""

from __future__ import annotations

import pytest
import torch
from byteps.torch.wire import BLOCK

from bench.learning.replicas import LocalSteps, Replicas
from bench.learning.wires import AdamW

STEPS, EVERY, RATE = 12, 3, 0.05
NUMEL = 4 * BLOCK


def _trained(local: LocalSteps, gradients: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return the outer parameters after these gradients: (steps, replicas, values)."""
    adamw = AdamW()
    replicas = Replicas(torch.zeros(NUMEL, dtype=torch.bfloat16), NUMEL, local.replicas)
    replicas.start(local, adamw, first)
    for step, given in enumerate(gradients, 1):
        numbers = torch.tensor(adamw.numbers(step, RATE))
        replicas.step(given[:, : NUMEL // 2], given[:, NUMEL // 2 :], numbers)
    replicas.finish()
    return replicas.outer


def _by_torch(local: LocalSteps, gradients: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    adamw = AdamW()
    own = [torch.nn.Parameter(first.clone()) for _ in range(local.replicas)]
    inner = [
        torch.optim.AdamW(
            [p],
            lr=RATE,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
        )
        for p in own
    ]
    outer = torch.nn.Parameter(first.clone())
    nesterov = torch.optim.SGD(
        [outer], lr=local.lr, momentum=local.momentum, nesterov=local.momentum > 0
    )
    for step, given in enumerate(gradients, 1):
        for parameter, optimizer, gradient in zip(own, inner, given, strict=True):
            parameter.grad = gradient.float()
            torch.nn.utils.clip_grad_norm_([parameter], adamw.clip)
            optimizer.step()
        if step % local.every == 0:
            outer.grad = outer.detach() - torch.stack([p.detach() for p in own]).mean(0)
            nesterov.step()
            for parameter in own:
                parameter.data.copy_(outer.detach())
    return outer.detach()


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("form", "tolerance"), [("bf16", 3e-3), ("int8", 5e-3), ("int4", 6e-2)])
def test_outer_steps_are_those_of_nesterov(
    replicas: int, momentum: float, form: str, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(NUMEL, generator=generator).to(torch.bfloat16).float()
    gradients = torch.randn(STEPS, replicas, NUMEL, generator=generator).to(torch.bfloat16)
    local = LocalSteps(replicas=replicas, every=EVERY, lr=0.6, momentum=momentum, form=form)
    trained, expected = (of(local, gradients, first) for of in (_trained, _by_torch))
    moved = (expected - first).norm()
    assert (trained - expected).norm() < tolerance * moved


def test_summed_steps_are_those_of_one_job() -> None:
    """While gradients are summed, outer steps only fill the momentum."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(NUMEL, generator=generator).to(torch.bfloat16).float()
    gradients = torch.randn(STEPS, 2, NUMEL, generator=generator).to(torch.bfloat16)
    mean = gradients.float().mean(1, keepdim=True).to(torch.bfloat16)
    summed = LocalSteps(replicas=2, every=EVERY, after=STEPS)
    plain = LocalSteps(replicas=1, every=STEPS, lr=1.0, momentum=0.0)
    trained = _trained(summed, gradients, first)
    torch.testing.assert_close(trained, _by_torch(plain, mean, first), rtol=1e-4, atol=1e-4)
