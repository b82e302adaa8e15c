"""Upstream's optimizer interface over this engine, and local steps with their exchanges.

The argument ``device`` is "cpu" or "cuda".
"""

from __future__ import annotations

import ipaddress
import random

import byteps.torch as bps
import torch
from byteps.torch import engine, operations
from byteps.torch.diloco import LocalSteps

from tests.multiproc.programs.devices import device_of
from tests.multiproc.programs.job import Job

STEPS = 5
RATE = 0.125  # Powers of two, so that every value below is exact in fp32.


def model(job: Job, seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    made = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.round(parameter * 16) / 16)
    return made.to(device_of(job))


def batch(job: Job, rank: int, step: int) -> torch.Tensor:
    return torch.tensor([[rank + 1.0, step - 1.0, 2.0 * rank - step]], device=device_of(job))


def mean_batch(job: Job, step: int) -> torch.Tensor:
    total = sum(batch(job, rank, step) for rank in range(job.size))
    assert isinstance(total, torch.Tensor)
    return total / job.size


def demand_gradients(trained: torch.nn.Linear, weight: torch.Tensor, bias: float) -> None:
    """Check the gradient of a sum: each row of the weight gets the input, the bias gets ones."""
    assert trained.weight.grad is not None and trained.bias.grad is not None
    assert torch.equal(trained.weight.grad, weight.expand(2, 3)), trained.weight.grad
    assert torch.equal(trained.bias.grad, torch.full_like(trained.bias, bias)), trained.bias.grad


def distributed(job: Job) -> None:
    """Each rank has its own data; parameters follow the mean of all ranks' gradients."""
    bps.init()
    trained = model(job, job.rank)
    with job.check("broadcast_parameters"):
        bps.broadcast_parameters(trained.state_dict(), root_rank=1)
        for parameter, root in zip(trained.parameters(), model(job, 1).parameters(), strict=True):
            assert torch.equal(parameter, root)
    expected = [p.detach().clone() for p in trained.parameters()]
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=RATE),
        named_parameters=trained.named_parameters(),
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        trained(batch(job, job.rank, step)).sum().backward()
        optimizer.step()
        expected[0] -= RATE * mean_batch(job, step).expand(2, 3)
        expected[1] -= RATE
        with job.check(f"step {step}"):
            for parameter, wanted in zip(trained.parameters(), expected, strict=True):
                assert torch.equal(parameter, wanted), (parameter, wanted)
    bps.shutdown()


def clipped(job: Job) -> None:
    """Change gradients between synchronize() and step(), when .grad has the mean."""
    bps.init()
    trained = model(job, 0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=RATE),
        named_parameters=trained.named_parameters(),
    )
    trained(batch(job, job.rank, 1)).sum().backward()
    optimizer.synchronize()
    with job.check("gradients after synchronize()"):
        demand_gradients(trained, mean_batch(job, 1), 1.0)
    assert trained.bias.grad is not None
    before = trained.bias.detach().clone()
    trained.bias.grad.fill_(job.rank + 1.0)
    with optimizer.skip_synchronize():
        for _ in range(2):
            optimizer.step()
    with job.check("steps take this rank's gradients"):
        assert torch.equal(trained.bias.detach(), before - 2 * RATE * (job.rank + 1))
    with job.check_raises("names that are not unique", ValueError, "one name"):
        same = [("a", parameter) for parameter in trained.parameters()]
        bps.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=RATE), same)
    bps.shutdown()


def compressed(job: Job) -> None:
    """Use Compression.fp16: gradients travel as fp16, and come back in their own type."""
    bps.init()
    trained = model(job, 0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=RATE),
        named_parameters=trained.named_parameters(),
        compression=bps.Compression.fp16,
    )
    # This exceeds what fp16 can represent in this range by 1/1024, which is lost in transit.
    trained((batch(job, job.rank, 1) + 16) * (1 + 2.0**-12)).sum().backward()
    optimizer.synchronize()
    with job.check("the mean of what fp16 holds"):
        assert trained.weight.grad is not None and trained.weight.grad.dtype == torch.float32
        demand_gradients(trained, mean_batch(job, 1) + 16, 1.0)
    bps.shutdown()


