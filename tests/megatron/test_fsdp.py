"""Megatron-FSDP with hybrid sharding: what replicas reduce goes through servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts.job import Job


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="in-place"),
        # Shards are copied, and the sums back.
        pytest.param({"megatron_fsdp_grad_comm_dtype": torch.bfloat16}, id="copied"),
    ],
)
def test_replicas_sum_their_shards_through_servers(
    fork_server: None, run_dir: Path, config: dict[str, Any]
) -> None:
    """To the same bits as by an all-reduce: there are two of them."""

    def run(name: str, **more: object) -> Job:
        program = "tests.megatron.fsdp_programs:hybrid"
        job = Job(run_dir / name, program, 4, {"config": {**config, **more}}, per_host=2)
        job.run()
        return job

    theirs = run("all-reduce")
    ours = run("byteps", use_dpu_reduce=True, dpu_reduce_route="flat")
    for rank in range(4):
        one, other = ours.result(rank), theirs.result(rank)
        assert one["pushed"] > 0 == other["pushed"]
        for mine, twin in zip(one["gradients"], other["gradients"], strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, twin, strict=True))
