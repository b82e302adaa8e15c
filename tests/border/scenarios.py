"""Scenarios: plain PyTorch programs of two ranks, as users write them.

An interface (interfaces.py) runs a scenario, which returns named values: parameters and losses, as
bits. The values are the same on every interface. Inputs differ by rank and step.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.border.interface import Interface, Options

STEPS = 4
LR = 0.1
ROWS = 6
WIDTH = 64

Values = dict[str, torch.Tensor]


@dataclass
class Run:
    """A run of a scenario on a rank."""

    interface: Interface
    folder: Path
    rank: int
    pause_s: float
    """Seconds for which a rank is late or stopped, in some scenarios."""
    rounds: int
    """Number of times that a group is created again, in a scenario with groups."""
    values: Values = field(default_factory=dict)
    reduced_bytes: int = 0
    """Least bytes of this rank's gradients that had to be reduced over ranks."""

    def keep(self, name: str, model: nn.Module) -> None:
        """Add the parameters of a model to the values."""
        for key, parameter in model.named_parameters():
            value = parameter.detach()
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.values[f"{name}.{key.removeprefix('module.')}"] = whole.clone()

    def count(self, model: nn.Module, steps: int = STEPS) -> None:
        """Count a model's gradients as reduced in this many steps."""
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.reduced_bytes += steps * size


SCENARIOS: dict[str, Callable[[Run], None]] = {}
"""Scenarios by name: the rows of the matrix."""


def scenario(function: Callable[[Run], None]) -> Callable[[Run], None]:
    """Make a function a row of the matrix."""
    SCENARIOS[function.__name__.replace("_", "-")] = function
    return function


