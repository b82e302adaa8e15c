"""Replicas whose parameters servers keep and update: each step is checked, as sums are."""

from __future__ import annotations

import byteps.torch as bps
import torch
from byteps.torch import members
from byteps.torch.server_rule import Rule, Step
from byteps.torch.server_tensor import ServerTensor

from tests.multiproc.programs.job import Job
from tests.multiproc.programs.replicas import LENGTH, Replica, play, values_of

CLIPPED = 0.5


class Served(Replica):
    """Plain SGD of rate 1, so a step says of which gradients it was made. Steps are made at once,
    after the norm, tried and kept, or tried and clipped, one after the other."""

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
        asked = Step(step + 1, scale, False, [(1.0, 0.0)])
        landed = self.update(step, sent, asked)
        self.may_die("answered", step)
        missing = members.take_missing()
        self.check_sum((self.parameters - landed) / scale, step, missing)
        self.parameters = landed
        if missing:
            self.log.append({"step": step, "missing": sorted(missing)})

    def update(self, step: int, sent: torch.Tensor, asked: Step) -> torch.Tensor:
        landed, tensor = torch.empty(LENGTH), self.tensor
        if step % 4 == 1:
            handle = tensor.push_norm(sent)
        elif step % 4 == 0 and step % 8:
            handle = tensor.push_step(sent, landed, asked)
        else:
            handle = tensor.push_try(sent, landed, asked._replace(scale=1.0))
        self.may_die("pushed", step)
        tensor.wait(handle)
        self.may_die("told", step)
        if asked.scale != 1.0:
            tensor.wait(tensor.step(landed, asked))
        elif step % 4 != 0 or step % 8 == 0:
            tensor.keep()
        return landed

    def give(self, choice: members.Choice, step: int) -> None:
        self.tensor.settle()
        self.give_facts(choice, step)

    def join(self) -> int:
        view = members.join()
        step = self.take_facts(view.donor(self.number), f"join/{view.lives[self.number]}")
        self.parameters = self.tensor.read(0)
        self.compare()
        return step


def train(job: Job) -> None:
    play(job, Served)