def state(job: Job) -> None:
    """broadcast_optimizer_state: every rank has the root's moments and learning rate."""
    bps.init()
    trained = model(job, 0)
    rate = 0.5 if job.rank == 0 else 0.25
    optimizer = torch.optim.Adam(trained.parameters(), lr=rate)
    (trained(batch(job, job.rank, 0)) ** 2).sum().backward()
    optimizer.step()
    own = [s["exp_avg"].clone() for s in optimizer.state.values()]
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    with job.check("the root's learning rate"):
        assert optimizer.param_groups[0]["lr"] == 0.5
    reference = model(job, 0)
    root = torch.optim.Adam(reference.parameters(), lr=0.5)
    (reference(batch(job, 0, 0)) ** 2).sum().backward()
    root.step()
    with job.check("the root's moments"):
        for state_of, wanted in zip(optimizer.state.values(), root.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(state_of[key], wanted[key]), key
    with job.check("they had differed"):
        same = all(
            torch.equal(a, s["exp_avg"]) for a, s in zip(own, root.state.values(), strict=True)
        )
        assert same == (job.rank == 0)
    bps.shutdown()


def alone(job: Job) -> None:
    """Check that a single rank's gradients are the averages, and that nothing is sent."""
    bps.init()
    trained = model(job, 0)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=RATE))
    trained(batch(job, 0, 1)).sum().backward()
    optimizer.step()
    with job.check("its own gradients"):
        demand_gradients(trained, batch(job, 0, 1), 1.0)
    with job.check("nothing is sent"):
        assert bps.get_metrics()["byteps_worker_operations_total"] == 0
    bps.shutdown()


def broadcasts(job: Job) -> None:
    """Check tensors of every kind, parameters from any iterable, objects, and small functions."""
    bps.init()
    root, device = job.size - 1, device_of(job)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40], device=device)
    flags = torch.tensor([True, False, True], device=device)
    with job.check("bit for bit"):
        got = bps.broadcast(odd if job.rank == root else torch.ones_like(odd), root, "odd")
        assert got.view(torch.int32).tolist() == odd.view(torch.int32).tolist()
        got = bps.broadcast(flags if job.rank == root else ~flags, root, "flags")
        assert torch.equal(got, flags)
    for kind in ("named_parameters", "parameters", "state_dict"):
        with job.check(kind):
            trained = model(job, job.rank)
            bps.broadcast_parameters(getattr(trained, kind)(), root, prefix=kind)
            for parameter, theirs in zip(
                trained.parameters(), model(job, root).parameters(), strict=True
            ):
                assert torch.equal(parameter, theirs)
    with job.check("objects"):
        for value in ({"rank": job.rank}, [job.rank] * 1000, None):
            got = bps.broadcast_object(value, root)
            assert got in ({"rank": root}, [root] * 1000, None)
    with job.check("objects of any length, by names that do not depend on it"):
        known = None
        for length in (1, 5000, 70_000, 9_000_000, 5001, 9_000_001):
            random.seed(length)
            content = random.randbytes(length)
            assert bps.broadcast_object(content if job.rank == root else None, root) == content
            names = {name for name in operations._known if name.startswith("object")}
            known = names if length == 9_000_000 else known
        assert names == known, names
    with job.check_raises("different roots", bps.BytePSError, f"'roots', this rank {job.rank}"):
        bps.broadcast_object(None, job.rank, "roots")
    with job.check("barrier, num_servers"):
        bps.barrier()
        assert bps.num_servers() == 1
    with job.check("server_hosts"):
        hosts = engine.server_hosts()
        assert [str(ipaddress.ip_address(host)) for host in hosts] == hosts and len(hosts) == 1
    with job.check("a future"):
        tensor = torch.full((5000,), float(job.rank), device=device)
        handle = bps.push_pull_async_inplace(tensor, average=False, name="future")
        result = bps.future(handle).then(lambda done: done.value() + 1).wait()
        assert (result == sum(range(job.size)) + 1).all()
    with job.check_raises("a root that is none", ValueError, "root_rank"):
        bps.broadcast(odd, job.size, "odd")
    sparse = torch.eye(3, device=device).to_sparse()
    bad = {
        "sparse": sparse,
        "complex": torch.ones(3, dtype=torch.complex64),
        "view": torch.ones(4, 4).t(),
    }
    says = {"sparse": "to_dense", "complex": "view_as_real", "view": "not contiguous"}
    for kind, tensor in bad.items():
        with job.check_raises(f"a {kind} tensor", ValueError, says[kind]):
            bps.push_pull_inplace(tensor, name=kind)
    bps.push_pull_async_inplace(torch.ones(3, device=device), name="forgotten")
    bps.shutdown()


# Local steps and exchanges, compared with the same arithmetic in one process.


LENGTHS = (7, 3000, 1, 450)


