"""Replicas of one worker each, which sum or update parameters on servers, and check each step. Some
replicas die and come back."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import byteps.torch as bps
import torch
from byteps.torch import c_lib, members, session
from byteps.torch.members import are_alike
from byteps.torch.server_tensor import Rule, ServerTensor, Step

from tests.multiproc.programs.job import Job

LENGTH = 300_000
"""Number of elements: several partitions on several servers."""


@functools.cache
def places() -> torch.Tensor:
    """Return integers that differ by element."""
    return torch.arange(LENGTH, dtype=torch.int32) % 4093 * 7


def values_of(replica: int, life: int, step: int) -> torch.Tensor:
    """Return integers whose sums are exact."""
    offset = replica * 977 + life * 131 + step * 53
    return ((places() + offset) % 20_011).to(torch.float32)


class Replica:
    """A replica, from its start to its end. It may have to kill itself in a phase of a step."""

    def __init__(self, job: Job) -> None:
        self.job, self.number, self.count = job, session.replica(), session.replicas()
        self.life = int(job.args.get("life", 1))
        self.parameters = torch.zeros(LENGTH)
        self.lives = dict.fromkeys(range(self.count), 1)
        self.log: list[dict[str, object]] = []

    def may_die(self, phase: str, step: int) -> None:
        if self.job.args.get("dies") in ([phase, step], [phase, None]):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job.args.get("stands_still") == [phase, step]:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.job.args.get("sleeps", [])[:2] == [phase, step]:
            self.sleep(self.job.args["sleeps"][2])

    def sleep(self, seconds: float) -> None:
        """Push nothing for this long. Ends early, by an error, once the replica is removed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            c_lib.check()
            time.sleep(0.05)

    def run(self) -> None:
        step = self.join() if members.is_late() else 0
        while step < self.job.args["steps"]:
            began = time.monotonic()
            self.step(step)
            self.log.append({"step": step, "seconds": time.monotonic() - began})
            step += 1
            self.control(step)
            self.job.note(f"done.{self.number}", str(step))
            time.sleep(self.job.args.get("pace", 0))

    def step(self, step: int) -> None:
        self.may_die("before", step)
        members.take_missing()
        total = values_of(self.number, self.life, step)
        handle = bps.push_pull_async_inplace(total, average=False, name="gradients")
        self.may_die("pushed", step)
        bps.synchronize(handle)
        self.may_die("answered", step)
        missing = members.take_missing()
        self.check_sum(total, step, missing)
        self.parameters += total
        if missing:
            self.log.append({"step": step, "missing": sorted(missing)})

    def check_sum(self, total: torch.Tensor, step: int, missing: set[int]) -> None:
        """Check that each value is the scaled sum over all replicas except some of `missing`."""
        given = {r: values_of(r, life, step) for r, life in self.lives.items()}
        wrong, named = torch.ones(LENGTH, dtype=torch.bool), set()
        for size in range(len(missing) + 1):
            for without in itertools.combinations(sorted(missing), size):
                there = [r for r in range(self.count) if r not in without]
                exact = torch.stack([given[r].double() for r in there]).sum(0)
                right = total == (exact * self.count / len(there)).float()
                if bool((wrong & right).any()):
                    named |= set(without)
                wrong &= ~right
        assert not wrong.any(), f"step {step}: {int(wrong.sum())} values are of no list"
        assert named == missing, f"step {step}: {missing} were named, {named} are missing"

    def control(self, step: int) -> None:
        self.may_die("control", step)
        leaves = self.job.args.get("leaves") == step
        choice = members.choose("control", None, leaves=leaves)
        if any(choice.leaving):
            assert choice.joiner < 0
            self.log.append({"step": step, "leaving": list(choice.leaving)})
        if leaves:
            sys.exit(session.leave(f"it was told to end after step {step}"))
        if choice.joiner < 0:
            return
        self.may_die("admit", step)
        bps.push_pull_inplace(torch.zeros(1), average=False, name="rest")
        view = members.admit(choice.joiner, choice.ready_epoch, asks=True)
        if view is not None and view.donor(choice.joiner) == self.number:
            self.may_die("give", step)
            self.give(choice, step)
        if view is not None:
            self.lives[choice.joiner] += 1
        self.compare()
        self.log.append({"step": step, "joined": view is not None})

    def give(self, choice: members.Choice, step: int) -> None:
        members.give_tensors(
            [self.parameters],
            to=choice.joiner,
            rank=bps.rank(),
            name=f"join/{choice.ready_epoch}/state",
        )
        self.give_facts(choice, step)

    def give_facts(self, choice: members.Choice, step: int) -> None:
        lives = [self.lives[replica] for replica in range(self.count)]
        facts = {"step": step, "lives": lives, "rounds": members.rounds()}
        name = f"join/{choice.ready_epoch}"
        members.give_facts(facts, to=choice.joiner, rank=bps.rank(), name=name)

    def join(self) -> int:
        self.may_die("ready", 0)
        view = members.join()
        giver, name = view.donor(self.number), f"join/{view.ready_epochs[self.number]}"
        members.take_tensors([self.parameters], giver=giver, rank=bps.rank(), name=f"{name}/state")
        self.may_die("take", 0)
        step = self.take_facts(giver, name)
        self.compare()
        return step

    def take_facts(self, giver: int, name: str) -> int:
        """Take over the donor's facts. Return the step after which this replica joins."""
        facts = members.take_facts(giver=giver, rank=bps.rank(), name=name)
        self.lives = dict(enumerate(facts["lives"]))
        self.lives[self.number] += 1
        self.life = self.lives[self.number]
        members.set_rounds(facts["rounds"])
        return int(facts["step"])

    def compare(self) -> None:
        assert are_alike([self.parameters], "compare"), "replicas have parted"


