"""Megatron-FSDP with hybrid sharding: what replicas reduce goes through servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byteps.torch.c10d import reductions
from megatron.core.distributed.dpu_reduce import outer_sums

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


def test_what_a_cuda_graph_records_stays_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Reductions(reductions.Reductions):
        def __init__(self) -> None:
            self._sums = {}

        def takes(self, tensor: object) -> bool:
            return True

        def start(self, tensor: object, *, average: bool, priority: int = 0) -> Any:
            calls.append("servers")
            return object()

    monkeypatch.setattr(outer_sums, "_reductions", lambda config, group: Reductions())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: calls.append("NCCL"))
    config: Any = SimpleNamespace(use_dpu_reduce=True)
    reduction = outer_sums.OuterReduction(config, None)  # type: ignore[arg-type] # not looked at
    gradient: Any = SimpleNamespace(is_cuda=True, dtype=None, device=None, numel=lambda: 1)
    for records in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda it=records: it)
        reduction.all_reduce(gradient, torch.distributed.ReduceOp.SUM)
    assert calls == ["servers", "NCCL"]
