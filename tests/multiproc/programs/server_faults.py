"""A rank or a server is killed at a phase of a step that servers try."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job
from tests.multiproc.programs.server_optimizer import Pair, fingerprint

STEPS = 5
CLIPPED = 3
"""The step that is clipped, and so made again."""
# The phases, and the step in which somebody is killed there.
PHASES = {
    "before": 2,  # anything was pushed
    "pushed": 2,  # by rank 0 alone
    "answered": 2,  # on all ranks, before one says what becomes of the step
    "again": CLIPPED,  # the same, of a step that will be made again
    "after": 2,  # before the next step
}
# In which step the others fail: with a rank that is lost just after it was told of a clipped step,
# the servers may have made that step for the others.
FAILS = {"before": {2}, "pushed": {2}, "answered": {3}, "again": {3}, "after": {3}}
FAILS_WITHOUT_A_RANK = {**FAILS, "again": {3, 4}}


def dies(job: Job) -> None:
    """One life of a job in which rank 1 kills a server, or itself, at a phase of a step.

    args: ``life``; ``phase``: of PHASES, or None: nobody dies; ``server``: its pid, or None for the
    rank.

    The first life writes what steps that wait give, and a checkpoint after step 1, which the others
    resume from. Whatever a rank has at any moment is what it would have had.
    """
    bps.init()
    life, phase = job.args["life"], job.args["phase"]
    if life == 0:
        write_expected(job)
    expected = json.loads((job.folder / f"expected.{job.rank}").read_text())
    tries = Pair(job, "adamw", torch.bfloat16, "tries", max_norm=1e6)
    begin(job, tries, first_life=life == 0)
    with job.check(f"life {life}: step 1"):
        assert fingerprint(tries.mine) == expected[1]
    fails = FAILS if job.args["server"] else FAILS_WITHOUT_A_RANK
    for step in range(2, STEPS):
        try:
            if phase is not None and step == PHASES[phase]:
                step_and_kill(job, tries, phase)
            else:
                make_step(tries, step)
        except bps.BytePSError as error:
            # All of its parameters are those of the step before.
            with job.check(f"life {life}: step {step} failed"):
                assert phase is not None and step in fails[phase]
                assert fingerprint(tries.mine) == expected[step - 1]
            job.note(f"error{life}", str(error))
            break
        with job.check(f"life {life}: step {step}"):
            assert fingerprint(tries.mine) == expected[step]
    else:
        with job.check(f"life {life}: it lives"):
            assert phase is None
    job.note(f"left{life}", fingerprint(tries.mine))
    bps.shutdown()


def make_step(pair: Pair, step: int) -> None:
    pair.served.max_norm = 1.0 if step == CLIPPED else 1e6
    pair.step(step)


def write_expected(job: Job) -> None:
    waits = Pair(job, "adamw", torch.bfloat16, "waits", max_norm=1e6, clip="wait")
    expected = []
    for step in range(STEPS):
        make_step(waits, step)
        expected.append(fingerprint(waits.mine))
    (job.folder / f"expected.{job.rank}").write_text(json.dumps(expected))


def begin(job: Job, pair: Pair, *, first_life: bool) -> None:
    """Two steps and a checkpoint, or what was saved."""
    checkpoint = job.folder / "checkpoint.pt"
    if not first_life:
        saved = torch.load(checkpoint)
        with torch.no_grad():
            for mine, other in zip(pair.mine, saved["parameters"], strict=True):
                mine.copy_(other)
        pair.served.load_state_dict(saved["state"])
        return
    for step in range(2):
        make_step(pair, step)
    if job.rank == 0:
        state = pair.served.state_dict()
        torch.save({"state": state, "parameters": [p.detach() for p in pair.mine]}, checkpoint)


def step_and_kill(job: Job, pair: Pair, phase: str) -> None:
    life, step = job.args["life"], PHASES[phase]
    bucket: Any = pair.served._buckets[0]

    def meet() -> None:
        """All ranks are here before somebody dies, and none goes on before a server has died."""
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
