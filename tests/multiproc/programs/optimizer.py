"""Upstream's optimizer interface, over our engine."""

from __future__ import annotations

import byteps.torch as bps
import torch

from programs.job import Job

STEPS = 5
RATE = 0.125  # powers of two: every value below is exact in fp32


def model(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    made = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.round(parameter * 16) / 16)
    return made


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([[rank + 1.0, step - 1.0, 2.0 * rank - step]])


def distributed(job: Job) -> None:
    """Each rank has its own data; the parameters follow the mean of all ranks' gradients."""
    bps.init()
    trained = model(job.rank)
    with job.check("broadcast_parameters"):
        bps.broadcast_parameters(trained.state_dict(), root_rank=1)
        for mine, root in zip(trained.parameters(), model(1).parameters(), strict=True):
            assert torch.equal(mine, root)
    expected = [p.detach().clone() for p in trained.parameters()]
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=RATE),
        named_parameters=trained.named_parameters(),
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        trained(batch(job.rank, step)).sum().backward()
        optimizer.step()
        # The gradient of a sum: each row of the weight gets the input, the bias gets one.
        mean = sum(batch(rank, step) for rank in range(job.size)) / job.size
        expected[0] -= RATE * mean.expand(2, 3)
        expected[1] -= RATE
        with job.check(f"step {step}"):
            for mine, wanted in zip(trained.parameters(), expected, strict=True):
                assert torch.equal(mine, wanted), (mine, wanted)
    bps.shutdown()


def clipped(job: Job) -> None:
    """synchronize() before step(): what is in .grad then is the mean."""
    bps.init()
    trained = model(0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=RATE),
        named_parameters=trained.named_parameters(),
    )
    trained(batch(job.rank, 1)).sum().backward()
    optimizer.synchronize()
    mean = sum(batch(rank, 1) for rank in range(job.size)) / job.size
    with job.check("gradients after synchronize()"):
        assert torch.equal(trained.weight.grad, mean.expand(2, 3)), trained.weight.grad
        assert torch.equal(trained.bias.grad, torch.ones(2)), trained.bias.grad
    with optimizer.skip_synchronize():
        optimizer.step()
    bps.shutdown()


def state(job: Job) -> None:
    """broadcast_optimizer_state: every rank goes on with the root's moments and learning rate."""
    bps.init()
    trained = model(0)
    rate = 0.5 if job.rank == 0 else 0.25
    optimizer = torch.optim.Adam(trained.parameters(), lr=rate)
    (trained(batch(job.rank, 0)) ** 2).sum().backward()
    optimizer.step()
    own = [s["exp_avg"].clone() for s in optimizer.state.values()]
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    with job.check("the root's learning rate"):
        assert optimizer.param_groups[0]["lr"] == 0.5
    reference = model(0)
    root = torch.optim.Adam(reference.parameters(), lr=0.5)
    (reference(batch(0, 0)) ** 2).sum().backward()
    root.step()
    with job.check("the root's moments"):
        for mine, wanted in zip(optimizer.state.values(), root.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(mine[key], wanted[key]), key
    with job.check("they had differed"):
        same = all(
            torch.equal(a, s["exp_avg"]) for a, s in zip(own, root.state.values(), strict=True)
        )
        assert same == (job.rank == 0)
    bps.shutdown()
