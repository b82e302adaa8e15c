"""Sums of tensors on GPUs, or on the CPU if the argument ``device`` is "cpu"."""

from __future__ import annotations

import os
import signal
import time

import byteps.torch as bps
import torch

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 50_000
"""Number of elements: many partitions of a page."""


def device_of(job: Job) -> torch.device:
    """Return this rank's device after making it current; ranks share GPUs if there are fewer."""
    if job.args["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", job.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def given(job: Job, name: str, round_: int, dtype: str, count: int = COUNT) -> torch.Tensor:
    return values.exact_input(count, job.rank, name, round_, dtype).to(device_of(job))


def demand_sum(
    job: Job, got: torch.Tensor, name: str, round_: int, dtype: str, count: int = COUNT
) -> None:
    assert got.device == device_of(job), got.device
    want = values.exact_sum(count, list(range(job.size)), name, round_, dtype)
    values.demand_exact(got.cpu(), want)


def every_dtype(job: Job) -> None:
    """Sum every element type, in place and not, with one element and with many partitions."""
    bps.init()
    for dtype in values.DTYPES:
        for count in (1, 1023, 1024, 1025, COUNT):
            with job.check(f"{dtype} of {count}"):
                name = f"{dtype}.{count}"
                total = bps.push_pull(given(job, name, 0, dtype, count), average=False, name=name)
                demand_sum(job, total, name, 0, dtype, count)
                tensor = given(job, name, 1, dtype, count)
                bps.push_pull_inplace(tensor, average=False, name=name)
                demand_sum(job, tensor, name, 1, dtype, count)
    bps.shutdown()


def rounds_in_flight(job: Job) -> None:
    """Keep several rounds of several names in flight. The names are declared in one call, and the
    program waits in reverse order."""
    bps.init()
    names = [f"bucket.{i}" for i in range(6)]
    bps.declare(
        [
            bps.TensorDeclaration(
                name=name,
                dtype=torch.float32,
                numel=COUNT,
                average=False,
                device=device_of(job),
            )
            for name in names
        ]
    )
    for repeat in range(3):
        with job.check(f"repeat {repeat}"):
            waiting = []
            for round_ in (2 * repeat, 2 * repeat + 1):
                for priority, name in enumerate(names):
                    tensor = given(job, name, round_, "float32")
                    handle = bps.push_pull_async_inplace(
                        tensor, average=False, name=name, priority=priority
                    )
                    waiting.append((handle, name, round_))
            for handle, name, round_ in reversed(waiting):
                demand_sum(job, bps.synchronize(handle), name, round_, "float32")
    bps.shutdown()


def wire_types(job: Job) -> None:
    """Sum fp32 and fp64 that travel as half types. All values are integers, so none is rounded."""
    bps.init()
    for dtype in ("float32", "float64"):
        for wire in (torch.bfloat16, torch.float16):
            name = f"{dtype} as {wire}"
            with job.check(name):
                for round_ in range(3):
                    tensor = given(job, name, round_, dtype)
                    handle = bps.push_pull_async_inplace(
                        tensor, average=False, name=name, wire_dtype=wire
                    )
                    demand_sum(job, bps.synchronize(handle), name, round_, dtype)
    bps.shutdown()


def wanted_part(job: Job) -> None:
    """Pull another part of the sum on each rank: the rest of its tensor stays unchanged."""
    bps.init()
    with job.check("part"):
        begin, end = job.rank * 1000 + 17, COUNT - job.rank * 999
        tensor = given(job, "part", 0, "float32")
        before = tensor.cpu()
        handle = bps.push_pull_async_inplace(tensor, average=False, name="part", pull=(begin, end))
        after = bps.synchronize(handle).cpu()
        total = values.exact_sum(COUNT, list(range(job.size)), "part", 0, "float32")
        values.demand_exact(after[begin:end], total[begin:end])
        values.demand_exact(after[:begin], before[:begin])
        values.demand_exact(after[end:], before[end:])
    bps.shutdown()


def streams(job: Job) -> None:
    """Values are pushed once a stream has computed them, and another stream uses the sums. The
    program does not wait for the first stream."""
    bps.init()
    device = device_of(job)
    making, using = torch.cuda.Stream(device), torch.cuda.Stream(device)
    slow = torch.randn(2048, 2048, device=device)
    for round_ in range(5):
        with job.check(f"round {round_}"):
            source = given(job, "streamed", round_, "float32")
            tensor = torch.zeros_like(source)
            torch.cuda.synchronize(device)
            with torch.cuda.stream(making):
                for _ in range(30):
                    slow = torch.tanh(slow @ slow)
                tensor.copy_(source)
                handle = bps.push_pull_async_inplace(tensor, average=False, name="streamed")
            with torch.cuda.stream(using):
                doubled = bps.synchronize(handle) * 2
            using.synchronize()
            demand_sum(job, doubled / 2, "streamed", round_, "float32")
    bps.shutdown()


def current_device(job: Job) -> None:
    """Tensors on every GPU are summed while another GPU is current and stays so."""
    bps.init()
    count = torch.cuda.device_count()
    for number in range(count):
        with job.check(f"tensor on {number}"):
            name = f"on.{number}"
            own = given(job, name, 0, "float32")
            torch.cuda.set_device((number + 1) % count)
            tensor = own.to(torch.device("cuda", number))
            bps.push_pull_inplace(tensor, average=False, name=name)
            assert torch.cuda.current_device() == (number + 1) % count
            want = values.exact_sum(COUNT, list(range(job.size)), name, 0, "float32")
            values.demand_exact(tensor.cpu(), want)
    bps.shutdown()


def peer_dies_under_nccl(job: Job) -> None:
    """Rank 1 dies while rank 0's GPU is in an NCCL kernel that never ends."""
    device = device_of(job)
    bps.init()
    torch.distributed.init_process_group("nccl", device_id=device)
    tensor = torch.ones(COUNT, device=device)
    torch.distributed.all_reduce(tensor)
    bps.push_pull_inplace(tensor, average=False, name="together")
    torch.cuda.synchronize(device)
    job.mark("ready")
    if job.rank == 1:
        job.wait_go("die")
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(tensor, async_op=True)  # Rank 1 never joins this collective.
    handle = bps.push_pull_async_inplace(tensor, average=False, name="together")
    job.mark("stuck")
    started = time.monotonic()
    try:
        bps.synchronize(handle)
    except bps.BytePSError as error:
        job.note("failed", f"{time.monotonic() - started:.1f} {error}")
    bps.shutdown()
    job.mark("shut_down")
    # The process must end without torch's exit handlers, because they would wait for the kernel.
    os._exit(0)


def interrupted(job: Job) -> None:
    """Interrupt a synchronize by Ctrl-C, and check that the sum goes on."""
    bps.init()
    tensor = given(job, "late", 0, "float32")
    if job.rank == 1:
        job.wait_go("push")
    handle = bps.push_pull_async_inplace(tensor, average=False, name="late")
    if job.rank == 0:
        # The tensor is declared, so rank 0 waits for rank 1's push.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with job.check("interrupted"):
            try:
                job.mark("waiting")
                bps.synchronize(handle)
            except KeyboardInterrupt:
                job.mark("interrupted")
            else:
                raise AssertionError("synchronize() was not interrupted")
    with job.check("the sum goes on"):
        demand_sum(job, bps.synchronize(handle), "late", 0, "float32")
    bps.shutdown()
