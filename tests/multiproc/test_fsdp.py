"""FSDP2 in few bits: reduce-scatters through the servers, and all-gathers in 8 bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from byteps.torch import fsdp
from byteps.torch.session import BytePSError
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.multiproc.cluster import RUN_S, Cluster, Spawned, clean_environment
from tests.multiproc.endings import lose

ENV = {
    "BYTEPS_C10D_BACKEND": "flat",
    "BYTEPS_C10D_MIN_BYTES": "1",
    "BYTEPS_START_TIMEOUT_S": "100",
}
NODE_FIRST = {**ENV, "BYTEPS_C10D_BACKEND": "node-first"}

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

os.environ["BYTEPS_HOST_ID"] = "host-" + os.environ["RANK"]  # an emulated one each
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
whole = [p.full_tensor().detach().double() for p in model.parameters()]
total = sum(p.sum().item() for p in whole)
# One write: lines of two ranks share a pipe.
print(f"sum {total}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_bits_of_gloo(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=ENV).run("fsdp:exact", per_host=1)


@pytest.mark.parametrize(
    ("env", "servers"),
    [
        pytest.param(ENV, 3, id="flat"),  # servers that are dealt to no host
        pytest.param(NODE_FIRST, 4, id="node-first"),
    ],
)
def test_few_bits(make_cluster: Callable[..., Cluster], env: dict[str, str], servers: int) -> None:
    make_cluster(workers=4, servers=servers, env=env).run("fsdp:few_bits", per_host=2)


def test_parameters_in_few_bits(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("fsdp:gathered", per_host=1)


def test_a_lost_process_is_named(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env={**ENV, "BYTEPS_PEER_TIMEOUT_S": "3"})
    cluster.start("fsdp:loop")
    cluster.wait_mark("looping", range(2))
    for worker in lose(cluster, "server"):
        assert worker.status == 1, f"{worker.title}: exit status {worker.status}"
        assert re.search(r"BytePSError: .*server", worker.text), worker.text


def test_a_script_that_knows_nothing(run_dir: Path, warm_python: str) -> None:
    """Environment variables alone send the script's sums through servers, which start with the job.
    The script learns nearly the same as over gloo. Rank 0 reports the types in which gradients and
    parameters travel, or that gradients do not use the servers."""
    script = run_dir / "script.py"
    script.write_text(SCRIPT)
    sums = {}
    for name, variables in {
        "gloo": {"BYTEPS_C10D": "1"},
        "ours": {
            "BYTEPS_C10D": "1",
            "BYTEPS_C10D_BACKEND": "flat",
            "BYTEPS_FSDP_DTYPES": "int8,int8",
        },
    }.items():
        env = {**clean_environment(run_dir), **variables, "PYTHON_EXEC": warm_python}
        del env["BYTEPS_SECRET"]
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = Spawned(name, [warm_python, *words, str(script)], env, run_dir)
        assert job.wait(RUN_S) == 0, job.text
        printed_sums = re.findall(r"^sum (\S+)$", job.text, re.MULTILINE)
        assert len(set(printed_sums)) == 1, job.text
        sums[name] = float(printed_sums[0])
        for line in (
            "reduce-scatters of float32, sent as int8 over 2 ranks on 2 host(s): BytePS flat",
            "all-gathers of float32, sent as int8 over 2 ranks on 2 host(s): NCCL or gloo (in 0.25",
        ):
            assert job.text.count(line) == (name == "ours"), job.text
        advice = job.text.count("set BYTEPS_FSDP_DTYPES on all hosts")
        assert advice == (name == "gloo"), job.text
    assert sums["ours"] != sums["gloo"]
    assert sums["ours"] == pytest.approx(sums["gloo"], abs=0.05)


def test_a_torch_without_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    version = re.escape(torch.__version__)
    with pytest.raises(BytePSError, match=rf"torch {version} has no .*set_custom_reduce_scatter"):
        fsdp.apply(nn.Linear(2, 2))


def test_a_model_that_is_not_sharded_is_named() -> None:
    with pytest.raises(ValueError, match="call fully_shard on its modules"):
        fsdp.apply(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'int3' is no type"):
        fsdp.apply(nn.Linear(2, 2), wire_dtype="int3")
