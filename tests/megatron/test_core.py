"""DistributedDataParallel and Megatron-FSDP with BytePS, without megatron.training; names,
priorities and placements of buckets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byteps.torch.c10d import reductions
from megatron.core.distributed import dpu_reduce
from megatron.core.distributed.dpu_reduce import bucket_op, sums

from tests.layouts.job import Job

RunJob = Callable[..., Job]

CONFIGS = {
    "sync": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 64},
    "fp32-sums": {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True},
}


def _assert_same(
    steps: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]
) -> None:
    assert len(steps) == len(other)
    for step, twin in zip(steps, other, strict=True):
        for name, gradient in step.items():
            assert torch.equal(gradient, twin[name]), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_several_dtypes_and_experts(run_job: RunJob, config: dict[str, Any]) -> None:
    """Buffers of fp32 and bf16, dense and expert, several buckets, two micro-batches."""
    ours = run_job("core_steps", 2, config={**config, "use_dpu_reduce": True})
    theirs = run_job("core_steps", 2, config=config)
    for rank in range(2):
        _assert_same(ours.result(rank)["gradients"], theirs.result(rank)["gradients"])

    ops = ours.result(0)["ops"]
    assert ops == ours.result(1)["ops"], "the ranks must agree on every operation"
    assert len({op.name for op in ops}) == len(ops)
    kinds = {tuple(op.name.split("/")[i] for i in (1, 5)) for op in ops}
    wide = "fp32" if config.get("grad_reduce_in_fp32") else "bf16"
    assert kinds == {("dense", "fp32-fp32"), ("dense", f"bf16-{wide}"), ("expert", "fp32-fp32")}
    assert [op.placement for op in ops] == list(range(len(ops))), "one small partition a bucket"
    assert {op.group for op in ops} == {(0, 1)}
    assert theirs.result(0)["ops"] == [None] * len(ops)


def test_buffers_may_move_between_steps(run_job: RunJob) -> None:
    config = {"overlap_grad_reduce": True, "bucket_size": 64}
    moved = run_job("core_steps", 2, config={**config, "use_dpu_reduce": True}, offload=True)
    still = run_job("core_steps", 2, config=config)
    _assert_same(moved.result(0)["gradients"], still.result(0)["gradients"])


def test_parameters_gradients_and_optimizer_may_leave_between_steps(
    fork_server: None, tmp_path: Path
) -> None:
    """The tensors' storages are freed and reallocated, as by trainers that generate between
    steps."""

    def run(name: str, **settings: bool) -> list[Any]:
        job = Job(tmp_path / name, "tests.layouts.gpt.offload:train", 2, {"width": 32, **settings})
        job.run()
        return job.results()

    away = run("away", away=True, through_byteps=True)
    still = run("still", away=False, through_byteps=False)
    for moved, other in zip(away, still, strict=True):
        assert moved["checksums"] == other["checksums"]
        assert len(set(moved["checksums"])) == len(moved["checksums"])
        assert moved["held"]["away"] == 0 < moved["held"]["step"] == other["held"]["step"]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_forced_all_reduce(run_job: RunJob, overlap: bool) -> None:
    config = {"overlap_grad_reduce": overlap}
    ours = run_job("core_forced", 2, config={**config, "use_dpu_reduce": True})
    theirs = run_job("core_forced", 2, config=config)
    _assert_same([ours.result(1)], [theirs.result(1)])


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_no_sync_starts_no_sum(run_job: RunJob, overlap: bool) -> None:
    """With no_sync, gradients are sent only in the last micro-batch. With overlap, all sums start
    in the backward pass of that micro-batch, from the second step on. In the first step Megatron
    learns which gradients exist."""
    config = {"overlap_grad_reduce": overlap, "bucket_size": 64}
    job = run_job("core_no_sync", 2, config=config)
    first, second = job.result(0)
    assert [first, second] == job.result(1)
    assert first[:2] == (0, 0)
    assert second[:2] == (0, second[2] if overlap else 0)
    assert first[2] == second[2] >= 3


def test_no_bucket_overtakes_another(run_job: RunJob) -> None:
    """All buckets have the same priority, because the optimizer needs all of their sums."""
    priorities = run_job("core_priorities", 2).result(0)
    assert len(priorities) >= 3
    assert len(set(priorities)) == 1


def test_two_models_of_one_process_have_keys_of_their_own(run_job: RunJob) -> None:
    job = run_job("core_models", 2)
    first, second = job.result(0)
    assert [first, second] == job.result(1)
    assert all("/model0/" in op.name for op in first)
    assert [op.name.replace("/model1/", "/model0/") for op in second] == [op.name for op in first]
    assert min(op.placement for op in second) > max(op.placement for op in first)


def test_a_rank_that_wraps_one_more_model_alone_does_not_change_the_others_names(
    run_job: RunJob,
) -> None:
    """Rank 0 wraps a model of its own, for a group of itself only, before the second common model.
    The names of the common model stay the same."""
    job = run_job("core_one_more", 2, environment={"BYTEPS_OP_TIMEOUT_S": "20"})
    for rank in range(2):
        gradients, ops = job.result(rank)
        assert all(torch.equal(value, torch.full_like(value, 3.0)) for value in gradients)
        assert [(op.name, op.placement) for op in ops] == [
            (op.name, op.placement) for op in job.result(0)[1]
        ]


NODE_FIRST = {"use_dpu_reduce": True, "dpu_reduce_backend": "node-first"}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_node_first_with_several_dtypes_and_experts(
    run_job: RunJob, config: dict[str, Any]
) -> None:
    ours = run_job("core_steps", 4, config={**config, **NODE_FIRST}, per_host=2)
    theirs = run_job("core_steps", 4, config=config)
    for rank in range(4):
        assert all(op.route == "node-first" for op in ours.result(rank)["ops"])
        for step, twin in zip(
            ours.result(rank)["gradients"], theirs.result(rank)["gradients"], strict=True
        ):
            for name, value in step.items():
                half = value.dtype == torch.bfloat16
                torch.testing.assert_close(
                    value, twin[name], rtol=2e-2 if half else 1e-5, atol=2e-2 if half else 1e-6
                )
    for rank in range(1, 4):
        _assert_same(ours.result(rank)["gradients"], ours.result(0)["gradients"])


def test_node_first_buffers_may_move_between_steps(run_job: RunJob) -> None:
    config = {"overlap_grad_reduce": True, "bucket_size": 64, **NODE_FIRST}
    moved = run_job("core_steps", 4, config=config, offload=True, per_host=2)
    still = run_job("core_steps", 4, config=config, per_host=2)
    _assert_same(moved.result(0)["gradients"], still.result(0)["gradients"])


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_node_first_forced_all_reduce(run_job: RunJob, sharded: bool) -> None:
    """Every rank gets the whole bucket, even if it needs only a shard."""
    config = {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded}
    ours = run_job("core_forced", 4, config={**config, **NODE_FIRST}, per_host=2)
    theirs = run_job("core_forced", 4, config=config)
    for rank in range(4):
        for name, value in ours.result(rank).items():
            torch.testing.assert_close(value, theirs.result(rank)[name], rtol=1e-2, atol=1e-2)


def test_inside_one_host_nothing_is_pushed(run_job: RunJob) -> None:
    config = {"overlap_grad_reduce": True, "bucket_size": 64}
    auto = {**config, "use_dpu_reduce": True, "dpu_reduce_backend": "auto"}
    ours = run_job("core_steps", 2, config=auto, per_host=2)
    theirs = run_job("core_steps", 2, config=config)
    _assert_same(ours.result(0)["gradients"], theirs.result(0)["gradients"])
    assert {op.route for op in ours.result(0)["ops"]} == {"collective"}
    assert ours.result(0)["pushed"] == 0
    log = ours.log_of(0).read_text()
    assert "all ranks are on one host" in log and log.count("dpu_reduce: dense gradients") == 1


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_between_hosts_the_way_is_chosen_by_trying(run_job: RunJob, sharded: bool) -> None:
    """Either route may be faster on this machine. All ranks choose the same route, and the sums are
    those of a job without servers."""
    config = {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded}
    auto = {**config, "use_dpu_reduce": True, "dpu_reduce_backend": "auto"}
    ours = run_job("core_forced", 4, config=auto, per_host=2)
    theirs = run_job("core_forced", 4, config=config)
    for rank in range(4):
        for name, value in ours.result(rank).items():
            torch.testing.assert_close(value, theirs.result(rank)[name], rtol=1e-2, atol=1e-2)
    logs = [ours.log_of(rank).read_text() for rank in range(4)]
    assert "dense gradients" in logs[0] and "Gbit/s through servers" in logs[0]
    lines = [re.findall(r"gradient sums: \d+ of \d+ buckets go through", log) for log in logs]
    assert lines[0] and lines == lines[:1] * 4


def test_refusals_where_ddp_is_built(run_job: RunJob) -> None:
    seen = run_job("core_refused", 2).result(0)
    assert "--use-dpu-reduce" in seen["changed"] and "--fake-process-group" in seen["changed"]
    assert "--dpu-optimizer" in seen["model"] and "num-weight-shards=2" in seen["model"]


def test_a_recipe_without_arguments_whose_optimizer_servers_keep(run_job: RunJob) -> None:
    """Settings for ranks that servers replace are off; the model is the same."""
    ours, theirs = (run_job("core_recipe", 2, served=served) for served in (True, False))
    assert theirs.result(0)["config"] == (True, True)
    assert ours.result(0)["config"] == (False, False)
    assert ours.result(0)["form"] == "fully_reshardable"
    for rank in range(2):
        parameters = ours.result(rank)["parameters"]
        _assert_same([parameters], [ours.result(0)["parameters"]])
        for name, value in theirs.result(rank)["parameters"].items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)
    line = (
        "--dpu-optimizer takes the place of --use-distributed-optimizer, --overlap-param-gather "
        "(servers shard the optimizer"
    )
    assert [ours.log_of(rank).read_text().count(line) for rank in range(2)] == [1, 0]


def test_muon_on_the_ranks_and_servers_skip_the_same_steps(
    fork_server: None, run_dir: Path
) -> None:
    """Every second norm is above the threshold."""

    def run(served: bool) -> Job:
        program = "tests.megatron.recipe_programs:core_muon"
        job = Job(run_dir / f"served-{served}", program, 2, {"served": served})
        job.run()
        return job

    ours, theirs = run(True), run(False)
    for rank in range(2):
        ours_of, wanted = ours.result(rank), theirs.result(rank)
        assert ours_of["made"] == wanted["made"] == [True, False, True, False]
        assert ours_of["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        _assert_same([ours_of["parameters"]], [ours.result(0)["parameters"]])
        for name, value in wanted["parameters"].items():
            torch.testing.assert_close(ours_of["parameters"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_a_step_that_is_one_graph_is_summed_after_it(
    fork_server: None, run_dir: Path, overlap: bool, sharded: bool
) -> None:
    """The result is bit-identical to the one without a graph, although replays run none of
    Megatron's Python."""
    config = {
        "overlap_grad_reduce": overlap,
        "use_distributed_optimizer": sharded,
        "bucket_size": 64 if overlap else None,
    }

    def run(graph: bool, config: dict[str, Any]) -> Job:
        program = "tests.megatron.recipe_programs:core_whole_steps"
        settings = {"config": config, "graph": graph}
        job = Job(run_dir / ("graph" if graph else "plain"), program, 2, settings)
        job.run()
        return job

    ours, theirs = run(True, {**config, "use_dpu_reduce": True}), run(False, config)
    for rank in range(2):
        ours_of, other = ours.result(rank), theirs.result(rank)
        assert ours_of["told"] == ["run", "run", "replayed", "replayed"]
        assert ours_of["pushed"] > 0 == other["pushed"]
        for step, (ours_step, twin) in enumerate(
            zip(ours_of["gradients"], other["gradients"], strict=True)
        ):
            assert all(torch.equal(*pair) for pair in zip(ours_step, twin, strict=True)), step


