"""bps.DistributedOptimizer and bps.ServerOptimizer compared with torch's DistributedDataParallel
over gloo, the former bit for bit.

With two ranks, gloo and BytePS both round each sum once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps.torch import operations
from torch import nn

from tests.border import interfaces
from tests.border.interface import PLAIN, Interface, Options
from tests.border.scenarios import LR, SCENARIOS, Run, inputs, loss_of, make_model, sgd, train
from tests.border.torch_interfaces import ServerOptimizer
from tests.multiproc.programs.average_cases import CASES
from tests.multiproc.programs.job import Job

SHARED = (
    *("plain", "grad-scaler", "closure", "unfrozen-later", "added-later", "scheduler-made-before"),
    *("two-backward-passes", "accumulation", "sparse-gradients", "non-contiguous", "zero-elements"),
)
"""Scenarios of tests/border that run here in one job."""


class Served(ServerOptimizer):
    """Names each optimizer, and gives it the same options."""

    def __init__(self, name: str, **options: Any) -> None:
        self.optimizer_name, self.options = name, options

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        return model, bps.ServerOptimizer(optimizer, name=self.optimizer_name, **self.options)


def start(job: Job) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{job.folder}/store", rank=job.rank, world_size=job.size
    )
    bps.init()


def run_through(job: Job, interface: Interface) -> Run:
    return Run(interface=interface, folder=job.folder, rank=job.rank, pause_s=0.0, rounds=0)


def values_of(
    job: Job, program: Callable[[Run], None], interface: Interface
) -> dict[str, torch.Tensor]:
    """Run a program, and return the values that it keeps."""
    run = run_through(job, interface)
    program(run)
    return run.values


def as_ddp(job: Job) -> None:
    """Check that every program gives the same bits as DDP, or as gradients that are averaged by
    hand."""
    start(job)
    programs = {name: SCENARIOS[name] for name in SHARED}
    programs |= {case.__name__: case for case in CASES}
    ours = interfaces.make("DistributedOptimizer")
    for name, program in programs.items():
        with job.check(name):
            theirs = interfaces.make(ours.references.get(name, ours.reference))
            wanted, learned = (values_of(job, program, each) for each in (theirs, ours))
            assert learned.keys() == wanted.keys()
            different = [key for key in learned if not torch.equal(learned[key], wanted[key])]
            assert not different, different
    dist.destroy_process_group()
    bps.shutdown()


def as_ddp_on_servers(job: Job) -> None:
    """Run the same programs with the optimizer on the servers, which refuses two of them."""
    start(job)
    refused = ("unfrozen-later", "added-later")
    for scenario in (name for name in SHARED if name not in refused):
        for clip in ("none", "speculate", "wait") if scenario == "grad-scaler" else ("none",):
            name = f"{scenario}, clip {clip}"
            with job.check(name):
                options = {} if clip == "none" else {"max_norm": 1e6, "clip": clip}
                ours, program = Served(name, **options), SCENARIOS[scenario]
                theirs = interfaces.make(ours.references.get(scenario, ours.reference))
                wanted, learned = (values_of(job, program, each) for each in (theirs, ours))
                for key in wanted:
                    torch.testing.assert_close(learned[key], wanted[key], rtol=2e-6, atol=2e-7)
    scaled_otherwise(job)
    model = make_model()
    served = bps.ServerOptimizer(sgd(model), name="kept")
    with job.check_raises(
        "two over one parameter", ValueError, "on 2 of this group's 2 ranks.*one"
    ):
        bps.ServerOptimizer(torch.optim.SGD(model[2:].parameters(), lr=LR), name="other")
    if job.rank == 0:
        served.close()
    with job.check_raises("on one rank", ValueError, "on 1 of this group's 2 ranks"):
        bps.ServerOptimizer(torch.optim.SGD(model[2:].parameters(), lr=LR), name="other")
    served.close()
    model[0].requires_grad_(False)
    run = run_through(job, Served("frozen"))
    wanted_error = "parameter 0 of group 0 needs a gradient now, but not when"
    _, optimizer = run.interface.wrap(model, sgd(model))
    train(run, model, optimizer, range(2))
    model[0].requires_grad_(True)
    with job.check_raises("unfrozen later", ValueError, wanted_error):
        train(run, model, optimizer, range(2, 3))
    with job.check_raises("added later", ValueError, "declared once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    dist.destroy_process_group()
    bps.shutdown()


def scaled_otherwise(job: Job) -> None:
    """A rank that replaces infinite gradients still reports infinities; fp16 gradients are refused,
    as in torch."""
    model = make_model()
    run = run_through(job, Served("finite again"))
    _, optimizer = run.interface.wrap(model, sgd(model))
    scales = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = loss_of(model, inputs(run, 0))
    scales.scale(loss * torch.inf if job.rank == 1 else loss).backward()
    scales.unscale_(optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    scales.step(optimizer)
    scales.update()
    with job.check("made finite on one rank"):
        assert scales.get_scale() == 512.0
        assert optimizer.skipped_steps == 1
        assert all(map(torch.equal, before, model.parameters()))
    half = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = bps.ServerOptimizer(torch.optim.SGD([half], lr=LR), name="half")
    scales.scale((half * 2).sum()).backward()
    with job.check_raises("fp16 gradients", ValueError, "unscale FP16"):
        scales.step(optimizer)


def identity(job: Job) -> None:
    """Matching of gradients across ranks, and errors if ranks differ."""
    start(job)
    run = run_through(job, interfaces.make("DistributedOptimizer"))
    with job.check("two without names, and another order of the pass on one rank"):
        both = [make_model(seed) for seed in (5, 6)]
        optimizers = [bps.DistributedOptimizer(sgd(model)) for model in both]
        for step in range(2):
            losses = [loss_of(model, inputs(run, step)) for model in both]
            if job.rank == 1:
                losses.reverse()
            (losses[0] + losses[1]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model, seed in zip(both, (5, 6), strict=True):
            reference = make_model(seed)
            wrapped, optimizer = interfaces.make("ddp-gloo").wrap(reference, sgd(reference))
            train(run, wrapped, optimizer, range(2))
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(parameter, other)
    with job.check("a model deleted, and another one made"):
        for width in (24, 40):
            model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 8))
            optimizer = bps.DistributedOptimizer(sgd(model), model.named_parameters())
            train(run, model, optimizer, range(1))
            del model, optimizer
            if job.rank == 0:
                gc.collect()
        left = [
            name for name in operations._known if name.startswith("optimizer") and "/1." in name
        ]
        assert not left, left
    said = r"ranks make different optimizers: number 0 is .*\(3, 4\).*\(2, 4\).* on rank 0"
    if job.rank == 0:
        said = "ranks make different optimizers: other ranks"
    with job.check_raises("other parameters on one rank", bps.BytePSError, said):
        bps.DistributedOptimizer(sgd(nn.Linear(4, 2 + job.rank)))
    with job.check_raises("put into a group by hand", ValueError, "add_param_group"):
        model = make_model()
        optimizer = bps.DistributedOptimizer(sgd(model))
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
        optimizer.step()
    with job.check_raises("wrapped twice", ValueError, "already"):
        bps.DistributedOptimizer(optimizer)
    with job.check_raises("a type that servers do not know", ValueError, "'group0.0' .*float8"):
        odd = nn.Parameter(torch.ones(4).to(torch.float8_e5m2))
        bps.DistributedOptimizer(torch.optim.SGD([odd]))
    with job.check_raises("the same, frozen at first", ValueError, "'group0.1' .*float8"):
        odd.requires_grad_(False)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2)), odd]))
        optimizer.step()
        odd.requires_grad_(True)
        optimizer.step()
    with job.check("a rank that has no batch"):
        model = make_model()
        optimizer = bps.DistributedOptimizer(sgd(model))
        if job.rank == 0:
            loss_of(model, inputs(run, 0)).backward()
        else:
            optimizer.synchronize()
        optimizer.step()
    _demand_equal(job, "no batch", model)
    with job.check("fewer passes than were said"):
        model = make_model()
        optimizer = bps.DistributedOptimizer(sgd(model), backward_passes_per_step=3)
        for step in range(2):
            loss_of(model, inputs(run, step)).backward()
        optimizer.step()
    _demand_equal(job, "fewer passes", model)
    dist.destroy_process_group()
    bps.shutdown()


def failed_pass(job: Job) -> None:
    """Fail a backward pass after its values were sent. The job must not go on after that."""
    bps.init()
    run = run_through(job, interfaces.make("DistributedOptimizer"))
    model = make_model()
    optimizer = bps.DistributedOptimizer(sgd(model))

    def fail(gradient: torch.Tensor) -> None:
        del gradient
        raise RuntimeError("out of memory, say")

    loss = loss_of(model, inputs(run, 0))
    if job.rank == 1:
        next(model.parameters()).register_hook(fail)
        with job.check_raises("a pass that raises", RuntimeError, "out of memory"):
            loss.backward()
        with job.check_raises("a step after it", bps.BytePSError, "Other ranks may have received"):
            optimizer.step()
        with job.check_raises("a pass after it", bps.BytePSError, "computed again while"):
            loss_of(model, inputs(run, 1)).backward()
        try:
            raise RuntimeError("the program ends")
        except RuntimeError:
            bps.shutdown()
    else:
        with job.check_raises("the other rank", bps.BytePSError, "the program ends"):
            loss.backward()
        bps.shutdown()


def _demand_equal(job: Job, name: str, model: nn.Module) -> None:
    with job.check(f"{name}: the same on all ranks"):
        flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        total = flat.clone()
        bps.push_pull_inplace(total, average=False, name=f"equal {name}")
        assert torch.equal(total, flat * job.size)
