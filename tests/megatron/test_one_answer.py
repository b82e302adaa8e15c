"""The calculator, the check of arguments and a job's start print the same answer."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace

import pytest
import torch
from byteps import sizing
from byteps.routing import Network
from megatron.core.distributed.dpu_reduce import check, job, parameters, plan

from tests.megatron.made_up import MadeUp
from tests.megatron.test_check import RECIPE, SHARDED


def answers(text: str) -> list[str]:
    """Return the lines with the answer of a program, without its prefix."""
    printed = re.findall(r"^(?:Answer|dpu_reduce): ((?:in \d|no gradient).*)$", text, re.M)
    assert printed, text
    return printed


def told_at_start(hosts: int, servers: Network) -> str:
    """Return the output of a job of this layout when its model is wrapped."""
    made_up = MadeUp(ranks=2 * hosts, per_host=2, groups=1, elements=64 * hosts, instances=1)
    model = made_up.model()
    model.ddp_config.overlap_param_gather = True
    (buffer,) = model.buffers
    buffer.param_dtype = buffer.grad_dtype = torch.bfloat16
    for bucket in buffer.buckets:
        bucket.grad_data = bucket.grad_data.to(torch.bfloat16)
    with made_up.joined(), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert job._job is not None
        job._job = replace(job._job, network=servers)
        plan.register(model)
    return printed.getvalue()


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_three_programs_give_one_answer(hosts: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The answers are the same with no spare machine, half as many as hosts, and as many."""
    own = ["--hosts", str(hosts), "--gpus", "2", "--link-gbps", "10"]
    words = (*RECIPE, *SHARDED)
    plain = parameters.parse(words, world=2 * hosts)
    using = parameters.parse((*words, "--use-dpu-reduce"), world=2 * hosts)
    for spare in (0, hosts // 2, hosts):
        machines = check.Machines(hosts=hosts, gpus=2, link_gbps=10, spare=spare)
        answer = answers(check.render(check.judge(plain, machines), machines))[-1:]
        model = ["--parameters", "419M", "--optimizer", "ranks", "--machines", str(spare)]
        assert sizing.main([*model, *own]) == 0
        assert answers(capsys.readouterr().out) == answer
        assert ("--dpu-preset own-hosts" in answer[0]) == (hosts > 1 and spare == 0)
        running = answers(check.render(check.judge(using, machines), machines))[-1:]
        assert answers(told_at_start(hosts, machines.network)) == running


def test_fast_nics_stay_with_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    """For eight hosts with eight GPUs and NICs of 400 Gbit/s, README and both programs
    advise NCCL."""
    own = ["--hosts", "8", "--gpus", "8", "--link-gbps", "400", "--nics", "8"]
    for transport in ("tcp", "rdma"):
        check.main([*own, "--transport", transport, "--", *RECIPE, *SHARDED])
        (answer,) = answers(capsys.readouterr().out)
        model = ["--parameters", "419M", "--optimizer", "ranks", "--machines", "0"]
        assert sizing.main([*model, *own, "--transport", transport]) == 0
        assert answers(capsys.readouterr().out) == [answer] and "--dpu" not in answer