# Megatron-FSDP with hybrid sharding: sums over replicas go through servers.


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="in-place"),
        # Shards are copied before they are sent, and sums are copied back.
        pytest.param({"megatron_fsdp_grad_comm_dtype": torch.bfloat16}, id="copied"),
    ],
)
def test_replicas_sum_their_shards_through_servers(
    fork_server: None, run_dir: Path, config: dict[str, Any]
) -> None:
    """With two replicas the bits equal those of an all-reduce."""

    def run(name: str, **more: object) -> Job:
        program = "tests.megatron.recipe_programs:hybrid"
        job = Job(run_dir / name, program, 4, {"config": {**config, **more}}, per_host=2)
        job.run()
        return job

    theirs = run("all-reduce")
    ours = run("byteps", use_dpu_reduce=True, dpu_reduce_backend="flat")
    for rank in range(4):
        ours_of, other = ours.result(rank), theirs.result(rank)
        assert ours_of["pushed"] > 0 == other["pushed"]
        for ours_step, twin in zip(ours_of["gradients"], other["gradients"], strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours_step, twin, strict=True))


def test_what_a_cuda_graph_records_stays_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Reductions(reductions.Reductions):
        def __init__(self) -> None:
            self._sums = {}

        def takes(self, tensor: object) -> bool:
            return True

        def start(self, tensor: object, **_: object) -> Any:
            calls.append("servers")
            return object()

    monkeypatch.setattr(sums, "_reductions", lambda config, group: Reductions())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: calls.append("NCCL"))
    config: Any = SimpleNamespace(use_dpu_reduce=True)
    reduction = sums.OuterReduction(config, None)  # type: ignore[arg-type] # not looked at
    gradient: Any = SimpleNamespace(is_cuda=True, dtype=None, device=None, numel=lambda: 1)
    for records in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda it=records: it)
        reduction.all_reduce(gradient, torch.distributed.ReduceOp.SUM)
    assert calls == ["servers", "NCCL"]


