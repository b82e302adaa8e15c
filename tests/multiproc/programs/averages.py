"""bps.DistributedOptimizer and bps.ServerOptimizer beside torch's DistributedDataParallel over
gloo, the first one to the bit.

Two ranks, whose sums of two values are rounded once by either. Each case is trained twice, from the
same parameters on the same inputs, which differ by rank and step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.multiproc.programs.job import Job

STEPS = 4
RATE = 0.1


class Ours:
    """Gradients averaged by our optimizer."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rank

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del unused
        return model, bps.DistributedOptimizer(optimizer, backward_passes_per_step=passes)

    def apart(self, model: Any) -> AbstractContextManager[Any]:
        """A backward pass whose gradients add up on the rank."""
        del model
        return nullcontext()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What an optimizer that compares losses is to be given."""
        return loss


class Theirs(Ours):
    """Gradients averaged by DDP."""

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del passes
        return DistributedDataParallel(model, find_unused_parameters=unused), optimizer

    def apart(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class Served(Ours):
    """Gradients averaged, and parameters updated, by servers."""

    def __init__(self, job: Job, name: str, **options: Any) -> None:
        super().__init__(job)
        self.name, self.options = name, options

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del unused, passes
        return model, bps.ServerOptimizer(optimizer, name=self.name, **self.options)


def layers(seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)
    )


def inputs(
    side: Ours, step: int, *, part: int = 0, shape: tuple[int, ...] = (6, 16)
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float32).view(shape)
    return torch.sin(numbers * 0.37 + 11 * step + 5 * part + 3 * side.rank)


def loss_of(model: Any, values: torch.Tensor) -> torch.Tensor:
    return model(values).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay tell a gradient of zeros from none."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5, weight_decay=0.01)


def train(side: Ours, model: Any, optimizer: Any, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, inputs(side, step)).backward()
        optimizer.step()


def plain(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


def gradients_after_the_pass(side: Ours) -> nn.Module:
    """They are averages, which may be clipped."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, inputs(side, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


def scaler(side: Ours) -> nn.Module:
    """In step 1 the loss of rank 1 overflows: all ranks leave it out."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(side, step))
        scales.scale(loss * torch.inf if step == 1 and side.rank == 1 else loss).backward()
        if step == 2:
            scales.unscale_(optimizer)
        scales.step(optimizer)
        scales.update()
    assert scales.get_scale() == 512.0, scales.get_scale()
    return model


def closure(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):

        def compute(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapped, inputs(side, step))
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(compute)
        else:
            optimizer.step(closure=compute)
    return model


def lbfgs(side: Ours) -> nn.Module:
    """It compares losses, which differ by rank."""
    model = layers()
    made = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    wrapped, optimizer = side.wrap(model, made)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(side, 0))
        loss.backward()
        return side.mean_loss(loss)

    for _ in range(2):
        optimizer.step(compute)
    return model


def unfrozen(side: Ours) -> nn.Module:
    """In step 2 what was frozen learns, and nothing else does."""
    model = layers()
    model[0].requires_grad_(False)
    made = sgd(model)
    wrapped, optimizer = side.wrap(model, made)
    train(side, wrapped, optimizer, range(2))
    for index, layer in enumerate(model):
        layer.requires_grad_(index == 0)
        layer.zero_grad()
    if isinstance(side, Theirs):  # which looks at this when it is made
        wrapped, _ = side.wrap(model, made)
    train(side, wrapped, optimizer, range(2, STEPS))
    return model


def added(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, torch.optim.SGD(model[2:].parameters(), lr=RATE))
    train(side, wrapped, optimizer, range(2))
    model.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": RATE / 2})
    train(side, wrapped, optimizer, range(2, STEPS))
    return model


def scheduled_before(side: Ours) -> nn.Module:
    model = layers()
    made = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    wrapped, optimizer = side.wrap(model, made)
    for step in range(STEPS):
        train(side, wrapped, optimizer, range(step, step + 1))
        schedule.step()
    return model


def two_passes(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, inputs(side, step)).backward()
        (0.5 * loss_of(wrapped, inputs(side, step, part=1))).backward()
        optimizer.step()
    return model


def accumulated(side: Ours) -> nn.Module:
    """Three passes a step."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model), passes=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with side.apart(wrapped) if part < 2 else nullcontext():
                loss_of(wrapped, inputs(side, step, part=part)).backward()
        optimizer.step()
    return model


