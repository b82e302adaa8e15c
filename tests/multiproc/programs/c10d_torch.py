"""Behaviour of torch's process groups: each case on plain gloo, and on a BytePS group over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.multiproc.programs.c10d_kit import given, initialize, natively, through_servers
from tests.multiproc.programs.job import Job

SHORT_S = 0.5
"""Seconds after which the other ranks give up waiting. A late rank comes later than this."""

type Case = Callable[[Job, Any], Any]
"""Function of a job and a group; its result must be the same with any backend."""


def _compare(job: Job, cases: dict[str, Case], **named: Any) -> None:
    """Run the cases with both backends; `named`: arguments for the groups."""
    initialize(job)
    torch.set_num_threads(1)
    with natively():
        gloo = dist.new_group(backend="gloo", **named)
    ours = dist.new_group(**named)
    for name, case in cases.items():
        with job.check(name):
            theirs, before = case(job, gloo), through_servers()
            result = case(job, ours)
            assert through_servers() > before, "nothing went through the servers"
            torch.testing.assert_close(result, theirs)
    dist.destroy_process_group()


def _error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "none"


def _spellings(job: Job, group: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda t: group.allreduce(t),
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce(t, dist.ReduceOp.MAX),
        lambda t: group.allreduce(t, op=dist.ReduceOp.SUM),
        lambda t: group.allreduce(tensor=t, op=dist.ReduceOp.SUM),
        lambda t: group.allreduce([t], dist.ReduceOp.SUM),
        lambda t: group.allreduce([t], op=dist.ReduceOp.MAX),
        lambda t: group.allreduce(tensors=[t], opts=options),
        lambda t: group.allreduce([t], dist.ReduceOp.SUM, timedelta(seconds=100)),
        lambda t: group.allreduce(t, timeout=timedelta(seconds=100)),
        lambda t: group.allreduce_coalesced([t, t.clone()]),
        lambda t: group.allreduce_coalesced(tensors=[t]),
    ]
    results = []
    for call in calls:
        tensor = given(1000, job.rank)
        call(tensor).wait()
        results.append(tensor)
    several = [given(1000, job.rank), given(1000, job.rank + 1)]
    group.allreduce(several).wait()
    return [*results, *several]


def _works(job: Job, group: Any) -> Any:
    tensor = given(1000, job.rank)
    work = group.allreduce([tensor])
    early = work.is_success(), _has_no_error(work)
    work.wait()
    late = work.is_success(), work.is_completed(), _has_no_error(work)
    empty = _error_of(lambda: group.allreduce_coalesced([])), _error_of(lambda: group.allreduce([]))
    return [work.result()[0], torch.tensor([*early, *late]), _text(*empty)]


def _has_no_error(work: Any) -> bool:
    """Return whether the work is known to have no exception. Older releases of torch cannot report
    this for gloo, because the binding has no Python type."""
    try:
        return work.exception() is None
    except TypeError:
        return True


def _text(*words: str) -> torch.Tensor:
    """Return the words as a tensor, so that they can be compared like other results."""
    return torch.tensor([*" ".join(words).encode()])


def _names(job: Job, group: Any) -> Any:
    tensor = given(1000, job.rank)
    dist.all_reduce(tensor, group=group)
    model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    backend_name = model._get_ddp_logging_data()["backend_name"]
    words = (
        group.name(),
        dist.get_backend(group),
        str(dist.get_backend_config(group)),
        backend_name,
    )
    return [tensor, _text(*words)]


def _profile(job: Job, group: Any) -> Any:
    tensors = [given(1000, job.rank) for _ in range(6)]
    number = torch.tensor([job.rank])
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:3]]
        works.append(dist.all_reduce(number, group=group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        dist.all_reduce_coalesced(tensors[3:5], group=group)
        with torch.autograd.profiler.record_function("all ended"):
            dist.all_reduce(tensors[5], group=group)
    events = profile.function_events
    reductions = sorted(
        (e for e in events if e.name == "gloo:all_reduce"), key=lambda e: e.time_range.start
    )
    calls = [e.name for e in events if e.name.startswith("c10d::")]
    (marked,) = (e.time_range.start for e in events if e.name == "all ended")
    ended = [e.time_range.end <= marked for e in reductions]
    return [
        *tensors,
        number,
        torch.tensor([*(e.is_async for e in reductions), *ended]),
        _text(*calls),
    ]


def profile_shapes(job: Job) -> None:
    """Shapes of reduced tensors are at the call's event in a profile."""
    initialize(job)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(30, 4))
        dist.all_reduce_coalesced([torch.ones(30, 4), torch.ones(50)])
    events = profile.function_events
    collectives = [(e.name, e.input_shapes) for e in events if e.name.startswith("c10d::")]
    with job.check("shapes"):
        assert collectives == [
            ("c10d::allreduce_", [[30, 4]]),
            ("c10d::allreduce_coalesced_", [[30, 4], [50]]),
        ], collectives
    dist.destroy_process_group()