def make_model(seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def inputs(run: Run, step: int, *, part: int = 0, width: int = 16) -> torch.Tensor:
    numbers = torch.arange(ROWS * width, dtype=torch.float32).view(ROWS, width)
    return torch.sin(numbers * 0.37 + 11 * step + 5 * part + 3 * run.rank)


def loss_of(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return model(values).square().mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


def train(run: Run, model: nn.Module, optimizer: object, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()  # type: ignore[attr-defined]
        loss_of(model, inputs(run, step)).backward()
        optimizer.step()  # type: ignore[attr-defined]


@scenario
def plain(run: Run) -> None:
    """Forward, backward, step."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer)
    run.keep("model", wrapped)
    run.count(model)


@scenario
def grad_scaler(run: Run) -> None:
    """torch's loss scaling; in step 1 the loss of rank 1 overflows, and every rank skips
    the step."""
    run.interface.scales_loss = True
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    scaler = run.interface.scaler(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(run, step))
        if step == 1 and run.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    run.keep("model", wrapped)
    run.values["scale"] = torch.tensor(scaler.get_scale())
    run.count(model)


@scenario
def closure(run: Run) -> None:
    """`step(closure)`: the closure computes the gradients."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    losses = []
    for step in range(STEPS):

        def compute(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapped, inputs(run, step))
            loss.backward()
            return loss

        losses.append(float(optimizer.step(compute)))
    run.keep("model", wrapped)
    run.values["losses"] = torch.tensor(losses)
    run.count(model)


@scenario
def lbfgs(run: Run) -> None:
    """LBFGS: its step calls the closure several times.

    Ranks have the same input, because LBFGS's line search compares losses. With different losses it
    would fail under any data parallelism.
    """
    model = make_model()
    made = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    wrapped, optimizer = run.interface.wrap(model, made)
    same = torch.sin(torch.arange(ROWS * 16, dtype=torch.float32).view(ROWS, 16))
    for _ in range(2):

        def compute() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapped, same)
            loss.backward()
            return loss

        optimizer.step(compute)
    run.keep("model", wrapped)
    run.count(model, 2)


@scenario
def unfrozen_later(run: Run) -> None:
    """A layer is frozen when the model is wrapped, and trains from step 2 on."""
    model = make_model()
    model[0].requires_grad_(False)
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer, range(2))
    model[0].requires_grad_(True)
    train(run, wrapped, optimizer, range(2, STEPS))
    run.keep("model", wrapped)
    run.count(model[2])
    run.count(model[4])


@scenario
def added_later(run: Run) -> None:
    """A layer's parameters are added to the optimizer after the optimizer was wrapped."""
    model = make_model()
    early = [*model[2].parameters(), *model[4].parameters()]
    wrapped, optimizer = run.interface.wrap(model, torch.optim.SGD(early, lr=LR))
    train(run, wrapped, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(run, wrapped, optimizer, range(2, STEPS))
    run.keep("model", wrapped)
    run.count(model[2])
    run.count(model[4])


@scenario
def scheduler_made_before(run: Run) -> None:
    """The learning-rate scheduler is made before the optimizer is wrapped."""
    model = make_model()
    made = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    wrapped, optimizer = run.interface.wrap(model, made)
    for step in range(STEPS):
        train(run, wrapped, optimizer, range(step, step + 1))
        schedule.step()
    run.keep("model", wrapped)
    run.count(model)


@scenario
def two_backward_passes(run: Run) -> None:
    """Two losses in a step, each with its own forward and backward pass."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, inputs(run, step)).backward()
        (0.5 * loss_of(wrapped, inputs(run, step, part=1))).backward()
        optimizer.step()
    run.keep("model", wrapped)
    run.count(model)


@scenario
def accumulation(run: Run) -> None:
    """Three micro-batches per step."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model), Options(passes=3))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with run.interface.accumulating(wrapped):
                (loss_of(wrapped, inputs(run, step, part=part)) / 3).backward()
        (loss_of(wrapped, inputs(run, step, part=2)) / 3).backward()
        optimizer.step()
    run.keep("model", wrapped)
    run.count(model)


class Forked(nn.Module):
    """Has a layer that only some ranks use, and a layer that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(16, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, values: torch.Tensor, detour: bool) -> torch.Tensor:
        values = torch.tanh(self.first(values))
        return self.last(torch.tanh(self.sometimes(values)) if detour else values)


@scenario
def unused_parameters(run: Run) -> None:
    """A single rank uses a layer, and no rank uses another layer.

    FSDP2's ranks must use the same layers: there the first layer is used in every other step.
    """
    model = Forked()
    wrapped, optimizer = run.interface.wrap(model, sgd(model), Options(unused=True))
    for step in range(STEPS):
        optimizer.zero_grad()
        chosen = run.rank if run.interface.ranks_may_differ else 0
        wrapped(inputs(run, step), detour=chosen == step % 2).square().mean().backward()
        optimizer.step()
    run.keep("model", wrapped)
    run.count(model.first)
    run.count(model.last)


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(50, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words))


@scenario
def sparse_gradients(run: Run) -> None:
    """An embedding with sparse gradients."""
    model = _Embedded()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        words = (torch.arange(12) * 7 + 3 * step + 11 * run.rank) % 50
        wrapped(words).square().mean().backward()
        optimizer.step()
    run.keep("model", wrapped)
    run.count(model.last)


@scenario
def non_contiguous(run: Run) -> None:
    """Convolutions in channels-last memory, and a parameter that is a transposed view."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.append(nn.Linear(4 * 4 * 4, 8))
    # The learning rate is small. Otherwise the loss would grow at each step, and rounding would
    # decide the digits that are compared.
    model[4].weight = nn.Parameter(torch.randn(64, 8).mul(0.1).t())
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        image = inputs(run, step, width=4 * 64).view(ROWS, 4, 8, 8)
        loss_of(wrapped, image.contiguous(memory_format=torch.channels_last)).backward()
        optimizer.step()
    run.keep("model", wrapped)
    run.count(model)


class _WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.body(values) + self.empty.sum()


@scenario
def zero_elements(run: Run) -> None:
    """A parameter without elements."""
    model = _WithEmpty()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer)
    run.keep("model", wrapped)
    run.count(model)


@scenario
def late_rank(run: Run) -> None:
    """Rank 1 is late, as if it wrote a checkpoint."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer, range(2))
    if run.rank == 1:
        time.sleep(run.pause_s)
    train(run, wrapped, optimizer, range(2, STEPS))
    run.keep("model", wrapped)
    run.count(model)


@scenario
def stopped_host(run: Run) -> None:
    """All processes of rank 1's host are stopped for a while, in the middle of steps."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    if run.rank == 1 and run.pause_s > 0:
        _stop_soon(run.pause_s)
    # A gradient must be in flight at that time.
    count = 0
    stopped = run.folder / "continued"
    while run.pause_s > 0 and not bool(
        run.interface.reduce(torch.tensor([float(stopped.exists())]), None).item()
    ):
        train(run, wrapped, optimizer, range(1))
        count += 1
    if run.pause_s > 0:
        # The number of steps so far depends on timing, so the model is made again.
        run.interface.discard(wrapped, optimizer)
        del wrapped, optimizer
        model = make_model()
        wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer)
    run.keep("model", wrapped)
    run.count(model, STEPS + count)