class Forked(nn.Module):
    """One layer that a caller may leave out, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)
        self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, values: torch.Tensor, detour: bool) -> torch.Tensor:
        values = torch.tanh(self.first(values))
        return self.last(torch.tanh(self.sometimes(values)) if detour else values)


def unused(side: Ours) -> nn.Module:
    """By one of the ranks, by both, by nobody, also in the second of two passes."""
    model = Forked()
    wrapped, optimizer = side.wrap(model, sgd(model), unused=True)
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            detour = bool((step + part) >> side.rank & 1)
            wrapped(inputs(side, step, part=part), detour).square().mean().backward()
        optimizer.step()
    assert model.never.weight.grad is None
    return model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.last = nn.Embedding(50, 24, sparse=True), nn.Linear(24, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words))


def sparse(side: Ours) -> nn.Module:
    """For an optimizer that takes nothing else; some words are repeated, some are on both ranks."""
    model = Words()
    made = torch.optim.SparseAdam(model.words.parameters(), lr=RATE)
    wrapped, optimizer = side.wrap(model, made)
    for step in range(STEPS):
        model.zero_grad()
        words = (torch.arange(12) * 7 + 3 * step + 14 * side.rank) % 20
        wrapped(words).square().mean().backward()
        gradient = model.words.weight.grad
        assert gradient is not None and gradient.is_sparse
        optimizer.step()
    model.last.requires_grad_(False)
    return model


def words(side: Ours) -> nn.Module:
    """Sparse gradients, and dense ones, of one optimizer."""
    model = Words()
    wrapped, optimizer = side.wrap(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped((torch.arange(12) * 7 + 3 * step) % 20).square().mean().backward()
        optimizer.step()
    return model


def strided(side: Ours) -> nn.Module:
    """Channels last, a transposed parameter, and a gradient that lies otherwise on one rank."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.append(nn.Linear(64, 8))
    transposed = nn.Parameter(torch.randn(64, 8).t())
    model[4].weight = transposed
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        if side.rank == 1:
            transposed.grad = torch.zeros(8, 64)
        image = inputs(side, step, shape=(6, 4, 8, 8)).contiguous(memory_format=torch.channels_last)
        loss_of(wrapped, image).backward()
        optimizer.step()
    return model


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.empty = layers(), nn.Parameter(torch.zeros(3, 0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.body(values) + self.empty.sum()


def empty(side: Ours) -> nn.Module:
    model = WithEmpty()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.turns = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(values * self.turns)


def complex_numbers(side: Ours) -> nn.Module:
    model = Turning()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(seed) for seed in (5, 6))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().requires_grad_(True)
        for part in self.parts:
            values = checkpoint(
                lambda v, part=part: part(v).repeat(1, 2), values, use_reentrant=True
            )
        return values


def recomputed(side: Ours) -> nn.Module:
    """Backward passes inside a backward pass, and no parameter outside of these."""
    model = Recomputed()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


def wrapped_again(side: Ours) -> nn.Module:
    """Another optimizer over the same model, while the first one is there."""
    model = layers()
    first, optimizer = side.wrap(model, sgd(model))
    train(side, first, optimizer, range(2))
    second, other = side.wrap(model, torch.optim.Adam(model[2:].parameters(), lr=0.01))
    del first
    train(side, second, other, range(2, STEPS))
    return model


CASES: tuple[Callable[[Ours], nn.Module], ...] = (
    *(plain, gradients_after_the_pass, scaler, closure, lbfgs, unfrozen, added, scheduled_before),
    *(two_passes, accumulated, unused, sparse, words, strided, empty, complex_numbers, recomputed),
)


def start(job: Job) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{job.folder}/store", rank=job.rank, world_size=job.size
    )
    bps.init()


def as_ddp(job: Job) -> None:
    """Every case has the bits of DDP."""
    start(job)
    for case in (*CASES, wrapped_again):
        with job.check(case.__name__):
            theirs, ours = case(Theirs(job)), case(Ours(job))
            pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
            different = [name for (name, mine), other in pairs if not torch.equal(mine, other)]
            assert not different, different
    dist.destroy_process_group()
    bps.shutdown()


SERVED = (plain, scaler, closure, scheduled_before, two_passes, accumulated, strided, empty, words)


