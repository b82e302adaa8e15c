"""Local steps and their exchanges against the same arithmetic in one process."""

from __future__ import annotations

import byteps.torch as bps
import torch
from byteps.torch.diloco import LocalSteps

from tests.multiproc.programs.job import Job

LENGTHS = (7, 3000, 1, 450)


class Replica:
    """Parameters, and an inner SGD whose gradients only its number decides."""

    def __init__(self, number: int) -> None:
        start = torch.Generator().manual_seed(5)
        self.parameters = [torch.randn(length, generator=start) for length in LENGTHS]
        self._generator = torch.Generator().manual_seed(100 + number)
        self._inner = torch.optim.SGD(self.parameters, lr=0.05)

    def step(self) -> None:
        for parameter in self.parameters:
            noise = torch.randn(len(parameter), generator=self._generator)
            parameter.grad = parameter * 0.5 + noise
        self._inner.step()

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat(self.parameters)

    def put(self, values: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, values.split(LENGTHS), strict=True):
            parameter.copy_(part)


class Reference:
    """All replicas in one process, with torch's SGD as the outer optimizer."""

    def __init__(self, size: int, lr: float, momentum: float) -> None:
        self.replicas = [Replica(number) for number in range(size)]
        self.outer = self.replicas[0].flat.clone()
        self._sgd = torch.optim.SGD([self.outer], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self) -> None:
        for replica in self.replicas:
            replica.step()

    def exchange(self) -> None:
        mean = torch.stack([replica.flat.double() for replica in self.replicas]).mean(0)
        self.outer.grad = (self.outer.double() - mean).float()
        self._sgd.step()
        for replica in self.replicas:
            replica.put(self.outer)


def equals_torch(job: Job) -> None:
    """Also with one exchange in each step, and, with lr 1 and no momentum, plain averaging."""
    bps.init()
    for every, lr, momentum in ((1, 0.7, 0.9), (5, 0.7, 0.9), (4, 1.0, 0.0)):
        name = f"every {every} lr {lr}"
        with job.check(name):
            want, mine = Reference(job.size, lr, momentum), Replica(job.rank)
            steps = LocalSteps(
                mine.parameters,
                every=every,
                lr=lr,
                momentum=momentum,
                wire_dtype=torch.float32,
                name=name,
            )
            for number in range(1, 14):
                want.step()
                mine.step()
                assert steps.step() == (number % every == 0)
                if number % every == 0:
                    want.exchange()
                    torch.testing.assert_close(mine.flat, want.outer, rtol=0, atol=2e-6)
            torch.testing.assert_close(mine.flat, want.replicas[job.rank].flat, rtol=0, atol=2e-6)
    bps.shutdown()


def fragments(job: Job) -> None:
    """Each has its own step, and what is learned while an average travels is kept."""
    bps.init()
    with job.check("fragments and delay"):
        mine = Replica(job.rank)
        steps = LocalSteps(
            mine.parameters, every=6, lr=1.0, momentum=0.0, delay=2, fragments=2, name="f"
        )
        changed = []
        for number in range(1, 14):
            before = mine.flat
            mine.step()
            learned = mine.flat
            if steps.step():
                changed.append(number)
                # lr is 1: each moved to the mean of what was pushed, and kept what came after.
                assert not torch.equal(mine.flat, learned)
            assert not torch.equal(before, learned)
        assert changed == [5, 8, 11], changed
    with job.check("all alike after an exchange of everything"):
        steps.exchange()
        assert _alike(job, mine.flat, "exchange")
        state = steps.state_dict()
        assert state["steps"] == 13
    with job.check("a state goes on where it was"):
        other = Replica(job.rank)
        again = LocalSteps(
            other.parameters, every=6, lr=1.0, momentum=0.0, delay=2, fragments=2, name="again"
        )
        again.load_state_dict(state)
        assert torch.equal(other.flat, mine.flat)
        for number in range(7):
            gradient = torch.full_like(mine.flat, 0.01 * (job.rank + 1) * (number + 1))
            for one, local in ((mine, steps), (other, again)):
                one.put(one.flat - gradient)
                local.step()
            assert torch.equal(other.flat, mine.flat)
    bps.shutdown()


def momentum_keeps_members_alike(job: Job) -> None:
    """In bf16 differences are rounded, but all members add the same ones."""
    bps.init()
    with job.check("bf16"):
        mine = Replica(job.rank)
        steps = LocalSteps(mine.parameters, every=3, name="bf16")
        for _ in range(12):
            mine.step()
            if steps.step():
                assert _alike(job, mine.flat, "bf16")
    bps.shutdown()


def refused(job: Job) -> None:
    bps.init()
    parameters = [torch.ones(4)]
    wrong = (
        ({"every": 0}, "every=0 steps"),
        ({"every": 3, "fragments": 4}, "fragments=4"),
        ({"every": 3, "delay": 3}, "delay=3 must be less than every=3"),
        ({"every": 3, "momentum": 1.0}, "momentum=1.0 from 0"),
        ({"every": 3, "lr": 0.0}, "lr=0.0 must be positive"),
        ({"every": 3, "wire_dtype": torch.int8}, "wire_dtype=torch.int8"),
    )
    for settings, text in wrong:
        with job.check_raises(str(settings), ValueError, text):
            LocalSteps(parameters, **settings)
    with job.check_raises("nothing", ValueError, "no parameters"):
        LocalSteps([], every=2)
    with job.check_raises("different", bps.BytePSError, "different parameters to begin with"):
        LocalSteps([torch.full((4,), float(job.rank))], every=2, name="different")
    with job.check_raises("in flight", RuntimeError, "an exchange is in flight"):
        steps = LocalSteps(parameters, every=3, delay=1, name="flying")
        for _ in range(3):
            steps.step()
        steps.state_dict()
    with job.check_raises("state", ValueError, r"fragments of \[4\] values, not \[5\]"):
        other = LocalSteps([torch.ones(5)], every=3, name="five")
        other.load_state_dict({"steps": 1, "outer": [torch.ones(4)], "momentum": [torch.ones(4)]})
    steps.step()
    bps.shutdown()


def _alike(job: Job, values: torch.Tensor, name: str) -> bool:
    total = values.double()
    bps.push_pull_inplace(total, average=False, name=f"alike {name}")
    return torch.equal(total, values.double() * job.size)