_STOPPER = """
import os, signal, sys, time
group, pause_s, done = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
time.sleep(0.3)
os.killpg(group, signal.SIGSTOP)
time.sleep(pause_s)
os.killpg(group, signal.SIGCONT)
open(done, "w").close()
"""


def _stop_soon(pause_s: float) -> None:
    done = str(Path.cwd() / "continued")
    command = [sys.executable, "-c", _STOPPER, str(os.getpgid(0)), str(pause_s), done]
    subprocess.Popen(command, start_new_session=True)


@scenario
def group_made_again(run: Run) -> None:
    """A group is repeatedly created, used and destroyed; ranks destroy it at different times."""
    gc.disable()
    for number in range(run.rounds):
        group = dist.new_group([0, 1])
        model = make_model(seed=number)
        wrapped, optimizer = run.interface.wrap(model, sgd(model), Options(group=group))
        train(run, wrapped, optimizer, range(1))
        run.keep(f"round{number}", wrapped)
        run.count(model, 1)
        run.interface.discard(wrapped, optimizer)
        if run.rank == number % 2:
            time.sleep(0.01)
            del wrapped, optimizer
            gc.collect()
        dist.destroy_process_group(group)
    gc.enable()


@scenario
def groups_in_opposite_order(run: Run) -> None:
    """Two threads each use a group of the same ranks; the order of first use differs by rank."""
    pairs = []
    for number in range(2):
        model = make_model(seed=number)
        group = dist.new_group([0, 1])
        pairs.append(run.interface.wrap(model, sgd(model), Options(group=group)))
        run.count(model)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            if number == run.rank:
                time.sleep(0.3)
            train(run, *pairs[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for number, (wrapped, _) in enumerate(pairs):
        run.keep(f"thread{number}", wrapped)


@scenario
def summed_once(run: Run) -> None:
    """Each model makes one step: every tensor is reduced exactly once."""
    for number in range(10):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(16, 20 + number), nn.Linear(20 + number, 8))
        wrapped, optimizer = run.interface.wrap(model, sgd(model))
        train(run, wrapped, optimizer, range(1))
        run.keep(f"model{number}", wrapped)
        run.count(model, 1)
        run.interface.discard(wrapped, optimizer)


@scenario
def second_model(run: Run) -> None:
    """A model is deleted, and another has equal parameter names but different shapes.

    The ranks collect garbage at different times.
    """
    for trial, width in enumerate((24, 40)):
        torch.manual_seed(trial)
        model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 8))
        wrapped, optimizer = run.interface.wrap(model, sgd(model))
        train(run, wrapped, optimizer)
        run.keep(f"trial{trial}", wrapped)
        run.count(model)
        run.interface.discard(wrapped, optimizer)
        del wrapped, optimizer
        if run.rank == 0:
            gc.collect()


@scenario
def exit_after_the_last_sum(run: Run) -> None:
    """Rank 1 ends with `os._exit` right after its last step, without cleanup."""
    plain(run)
    run.values["exits"] = torch.tensor(float(run.rank == 1))