def train(job: Job) -> None:
    play(job, Replica)


def play(job: Job, make: Callable[[Job], Replica]) -> None:
    """Run a replica. If it fails, raise its error, so that other replicas learn of its loss."""
    bps.init()
    replica = make(job)
    try:
        replica.run()
        replica.compare()
    finally:
        job.note(f"log.{replica.number}.{replica.life}", json.dumps(replica.log))
    bps.shutdown()


# Replicas whose parameters servers keep and update: each step is checked like a sum.


CLIPPED = 0.5


class Served(Replica):
    """Plain SGD of rate 1, so that a step shows its gradients. Steps are made at once, after the
    norm, speculative and kept, or speculative and clipped, in rotation."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        declaration = bps.TensorDeclaration(
            name="parameters",
            dtype=torch.float32,
            numel=LENGTH,
            average=False,
            device=torch.device("cpu"),
        )
        rule = Rule(is_adamw=False, groups=[(0.0, 0.0, 0.0, False)])
        self.tensor = ServerTensor(declaration, rule, [(LENGTH, 0, True)], speculative=True)
        if members.is_late():
            return
        if self.number == 0:
            self.tensor.load(0, self.parameters)
        bps.push_pull_inplace(torch.zeros(1), average=False, name="loaded")

    def step(self, step: int) -> None:
        self.may_die("before", step)
        members.take_missing()
        sent = values_of(self.number, self.life, step)
        scale = CLIPPED if step % 2 else 1.0
        update_step = Step(step + 1, scale, False, [(1.0, 0.0)])
        landed = self.update(step, sent, update_step)
        self.may_die("answered", step)
        missing = members.take_missing()
        self.check_sum((self.parameters - landed) / scale, step, missing)
        self.parameters = landed
        if missing:
            self.log.append({"step": step, "missing": sorted(missing)})

    def update(self, step: int, sent: torch.Tensor, update_step: Step) -> torch.Tensor:
        landed, tensor = torch.empty(LENGTH), self.tensor
        if step % 4 == 1:
            handle = tensor.push_norm(sent)
        elif step % 4 == 0 and step % 8:
            handle = tensor.push_step(sent, landed, update_step)
        else:
            handle = tensor.push_try(sent, landed, update_step._replace(scale=1.0))
        self.may_die("pushed", step)
        tensor.wait(handle)
        self.may_die("told", step)
        if update_step.scale != 1.0:
            tensor.wait(tensor.step(landed, update_step))
        elif step % 4 != 0 or step % 8 == 0:
            tensor.keep()
        return landed

    def give(self, choice: members.Choice, step: int) -> None:
        self.tensor.settle()
        self.give_facts(choice, step)

    def join(self) -> int:
        view = members.join()
        step = self.take_facts(view.donor(self.number), f"join/{view.ready_epochs[self.number]}")
        self.parameters = self.tensor.read(0)
        self.compare()
        return step


def train_served(job: Job) -> None:
    play(job, Served)
