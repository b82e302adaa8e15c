"""Steps by workers and servers, compared with bench/learning, which emulates them in one
process."""

from __future__ import annotations

import byteps.torch as bps
import torch
from byteps.torch import ServerOptimizer, diloco

from bench.learning.replicas import LocalSteps, Replicas
from bench.learning.wires import RECIPES, AdamW, Hosts, Recipe, servers_mean
from tests.multiproc.programs.job import Job

FEW, KEPT = 128 * 150, 1024
"""Number of values that travel in few bits, in several partitions, and that stay bf16."""
STEPS = 4
ADAMW = AdamW(clip=0.0)


def gradients(rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    return (torch.randn(FEW + KEPT, generator=random) * 1e-3).bfloat16()


def rate_at(step: int) -> float:
    return 1e-3 * step


class Emulated:
    """All workers of the job, in this process."""

    def __init__(self, recipe: Recipe, size: int, values: torch.Tensor) -> None:
        self.hosts = Hosts(torch.zeros(FEW + KEPT, dtype=torch.bfloat16), FEW, size)
        self.hosts.start(recipe, ADAMW, values)

    def step(self, step: int) -> None:
        all_ = torch.stack([gradients(rank, step) for rank in range(self.hosts.hosts)])
        numbers = torch.tensor(ADAMW.numbers(step, rate_at(step)))
        self.hosts.step(all_[:, :FEW].contiguous(), all_[:, FEW:].contiguous(), numbers)


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=(ADAMW.beta1, ADAMW.beta2),
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
        foreach=False,
    )


def steps(job: Job) -> None:
    """Every wire type for users gives bit-identical parameters, step after step.

    FSDP2's shards are left out: this job has no torch.distributed.
    """
    bps.init()
    for name, recipe in RECIPES.items():
        if not recipe.is_product or recipe.gathers or name == "bf16":
            continue
        torch.manual_seed(5)
        values = torch.randn(FEW + KEPT) * 0.02
        emulated = Emulated(recipe, job.size, values)
        with job.check(name):
            (_on_servers if recipe.servers else _on_workers)(job, name, recipe, emulated)
    bps.shutdown()


def _on_workers(job: Job, name: str, recipe: Recipe, emulated: Emulated) -> None:
    master = torch.nn.Parameter(emulated.hosts.master.clone())
    optimizer = optimizer_of([master])
    for step in range(1, STEPS + 1):
        own = gradients(job.rank, step)
        few, exact = own[:FEW].float(), own[FEW:].clone()
        bps.push_pull_inplace(few, average=True, name=f"{name} few", wire_dtype=recipe.up)
        bps.push_pull_inplace(exact, average=True, name=f"{name} kept")
        emulated.step(step)
        master.grad = torch.cat([few, exact.float()])
        assert torch.equal(master.grad, emulated.hosts.total), f"the sums of step {step}"
        optimizer.param_groups[0]["lr"] = rate_at(step)
        optimizer.step()
        assert torch.equal(master.detach().bfloat16(), emulated.hosts.held), f"step {step}"


def _on_servers(job: Job, name: str, recipe: Recipe, emulated: Emulated) -> None:
    held = emulated.hosts.held.clone()
    parameters = [
        torch.nn.Parameter(held[:FEW].view(-1, 128).clone()),
        torch.nn.Parameter(held[FEW:].clone()),
    ]
    form = None if recipe.up == "bf16" else recipe.up
    served = ServerOptimizer(optimizer_of(parameters), name=name, wire_dtype=form, keep_bytes=4096)
    for step in range(1, STEPS + 1):
        own = gradients(job.rank, step)
        served.zero_grad()
        for parameter, gradient in zip(parameters, (own[:FEW], own[FEW:]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient.view(parameter.shape))
        served.param_groups[0]["lr"] = rate_at(step)
        served.step()
        emulated.step(step)
        real = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert torch.equal(real, emulated.hosts.held), f"the parameters of step {step}"
    served.close()


def local_steps(job: Job) -> None:
    """Local steps after summed ones give the outer parameters of emulated replicas, bit by bit."""
    bps.init()
    for form in ("bf16", "int8", "int4"):
        with job.check(form):
            local = LocalSteps(replicas=job.size, every=2, after=3, form=form)
            emulated = Replicas(torch.zeros(FEW + KEPT, dtype=torch.bfloat16), FEW, job.size)
            torch.manual_seed(5)
            emulated.start(local, ADAMW, torch.randn(FEW + KEPT) * 0.02)
            parameter = torch.nn.Parameter(emulated.outer.clone())
            optimizer = optimizer_of([parameter])
            steps = diloco.LocalSteps(
                [parameter],
                every=local.every,
                lr=local.lr,
                momentum=local.momentum,
                after=local.after,
                wire_dtype=torch.bfloat16 if form == "bf16" else form,
                name=f"local {form}",
            )
            for step in range(1, 10):
                rows = torch.stack([gradients(rank, step) for rank in range(job.size)])
                numbers = torch.tensor(ADAMW.numbers(step, rate_at(step)))
                emulated.step(rows[:, :FEW], rows[:, FEW:], numbers)
                parameter.grad = (servers_mean(rows) if step <= 3 else rows[job.rank]).float()
                optimizer.param_groups[0]["lr"] = rate_at(step)
                optimizer.step()
                steps.step()
                assert torch.equal(steps.state()[0], emulated.outer), f"step {step}"
            steps.exchange()
            emulated.finish()
            assert torch.equal(parameter.detach(), emulated.outer), "the last exchange"
    bps.shutdown()