# Names, priorities and placements of buckets are pure functions of their identity.


def _name(**changed: Any) -> str:
    identity: dict[str, Any] = {
        "kind": "dense",
        "group": (0, 1),
        "model": 0,
        "chunk": 0,
        "param_dtype": torch.bfloat16,
        "grad_dtype": torch.float32,
        "bucket_id": 3,
    }
    return dpu_reduce.bucket_name(**{**identity, **changed})


def test_name() -> None:
    assert _name() == ("dpu_reduce/dense/dp0x2-9fc81a7857d8/model0/chunk0/bf16-fp32/bucket3")
    assert _name(group=(1, 0)) == _name()


def test_every_part_of_the_identity_counts() -> None:
    kinds, models, chunks = ("dense", "expert"), (0, 1), (0, 1, 10)
    groups = ((0,), (0, 1), (0, 2), (0, 1, 2), (1, 2), (10, 11))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64)
    buckets, buffers = (0, 1, 10, 11), (0, 1, 10)
    names = {
        _name(
            kind=kind,
            group=group,
            model=model,
            chunk=chunk,
            param_dtype=param,
            grad_dtype=grad,
            bucket_id=bucket,
            buffer=buffer,
        )
        for kind, group, model, chunk, param, grad, bucket, buffer in itertools.product(
            kinds, groups, models, chunks, dtypes, dtypes, buckets, buffers
        )
    }
    assert len(names) == 2 * 6 * 2 * 3 * 5 * 5 * 4 * 3


def test_an_unusual_dtype_has_a_name() -> None:
    assert "/int32-fp32/" in _name(param_dtype=torch.int32)


def test_what_is_built_for_other_groups_changes_neither_names_nor_placements() -> None:
    """Only the members of a group know the group. The models that they wrap for it do not change
    another group's names and placements, even if it has the same lowest rank."""
    everywhere, here = bucket_op.Named(), bucket_op.Named()
    group, alone = (0, 1), (0,)
    seen = []
    for named in (everywhere, here):
        first = named.next_model("dense", group, 0), named.next_placement(group, 7)
        if named is here:
            assert named.next_model("dense", alone, 0) == 0
            assert named.next_placement(alone, 3) == 0
        seen.append((first, named.next_model("dense", group, 0), named.next_placement(group, 5)))
    assert seen[0] == seen[1] == ((0, 0), 1, 7)
    assert _name(group=alone) != _name(group=group)