def as_ddp_on_servers(job: Job) -> None:
    """What the optimizer on the servers makes of the same programs."""
    start(job)
    for case in SERVED:
        for clip in ("none", "speculate", "wait") if case is scaler else ("none",):
            name = f"{case.__name__}, clip {clip}"
            with job.check(name):
                options = {} if clip == "none" else {"max_norm": 1e6, "clip": clip}
                theirs, ours = case(Theirs(job)), case(Served(job, name, **options))
                for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7)
    scaled_otherwise(job)
    model = layers()
    kept = bps.ServerOptimizer(sgd(model), name="kept")
    with job.check_raises(
        "two over one parameter", ValueError, "on 2 of this group's 2 ranks.*one"
    ):
        bps.ServerOptimizer(torch.optim.SGD(model[2:].parameters(), lr=RATE), name="other")
    if job.rank == 0:
        kept.close()
    with job.check_raises("on one rank", ValueError, "on 1 of this group's 2 ranks"):
        bps.ServerOptimizer(torch.optim.SGD(model[2:].parameters(), lr=RATE), name="other")
    kept.close()
    model[0].requires_grad_(False)
    side, wanted = Served(job, "frozen"), "parameter 0 of group 0 needs a gradient, and needed none"
    _, optimizer = side.wrap(model, sgd(model))
    train(side, model, optimizer, range(2))
    model[0].requires_grad_(True)
    with job.check_raises("unfrozen later", ValueError, wanted):
        train(side, model, optimizer, range(2, 3))
    with job.check_raises("added later", ValueError, "declared once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    dist.destroy_process_group()
    bps.shutdown()


def scaled_otherwise(job: Job) -> None:
    """A rank that has made its gradients finite again says that they were not; fp16 gradients are
    refused, as torch refuses them."""
    model = layers()
    side = Served(job, "mended")
    _, optimizer = side.wrap(model, sgd(model))
    scales = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = loss_of(model, inputs(side, 0))
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
    optimizer = bps.ServerOptimizer(torch.optim.SGD([half], lr=RATE), name="half")
    scales.scale((half * 2).sum()).backward()
    with job.check_raises("fp16 gradients", ValueError, "unscale FP16"):
        scales.step(optimizer)


def identity(job: Job) -> None:
    """Whose gradients meet, and what is said where ranks differ."""
    start(job)
    side = Ours(job)
    with job.check("two without names, and another order of the pass on one rank"):
        both = [layers(seed) for seed in (5, 6)]
        optimizers = [bps.DistributedOptimizer(sgd(model)) for model in both]
        for step in range(2):
            losses = [loss_of(model, inputs(side, step)) for model in both]
            if job.rank == 1:
                losses.reverse()
            (losses[0] + losses[1]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model, seed in zip(both, (5, 6), strict=True):
            reference = layers(seed)
            wrapped, optimizer = Theirs(job).wrap(reference, sgd(reference))
            train(side, wrapped, optimizer, range(2))
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine, other)
    with job.check("a model deleted, and another one made"):
        for width in (24, 40):
            model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 8))
            optimizer = bps.DistributedOptimizer(sgd(model), model.named_parameters())
            train(side, model, optimizer, range(1))
            del model, optimizer
            if job.rank == 0:
                gc.collect()
    said = r"ranks make different optimizers: number 0 is .*\(3, 4\).*\(2, 4\).* on rank 0"
    if job.rank == 0:
        said = "ranks make different optimizers: other ranks"
    with job.check_raises("other parameters on one rank", bps.BytePSError, said):
        bps.DistributedOptimizer(sgd(nn.Linear(4, 2 + job.rank)))
    with job.check_raises("put into a group by hand", ValueError, "add_param_group"):
        model = layers()
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
        model = layers()
        optimizer = bps.DistributedOptimizer(sgd(model))
        if job.rank == 0:
            loss_of(model, inputs(side, 0)).backward()
        else:
            optimizer.synchronize()
        optimizer.step()
    _demand_equal(job, "no batch", model)
    with job.check("fewer passes than were said"):
        model = layers()
        optimizer = bps.DistributedOptimizer(sgd(model), backward_passes_per_step=3)
        for step in range(2):
            loss_of(model, inputs(side, step)).backward()
        optimizer.step()
    _demand_equal(job, "fewer passes", model)
    dist.destroy_process_group()
    bps.shutdown()


def failed_pass(job: Job) -> None:
    """What other ranks have received cannot be taken back."""
    bps.init()
    side, model = Ours(job), layers()
    optimizer = bps.DistributedOptimizer(sgd(model))

    def fail(gradient: torch.Tensor) -> None:
        del gradient
        raise RuntimeError("out of memory, say")

    loss = loss_of(model, inputs(side, 0))
    if job.rank == 1:
        next(model.parameters()).register_hook(fail)
        with job.check_raises("a pass that raises", RuntimeError, "out of memory"):
            loss.backward()
        with job.check_raises("a step after it", bps.BytePSError, "cannot be taken back"):
            optimizer.step()
        with job.check_raises("a pass after it", bps.BytePSError, "computed again while"):
            loss_of(model, inputs(side, 1)).backward()
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