def _sparse(job: Job, group: Any) -> Any:
    indices = torch.tensor([[job.rank, 5]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (8,))
    dist.all_reduce(tensor, group=group)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    parallel = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor([job.rank, 3, step])).square().mean().backward()
        optimizer.step()
    return [tensor.to_dense(), *(parameter.detach() for parameter in model.parameters())]


def _join(job: Job, group: Any) -> Any:
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + job.rank):  # One rank makes more steps.
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step))).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _nobody_waits(job: Job, group: Any) -> Any:
    tensors = [given(1000, job.rank) + number for number in range(200)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier(group)
    last = given(1000, job.rank)
    dist.all_reduce(last, group=group)
    return [*tensors[:100], last]


def as_torch_promises(job: Job) -> None:
    """Run cases that need neither a compiler nor a late rank."""
    _compare(
        job,
        {
            "all spellings of an all-reduce": _spellings,
            "works": _works,
            "names": _names,
            "events of the profiler": _profile,
            "sparse tensors": _sparse,
            "uneven inputs": _join,
            "nobody waits": _nobody_waits,
        },
    )


def _compiled_model(job: Job, group: Any) -> Any:
    results: list[torch.Tensor] = []
    for compile_it in ("outside", "inside"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model: Any = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
        parameters = list(model.parameters())
        if compile_it == "outside":
            model = torch.compile(model, backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(parameters, 0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 8), float(job.rank + step))).square().mean().backward()
            optimizer.step()
        results += [parameter.detach() for parameter in parameters]
    return results


def _compiled_sum(job: Job, group: Any) -> Any:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def both(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        work: Any = dist.all_reduce(doubled, group=group, async_op=True)
        other = tensor * 3
        dist.all_reduce(other, group=group)
        work.wait()
        return doubled + other

    return both(given(1000, job.rank))


def compiled(job: Job) -> None:
    """torch.compile around reducing code."""
    _compare(job, {"models": _compiled_model, "sums": _compiled_sum})


def _late_rank(job: Job, group: Any) -> Any:
    tensor = given(1000, job.rank)
    if job.rank:
        time.sleep(4 * SHORT_S)
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    early = "" if job.rank else _error_of(lambda: work.wait(timedelta(seconds=SHORT_S)))
    if not job.rank:
        assert early in ("RuntimeError", "BytePSError"), early
    work.wait()
    return tensor


def limits(job: Job) -> None:
    """Limit of a wait, in seconds."""
    _compare(job, {"the limit of a wait": _late_rank})


def group_limit(job: Job) -> None:
    """Check that a group's operations have the group's time limit."""
    initialize(job)
    name = "cpu:gloo,cuda:gloo"
    group: Any = dist.new_group(backend=name, timeout=timedelta(seconds=SHORT_S))
    with job.check("a group of named devices is carried"):
        assert type(group).__name__ == "BytePSGroup"
        assert dist.get_backend_config(group) == name
    for name, call in _reconfigurations(group).items():
        with job.check_raises(f"{name} is refused", RuntimeError, "cannot be reconfigured"):
            call()
    for hook in ("pre", "post"):
        with job.check_raises(f"a {hook} hook is refused", RuntimeError, "register none"):
            getattr(group, f"register_{hook}_hook")(1, print)
    tensor = given(1000, job.rank)
    if job.rank:
        job.wait_until("rank 0's error", (job.folder / "mark.late.0").exists)
        dist.all_reduce(tensor, group=group)
    else:
        pattern = rf"all-reduce of float32 \(1000,\) timed out.*{SHORT_S:g} s"
        with job.check_raises("the limit of a group", RuntimeError, pattern):
            dist.all_reduce(tensor, group=group)
        job.mark("late")
    dist.barrier()
    dist.destroy_process_group()


def _reconfigurations(group: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls of this version of torch that change a group's members."""
    if not hasattr(dist, "_reconfigure"):
        return {"reconfigure": lambda: group.reconfigure(None)}
    inside: Any = dist
    assert not inside._supports_reconfigure(group)
    return {
        "a handle": lambda: inside._get_reconfigure_handle(group),
        "reconfigure": lambda: inside._reconfigure(1, ["a", "b"], group),
    }


def job_limit(job: Job) -> None:
    """Check that the default group's limit is the job's. Ends by the test's error."""
    initialize(job, timeout=timedelta(seconds=3))
    if job.rank:
        job.wait_go("end")
    work: Any = dist.all_reduce(given(1000, job.rank), async_op=True)
    work.get_future().wait()


def detailed(job: Job) -> None:
    """Check that TORCH_DISTRIBUTED_DEBUG=DETAIL compares the members' shapes."""
    dist.set_debug_level_from_env()  # torch was imported before the variable was set.
    initialize(job)
    with job.check("sums that agree"):
        before = through_servers()
        tensor = given(1000, job.rank)
        dist.all_reduce(tensor)
        dist.barrier()
        dist.all_reduce_coalesced([tensor, tensor.clone()])
        assert through_servers() > before
    pattern = rf"(?s)mismatch.*{1000 + job.rank}.*{1000 + (1 - job.rank)}"
    with job.check_raises("shapes that differ", RuntimeError, pattern):
        dist.all_reduce(given(1000 + job.rank, job.rank))
    dist.destroy_process_group()
