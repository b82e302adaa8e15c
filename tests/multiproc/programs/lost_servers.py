"""Steps, each checked, while servers or ranks are lost; also on emulated hosts."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch
from byteps.torch.members import are_alike

from tests.multiproc.programs import replicas
from tests.multiproc.programs.job import Job
from tests.multiproc.programs.server_optimizer import Pair, fingerprint

LENGTHS = {"large": 200_003, "middle": 40_000, "small": 10}


@functools.cache
def places(length: int) -> torch.Tensor:
    """Return integers that differ by element."""
    return torch.arange(length, dtype=torch.int32) % 4093 * 7


def values_of(rank: int, step: int, length: int) -> torch.Tensor:
    """Return integers whose sums are exact."""
    return ((places(length) + (rank * 977 + step * 53)) % 20_011).to(torch.float32)


def train(job: Job) -> None:
    """Make `steps` steps of concurrent sums, each of at least `pace` seconds.

    Before the steps `holds` it waits for the test's signal.
    """
    bps.init()
    trained = torch.zeros(LENGTHS["middle"])
    longest = 0.0
    for step in range(job.args["steps"]):
        if step in job.args.get("holds", ()):
            job.wait_go(str(step))
        began = time.monotonic()
        sums = {name: values_of(job.rank, step, n) for name, n in LENGTHS.items()}
        handles = [
            bps.push_pull_async_inplace(value, average=False, name=name, priority=i)
            for i, (name, value) in enumerate(sums.items())
        ]
        few = torch.sin(values_of(job.rank, step, LENGTHS["middle"]))
        handles.append(
            bps.push_pull_async_inplace(few, average=True, name="few", wire_dtype="int4")
        )
        for handle in handles:
            bps.synchronize(handle)
        for name, value in sums.items():
            parts = [values_of(rank, step, LENGTHS[name]) for rank in range(job.size)]
            exact = torch.stack(parts).sum(0)
            assert torch.equal(value, exact), f"step {step}: the sum of {name!r} is wrong"
        trained += few
        longest = max(longest, time.monotonic() - began)
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    assert are_alike([trained], "compare"), "workers have parted"
    job.note("longest", str(longest))
    bps.shutdown()


def one_off(job: Job) -> None:
    """Sums with names that are used once, and steps; then a server is lost during more of them."""
    bps.init()
    for i in range(16):
        large = torch.full((1 << 19,), job.rank + float(i))
        bps.push_pull_inplace(large, average=False, name=f"once.{i}")
        wanted = job.size * i + job.size * (job.size - 1) / 2
        assert torch.equal(large, torch.full_like(large, wanted)), f"once.{i}"
    for step in range(job.args["steps"]):
        small = values_of(job.rank, step, LENGTHS["small"])
        for name in ("a", "b", "c"):  # Each tensor is on one of the two servers.
            bps.push_pull_inplace(small, average=False, name=name)
        job.note("done", str(step + 1))

    def all_keep_little() -> bool:
        few = torch.tensor([float(bps.get_metrics()["byteps_worker_kept_bytes"] < 1 << 20)])
        bps.push_pull_inplace(few, name="last")
        return few.item() == 1

    job.wait_until("what all have is not kept", all_keep_little)
    job.mark("trained")
    job.wait_go("on")
    for i in range(4):
        again = torch.full((1 << 19,), job.rank + float(i))
        bps.push_pull_inplace(again, average=False, name=f"again.{i}")
        wanted = job.size * i + job.size * (job.size - 1) / 2
        assert torch.equal(again, torch.full_like(again, wanted)), f"again.{i}"
    bps.shutdown()


def with_optimizer(job: Job) -> None:
    """Make steps of an optimizer whose state is on the servers."""
    bps.init()
    weights = torch.nn.Parameter(torch.ones(100_000))
    optimizer = bps.ServerOptimizer(torch.optim.AdamW([weights], lr=1e-3))
    for step in range(job.args["steps"]):
        weights.grad = torch.full_like(weights, float(step))
        optimizer.step()
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    bps.shutdown()


def with_copies(job: Job) -> None:
    """Like `with_optimizer`, but each step is compared with torch's, bit for bit; half of the steps
    are clipped."""
    bps.init()
    weights = {name: torch.nn.Parameter(torch.ones(n)) for name, n in LENGTHS.items()}
    expected = [torch.nn.Parameter(torch.ones(n)) for n in LENGTHS.values()]
    optimizer = bps.ServerOptimizer(torch.optim.AdamW(weights.values(), lr=1e-3), max_norm=1.0)
    alone = torch.optim.AdamW(expected, lr=1e-3, foreach=False)
    for step in range(job.args["steps"]):
        # The norm is that of a single value, a power of two: 8 is clipped to 1.
        norm = 2.0 ** (-11 if step % 4 < 2 else 3)
        scale = torch.tensor(min(1.0, 1.0 / (norm + 1e-6)))
        for i, (weight, other) in enumerate(zip(weights.values(), expected, strict=True)):
            pattern = torch.zeros(weight.shape)
            if i == step % 3:
                pattern[step % 10] = norm
            weight.grad = pattern * (2 * job.rank / max(job.size - 1, 1))
            other.grad = pattern * scale
        optimizer.step()
        alone.step()
        for (name, weight), other in zip(weights.items(), expected, strict=True):
            assert torch.equal(weight, other), f"step {step}: {name!r} is not what torch makes"
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    bps.shutdown()


# Programs on an emulated host, in a network namespace.


def train_on_host(job: Job) -> None:
    """Run the replicas of replicas.py on the host of the namespace `namespace`."""
    _enter(job)
    replicas.train(job)


def with_copies_on_host(job: Job) -> None:
    """Run the workers of `with_copies` on the host of the namespace `namespace`."""
    _enter(job)
    with_copies(job)


def _enter(job: Job) -> None:
    with Path("/run/netns", job.args["namespace"]).open() as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)  # Also for threads started later.


# A rank or a server is killed in a phase of a speculative step.


STEPS = 5
CLIPPED = 3
"""The clipped, and therefore repeated, step."""
# Phases, and the step in which a process is killed in that phase.
PHASES = {
    "before": 2,  # Before any rank has pushed.
    "pushed": 2,  # Only rank 0 has pushed.
    "answered": 2,  # All ranks have the answer, and no rank has given the verdict.
    "again": CLIPPED,  # The same phase in a step that will be repeated.
    "after": 2,  # Before the next step begins.
}
# Steps that fail on the surviving ranks. If a rank is lost just after the answer of a clipped step,
# servers may have made that step for the others.
FAILS = {"before": {2}, "pushed": {2}, "answered": {3}, "again": {3}, "after": {3}}
FAILS_WITHOUT_A_RANK = {**FAILS, "again": {3, 4}}


def dies(job: Job) -> None:
    """Run a job in which rank 1 kills a server, or itself, in a phase of a step.

    args: ``life``: number of this job, from 0; ``phase``: a key of PHASES, or None: no kill;
    ``server``: its pid, or None for the rank.

    The first job writes the results of non-speculative steps, and a checkpoint after step 1, from
    which later jobs resume. At any time a rank's parameters must equal these results.
    """
    bps.init()
    life, phase = job.args["life"], job.args["phase"]
    if life == 0:
        write_expected(job)
    expected = json.loads((job.folder / f"expected.{job.rank}").read_text())
    tries = Pair(job, "adamw", torch.bfloat16, "tries", max_norm=1e6)
    begin(job, tries, first_life=life == 0)
    with job.check(f"life {life}: step 1"):
        assert fingerprint(tries.parameters) == expected[1]
    fails = FAILS if job.args["server"] else FAILS_WITHOUT_A_RANK
    for step in range(2, STEPS):
        try:
            if phase is not None and step == PHASES[phase]:
                step_and_kill(job, tries, phase)
            else:
                make_step(tries, step)
        except bps.BytePSError as error:
            # All of the rank's parameters must be those of the step before.
            with job.check(f"life {life}: step {step} failed"):
                assert phase is not None and step in fails[phase]
                assert fingerprint(tries.parameters) == expected[step - 1]
            job.note(f"error{life}", str(error))
            break
        with job.check(f"life {life}: step {step}"):
            assert fingerprint(tries.parameters) == expected[step]
    else:
        with job.check(f"life {life}: it lives"):
            assert phase is None
    job.note(f"left{life}", fingerprint(tries.parameters))
    bps.shutdown()


def make_step(pair: Pair, step: int) -> None:
    pair.served.max_norm = 1.0 if step == CLIPPED else 1e6
    pair.step(step)


def write_expected(job: Job) -> None:
    waits = Pair(job, "adamw", torch.bfloat16, "waits", max_norm=1e6, clip="wait")
    expected = []
    for step in range(STEPS):
        make_step(waits, step)
        expected.append(fingerprint(waits.parameters))
    (job.folder / f"expected.{job.rank}").write_text(json.dumps(expected))


def begin(job: Job, pair: Pair, *, first_life: bool) -> None:
    """Make two steps and save a checkpoint (in the first job), or resume from it."""
    checkpoint = job.folder / "checkpoint.pt"
    if not first_life:
        saved = torch.load(checkpoint)
        with torch.no_grad():
            for parameter, other in zip(pair.parameters, saved["parameters"], strict=True):
                parameter.copy_(other)
        pair.served.load_state_dict(saved["state"])
        return
    for step in range(2):
        make_step(pair, step)
    if job.rank == 0:
        state = pair.served.state_dict()
        torch.save(
            {"state": state, "parameters": [p.detach() for p in pair.parameters]}, checkpoint
        )


def step_and_kill(job: Job, pair: Pair, phase: str) -> None:
    life, step = job.args["life"], PHASES[phase]
    bucket: Any = pair.served._buckets[0]

    def meet() -> None:
        """Wait until all ranks are here before the kill, and until a killed server is dead."""
        job.mark(f"here{life}")
        if job.rank == 1:
            other = job.folder / f"mark.here{life}.0"
            job.wait_until("the other rank", other.exists)
            os.kill(job.args["server"] or os.getpid(), signal.SIGKILL)
            job.mark(f"killed{life}")
        elif phase != "pushed":
            sign = "killed" if job.args["server"] else "here"
            job.wait_until("the other rank", (job.folder / f"mark.{sign}{life}.1").exists)

    def around(name: str, *, first: bool = True) -> None:
        call: Callable[..., Any] = getattr(bucket, name)

        def called(*args: Any) -> Any:
            setattr(bucket, name, call)
            if first:
                meet()
            result = call(*args)
            if not first:
                meet()
            return result

        setattr(bucket, name, called)

    if phase == "before":
        meet()
    elif phase == "pushed":
        around("push", first=job.rank == 1)
    elif phase != "after":
        around("finish")
    make_step(pair, step)
    if phase == "after":
        meet()