class Replica:
    """A simulated replica: parameters, and an inner SGD whose gradients depend only on its
    number."""

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
    """Local steps equal torch's outer SGD, also with an exchange in each step, and as plain
    averaging (lr 1, no momentum)."""
    bps.init()
    for every, lr, momentum in ((1, 0.7, 0.9), (5, 0.7, 0.9), (4, 1.0, 0.0)):
        name = f"every {every} lr {lr}"
        with job.check(name):
            want, replica = Reference(job.size, lr, momentum), Replica(job.rank)
            steps = LocalSteps(
                replica.parameters,
                every=every,
                lr=lr,
                momentum=momentum,
                wire_dtype=torch.float32,
                name=name,
            )
            for number in range(1, 14):
                want.step()
                replica.step()
                assert steps.step() == (number % every == 0)
                if number % every == 0:
                    want.exchange()
                    torch.testing.assert_close(replica.flat, want.outer, rtol=0, atol=2e-6)
            torch.testing.assert_close(
                replica.flat, want.replicas[job.rank].flat, rtol=0, atol=2e-6
            )
    bps.shutdown()


def fragments(job: Job) -> None:
    """Exchange fragments, each in its own step; updates made while an average is in flight are
    kept."""
    bps.init()
    with job.check("fragments and delay"):
        replica = Replica(job.rank)
        steps = LocalSteps(
            replica.parameters, every=6, lr=1.0, momentum=0.0, delay=2, fragments=2, name="f"
        )
        changed = []
        for number in range(1, 14):
            before = replica.flat
            replica.step()
            learned = replica.flat
            if steps.step():
                changed.append(number)
                # With lr 1, each replica moves to the mean of the pushed values, and keeps later
                # updates.
                assert not torch.equal(replica.flat, learned)
            assert not torch.equal(before, learned)
        assert changed == [5, 8, 11], changed
    with job.check("all alike after an exchange of everything"):
        steps.exchange()
        assert _alike(job, replica.flat, "exchange")
        state = steps.state_dict()
        assert state["steps"] == 13
    with job.check("a state goes on where it was"):
        other = Replica(job.rank)
        again = LocalSteps(
            other.parameters, every=6, lr=1.0, momentum=0.0, delay=2, fragments=2, name="again"
        )
        again.load_state_dict(state)
        assert torch.equal(other.flat, replica.flat)
        for number in range(7):
            gradient = torch.full_like(replica.flat, 0.01 * (job.rank + 1) * (number + 1))
            for trained_replica, local in ((replica, steps), (other, again)):
                trained_replica.put(trained_replica.flat - gradient)
                local.step()
            assert torch.equal(other.flat, replica.flat)
    bps.shutdown()


def fragments_without_values(job: Job) -> None:
    """A shard may be empty, and so may the last fragment."""
    bps.init()
    for name, lengths in (("an empty last parameter", (5, 0)), ("an empty shard", (0, 0))):
        with job.check(name):
            parameters = [torch.full((length,), float(length)) for length in lengths]
            steps = LocalSteps(parameters, every=2, lr=1.0, momentum=0.0, fragments=2, name=name)
            for number in range(1, 5):
                for parameter in parameters:
                    parameter.sub_(job.rank + 1.0)
                assert steps.step() == (number % 2 == 1 and lengths[0] > 0)
            steps.exchange()
            state = steps.state_dict()
            steps.load_state_dict(state)
            mean = 5 - 4 * sum(rank + 1.0 for rank in range(job.size)) / job.size
            assert torch.equal(parameters[0], torch.full((lengths[0],), mean))
    bps.shutdown()


def momentum_keeps_members_alike(job: Job) -> None:
    """Exchange with momentum in bf16: all members add the same rounded differences."""
    bps.init()
    with job.check("bf16"):
        replica = Replica(job.rank)
        steps = LocalSteps(replica.parameters, every=3, name="bf16")
        for _ in range(12):
            replica.step()
            if steps.step():
                assert _alike(job, replica.flat, "bf16")
    bps.shutdown()


def few_bits_add_up(job: Job) -> None:
    """After any number of exchanges the parameters are within a quantum of the sum of all moves,
    even if each move of most values is less than half a quantum; all members have the same bits."""
    bps.init()
    for form, levels in (("int8", 127), ("int4", 7)):
        with job.check(form):
            parameter, total = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
            steps = LocalSteps(
                [parameter], every=1, lr=1.0, momentum=0.0, wire_dtype=form, name=form
            )
            move = torch.full_like(parameter, 0.3 / levels)
            move[::50] = 1.0  # The scale of a block follows its largest value.
            for number in range(1, 31):
                parameter.add_(move * (1 - 0.1 * job.rank) * (-1) ** (number // 10))
                total += move.double() * (1.05 - 0.05 * job.size) * (-1) ** (number // 10)
                steps.step()
                assert (parameter - total).abs().max() < 1 / levels, f"exchange {number}"
                assert _alike(job, parameter, form)
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
        ({"every": 3, "wire_dtype": torch.float16}, "wire_dtype=torch.float16 must be one of"),
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
