"""Programs of torch.distributed whose all-reduces go through the servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from byteps.torch.c10d import hooks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.multiproc.cluster import resident_bytes, wait_for_file
from tests.multiproc.programs.c10d_kit import (
    LARGE,
    given,
    initialize,
    native_backend,
    natively,
    on_gpu,
    through_servers,
    total,
    whole_parameters,
)
from tests.multiproc.programs.job import Job

STEPS = 3
GO_ON_S = 60.0
MOST_GROWTH = 32 << 20
"""Limit for a process's memory growth over thousands of sums, in bytes."""


def collectives(job: Job) -> None:
    """Call all operations of process groups, of the world group and of others."""
    initialize(job)
    everyone = list(range(job.size))
    world = dist.group.WORLD
    assert world is not None
    want = total(LARGE, everyone)
    with job.check("scripts see the backend that they asked for"):
        assert dist.get_backend() == native_backend(job)
        assert type(dist.group.WORLD).__name__ == "BytePSGroup"

    def counted(name: str, run: Callable[[], None], by_servers: bool) -> None:
        with job.check(name):
            before = through_servers()
            run()
            assert (through_servers() > before) == by_servers, "the wrong backend"

    def all_reduce(**named: Any) -> Callable[[], None]:
        def run() -> None:
            tensor = given(LARGE, job.rank)
            dist.all_reduce(tensor, **named)
            assert torch.equal(tensor, want)

        return run

    def maximum() -> None:
        tensor = torch.full((LARGE,), float(job.rank))
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert (tensor == job.size - 1).all()

    def average() -> None:
        tensor = given(LARGE, job.rank)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(tensor, want / job.size)

    def short() -> None:
        tensor = torch.full((10,), float(job.rank))
        dist.all_reduce(tensor)
        assert (tensor == sum(everyone)).all()

    def whole_numbers() -> None:
        tensor = torch.full((LARGE,), job.rank)
        dist.all_reduce(tensor)
        assert (tensor == sum(everyone)).all()

    def several_in_flight() -> None:
        tensors = [given(LARGE, job.rank) + round_ for round_ in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for round_, work in reversed(list(enumerate(works))):
            assert work is not None
            work.wait()
            assert torch.equal(tensors[round_], want + round_ * job.size)
            assert work.is_completed() and work.is_success() and work.exception() is None

    def future() -> None:
        tensor = given(LARGE, job.rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        (result,) = work.get_future().then(lambda done: done.value()).wait()
        assert result is tensor
        assert torch.equal(tensor, want)
        work.wait()

    def functional_collective() -> None:
        tensor = functional.all_reduce(given(LARGE, job.rank), "sum", world)
        assert torch.equal(tensor + 0, want)

    def compiled() -> None:
        @torch.compile(backend="aot_eager")
        def double_sum(tensor: torch.Tensor) -> torch.Tensor:
            return 2 * functional.all_reduce(tensor, "sum", world)

        assert torch.equal(double_sum(given(LARGE, job.rank)), 2 * want)

    def coalesced() -> None:
        long, few = given(LARGE, job.rank), torch.ones(10)
        with dist._coalescing_manager(async_ops=True) as works:
            dist.all_reduce(long)
            dist.all_reduce(few)
        works.wait()
        assert torch.equal(long, want)
        assert (few == job.size).all()

    def channels_last() -> None:
        tensor = given(LARGE, job.rank).view(5, 8, 10, 100)
        tensor = tensor.to(memory_format=torch.channels_last)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, want.view(5, 8, 10, 100))

    def with_holes() -> None:
        tensor = given(2 * LARGE, job.rank)[::2]
        dist.all_reduce(tensor.contiguous())

    counted("a sum", all_reduce(), True)
    counted("an average", average, True)
    counted("a maximum stays native", maximum, False)
    counted("a short tensor stays native", short, False)
    counted("whole numbers stay native", whole_numbers, False)
    counted("several of one size, awaited backwards", several_in_flight, True)
    counted("a future", future, True)
    counted("a functional collective", functional_collective, True)
    counted("a compiled one", compiled, True)
    counted("a coalescing manager", coalesced, True)
    counted("channels last", channels_last, True)
    counted("a copy of a tensor with holes", with_holes, True)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with job.check(f"a sum of {dtype}"):
            tensor = given(LARGE, job.rank, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(LARGE, everyone, dtype))
    with job.check("barriers, and objects"):
        dist.barrier()
        if not on_gpu(job):
            dist.monitored_barrier()
        ranks: list[Any] = [None] * job.size
        dist.all_gather_object(ranks, job.rank)
        assert ranks == everyone

    evens = [rank for rank in everyone if rank % 2 == 0]
    _groups(job, evens)
    dist.destroy_process_group()
    with job.check("destroying the world leaves the job"):
        assert not bps.is_initialized()


def _groups(job: Job, evens: list[int]) -> None:
    """Sum in two groups of the same ranks: their sums must not mix."""
    with job.check("groups of the same ranks"):
        group, other = dist.new_group(evens), dist.new_group(evens)
        if job.rank in evens:
            first, second = given(LARGE, job.rank), 2 * given(LARGE, job.rank)
            works = [
                dist.all_reduce(first, group=group, async_op=True),
                dist.all_reduce(second, group=other, async_op=True),
            ]
            for work in reversed(works):
                assert work is not None
                work.wait()
            assert torch.equal(first, total(LARGE, evens))
            assert torch.equal(second, 2 * total(LARGE, evens))


def models(job: Job) -> None:
    """DDP with the backend and with the hook, and FSDP2 over a mesh, compared with plain gloo or
    NCCL."""
    initialize(job)
    with natively():
        gloo = dist.new_group(list(range(job.size)), backend=native_backend(job))
    torch.set_num_threads(1)
    results = {
        "gloo": _train_ddp(job, gloo),
        "backend": _train_ddp(job, None),
        "hook": _train_ddp(job, gloo, hook=True),
    }
    for name in ("backend", "hook"):
        with job.check(f"DDP by the {name} learns the same"):
            torch.testing.assert_close(results[name], results["gloo"])
    with job.check("two hosts of two shards"):
        count = through_servers()
        ours = _train_hsdp(job, _mesh(job))
        assert through_servers() > count, "nothing went through the servers"
        torch.testing.assert_close(ours, results["gloo"], rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def gathers(job: Job) -> None:
    """Repeated functional all-gathers of tensors that gloo's threads free."""
    initialize(job)
    world = dist.group.WORLD
    assert world is not None
    with job.check("gathers"):
        for round_ in range(int(job.args["rounds"])):
            own = torch.full((64,), float(job.rank + round_))
            gathered = functional.all_gather_tensor(own, 0, world)
            assert float((gathered + 0).sum()) == 64 * sum(
                rank + round_ for rank in range(job.size)
            )
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


def _fit(job: Job, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    torch.manual_seed(100 + job.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 128)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()


def _train_ddp(job: Job, group: Any, *, hook: bool = False) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=1)
    if hook:
        model.register_comm_hook(group, hooks.ddp_comm_hook)
    _fit(job, model)
    with model.no_sync():
        model(torch.randn(8, 128)).square().mean().backward()
    return [parameter.detach() for parameter in model.parameters()]


class _Weighted(nn.Module):
    """Parameters of one length. Their gradients are constant: random numbers times 1, 10, 100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList(torch.zeros(512, 512) for _ in range(3))
        self.gradients = [10**i * torch.randn(512, 512) for i in range(3)]

    def forward(self) -> torch.Tensor:
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def keeps_losses_apart(job: Job) -> None:
    """Average constant gradients with error feedback. The mean over steps approaches the gradient,
    bucket by bucket, though all buckets have the same length."""
    initialize(job)
    _average_constant_gradients(job, "DDP by itself", hook=None)
    _average_constant_gradients(job, "our hook", hook=hooks.ddp_comm_hook)
    used: list[int] = []

    def by_hand(state, bucket):  # noqa: ANN001, ANN202
        used.append(bucket.index())
        return hooks.ddp_comm_hook(state, bucket)

    _average_constant_gradients(job, "the script's hook", hook=by_hand)
    with job.check("the script's hook was called"):
        assert used
    dist.destroy_process_group()


def _average_constant_gradients(job: Job, name: str, *, hook: Any) -> None:
    steps, module = 20, _Weighted()
    model = DistributedDataParallel(module, bucket_cap_mb=1)
    if hook is not None:
        model.register_comm_hook(None, hook)
    sums = [torch.zeros(512, 512) for _ in module.weights]
    before = through_servers()
    for _ in range(steps):
        model.zero_grad()
        model().backward()
        for total_, weight in zip(sums, module.weights, strict=True):
            assert weight.grad is not None
            total_ += weight.grad
    with job.check(f"{name}: every bucket went through the servers"):
        # DDP chooses its buckets anew after the first step.
        assert through_servers() - before > (steps - 1) * len(sums)
    for i, (total_, gradient) in enumerate(zip(sums, module.gradients, strict=True)):
        with job.check(f"{name}: gradient {i}"):
            error = (total_ / steps - gradient).abs().max() / gradient.abs().max()
            assert error < 0.03, f"{error:.3f} of its largest value"


def fsdp_hook(job: Job) -> None:
    """FSDP2 inside each host with the hook between hosts, compared with HSDP over gloo. Every sum
    has two values, so their order does not matter."""
    initialize(job)
    torch.set_num_threads(1)
    with natively():
        mesh = _mesh(job)
    before = through_servers()
    theirs = _train_hsdp(job, mesh)
    with job.check("gloo's mesh is gloo's alone"):
        assert through_servers() == before
    hook = hooks.fsdp_all_reduce_hook(mesh.get_group("replicate"))
    ours = _train_hsdp(job, mesh["shard"], hook)
    with job.check("gradients went through the servers"):
        assert through_servers() == before + STEPS * 2, "two layers, and not the root"
    with job.check("the hook learns the same, to the bit"):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    dist.destroy_process_group()


def _mesh(job: Job) -> DeviceMesh:
    """Return a mesh with hosts of two ranks."""
    kind = "cuda" if on_gpu(job) else "cpu"
    return init_device_mesh(kind, (job.size // 2, 2), mesh_dim_names=("replicate", "shard"))


def _train_hsdp(
    job: Job, mesh: DeviceMesh, hook: Callable[[torch.Tensor], None] | None = None
) -> list[torch.Tensor]:
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hook is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(hook)
    _fit(job, model)
    return whole_parameters(model)


def streams(job: Job) -> None:
    """Sum on a GPU: streams wait for the sums while the host continues."""
    initialize(job)
    want = total(LARGE, list(range(job.size)))
    with job.check("kernels are loaded while a stream waits"):
        tensor = given(LARGE, job.rank)
        if job.rank == 1:
            time.sleep(1)
        dist.all_reduce(tensor)
        values = torch.sort(torch.special.i0(torch.erfinv(tensor / 100)))[0]
        torch.cuda.empty_cache()
        assert torch.equal(tensor, want)
        assert not torch.isnan(values).any()
    with job.check("the host goes on"):
        tensor = given(LARGE, job.rank)
        if job.rank == 1:  # Rank 1 joins the sum only after the other rank has gone on.
            wait_for_file(job.folder / "mark.went_on.0", GO_ON_S)
        for _ in range(5):
            dist.all_reduce(tensor)
        job.mark("went_on")
        assert torch.equal(tensor, want * job.size**4)
    with job.check("nobody waits"):
        tensors = [given(LARGE, job.rank) + number for number in range(4)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        torch.cuda.synchronize()
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, want + number * job.size)
    with job.check("another stream waits"):
        tensor = given(LARGE, job.rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work.wait()
            copy = tensor.clone()
        stream.synchronize()
        assert torch.equal(copy, want)
    with job.check("a wait with a limit"):
        tensor = given(LARGE, job.rank)
        if job.rank == 1:
            wait_for_file(job.folder / "mark.late.0", GO_ON_S)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if job.rank == 0:
            with job.check_raises("it ends at its limit", bps.BytePSError, "timed out.*0.3 s"):
                work.wait(timedelta(seconds=0.3))
            job.mark("late")
        work.wait(timedelta(seconds=GO_ON_S))
        assert torch.equal(tensor, want)
    with job.check("memory comes back"):
        held = []
        for _ in range(40):
            for _ in range(5):
                work = dist.all_reduce(given(100 * LARGE, job.rank), async_op=True)
            assert work is not None
            work.wait()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_reserved())
        assert held[-1] <= held[4] + 4 * 400 * LARGE, held
    dist.destroy_process_group()


def first_step(job: Job) -> None:
    """HSDP from the first step on, without warm-up."""
    initialize(job)
    mesh = init_device_mesh("cuda", (job.size, 1), mesh_dim_names=("replicate", "shard"))
    before = through_servers()
    parameters = _train_hsdp(job, mesh)
    with job.check("numbers"):
        assert all(bool(torch.isfinite(parameter).all()) for parameter in parameters)
        assert through_servers() >= before + 2 * STEPS
    dist.destroy_process_group()


def many_sizes(job: Job) -> None:
    """Sum tensors of ever new lengths: servers see a bounded number of tensors. The test checks
    their memory after all lengths came twice, and at the end."""
    initialize(job)
    rounds, sizes = int(job.args["rounds"]), int(job.args["sizes"])
    held: list[int] = []
    with job.check("sums of many lengths"):
        for round_ in range(rounds):
            elements = LARGE // 8 + round_ % sizes
            tensor = torch.full((elements,), float(job.rank))
            dist.all_reduce(tensor)
            assert (tensor == sum(range(job.size))).all()
            if round_ + 1 in (2 * sizes, rounds):
                held.append(resident_bytes(os.getpid()))
                job.mark(f"looked{len(held)}")
                job.wait_go(f"look{len(held)}")
    with job.check("a bounded number of names"):
        assert bps.get_metrics()["byteps_worker_declared_tensors"] <= int(job.args["most"])
    with job.check("bounded memory"):
        assert held[-1] - held[0] <= MOST_GROWTH, held
    dist.destroy_process_group()


def loop(job: Job) -> None:
    """Reduce until the test ends it by an error."""
    initialize(job)
    for round_ in range(1_000_000):
        work = dist.all_reduce(torch.ones(LARGE), async_op=True)
        assert work is not None
        work.get_future()
        work.wait()
        if round_ == 5:
            job.mark("looping")
        time.sleep(0.001)


def ddp_loop(job: Job) -> None:
    """Train with DDP until the test ends it by an error."""
    initialize(job)
    torch.set_num_threads(1)
    model = DistributedDataParallel(_model())
    before = through_servers()
    for step in range(1_000_000):
        model(torch.randn(8, 128)).square().mean().backward()
        if step == 5:
            assert through_servers() > before + 5
            job.mark("looping")
        time.sleep(0.001)
