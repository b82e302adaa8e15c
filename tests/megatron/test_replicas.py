"""Jobs of replicas, which meet only at the servers, train the same as a single job of as many
ranks."""

from __future__ import annotations

import gc
import weakref
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.dpu_reduce import plan, replica_refusals
from megatron.core.transformer.transformer_config import TransformerConfig

from bench.kit.processes import LaunchError
from bench.replicas import run as bench
from scripts import prepare_data

TINY = (
    *("--layers", "2", "--hidden", "128", "--batch", "2", "--sequence", "64"),
    *("--timeout", "400", "--max-bytes", "200000"),
)
TWO_BY_TWO = ("--replicas", "2", "--ranks", "2")
MOE = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--moe-token-dispatcher-type", "alltoall", "--use-distributed-optimizer"),
    *("--moe-router-load-balancing-type", "seq_aux_loss"),
)
QUANTILES = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "quantile_balancing", "--disable-bias-linear"),
)
EACH_STEP = (1, 0)
LAYOUTS = {
    "sharded": ((), ("--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16")),
    "tensor": (("--model-ranks", "2"), ("--tensor-model-parallel-size", "2")),
    "pipeline": (("--model-ranks", "2"), ("--pipeline-model-parallel-size", "2")),
    "experts": ((), MOE),
    "tokens": ((), ("--calculate-per-token-loss", "--use-distributed-optimizer")),
    "averages": ((), ("--use-distributed-optimizer", "--ddp-average-in-collective")),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data.prepare([], tmp_path_factory.mktemp("text"), 200_000).prefix


@pytest.fixture
def prefix(text: Path, warm_ranks: None) -> Path:
    """The text for a training whose ranks are forked."""
    return text


def options_of(*words: str, megatron: tuple[str, ...] = ()) -> Namespace:
    return bench.parse([*TINY, *words, "--", *megatron])


def assert_same(alone: dict[str, Any], other: dict[str, Any]) -> None:
    assert alone["losses"] == other["losses"]
    assert alone["checksums"] == other["checksums"]
    assert len(alone["checksums"]) == 1


def test_two_replicas_of_a_rank_are_a_job_of_two(prefix: Path) -> None:
    """The two are equal even if routers are trained by more than gradients."""
    options = options_of("--replicas", "2", "--steps", "4", megatron=QUANTILES)
    assert_same(bench.train(options, prefix, EACH_STEP), bench.train(options, prefix, None))


SERVERS = {
    "fp32": (),
    "bf16": ("--bf16", "--overlap-grad-reduce", "--clip-grad", "0.2"),
    "counts zeros": ("--bf16", "--log-num-zeros-in-grad"),
    "unclipped": ("--clip-grad", "0"),
    "int8": ("--bf16", "--dpu-reduce-wire-dtype", "int8"),
    "fp16": ("--fp16", "--initial-loss-scale", "4294967296"),
}
"""Arguments by case, with the optimizer on the servers. The scale of fp16 is too large, so steps
are skipped."""


@pytest.mark.thorough
@pytest.mark.parametrize("how", SERVERS)
def test_two_replicas_of_a_rank_are_a_job_of_two_with_the_optimizer_on_servers(
    prefix: Path, how: str
) -> None:
    options = options_of(
        "--replicas", "2", "--steps", "6", megatron=("--dpu-optimizer", *SERVERS[how])
    )
    alone = bench.train(options, prefix, None)
    assert_same(bench.train(options, prefix, EACH_STEP), alone)
    assert alone["losses"][0] != alone["losses"][-1]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["sharded", "tensor", "pipeline", "experts", "tokens"])
def test_layouts_with_the_optimizer_on_servers(prefix: Path, layout: str) -> None:
    """A recipe's sharding over ranks becomes sharding over servers."""
    words, megatron = LAYOUTS[layout]
    options = options_of(
        *TWO_BY_TWO, "--steps", "6", *words, megatron=("--dpu-optimizer", *megatron)
    )
    alone, replicas = bench.train(options, prefix, None), bench.train(options, prefix, EACH_STEP)
    assert len(replicas["checksums"]) == 1, "replicas have parted"
    assert replicas["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    if "--model-ranks" in words:
        assert_same(alone, replicas)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_checkpoints_of_servers(prefix: Path, tmp_path: Path, ranks: str) -> None:
    """One replica saves the state of the servers. All replicas, and a plain job, resume from it."""
    keep = ("--save", str(tmp_path), "--save-interval", "4", "--ckpt-format", "torch_dist")
    served = ("--dpu-optimizer", "--lr-decay-iters", "8")
    words = ("--replicas", "2", "--ranks", ranks, "--steps", "8")
    whole = bench.train(options_of(*words, megatron=(*keep, *served)), prefix, EACH_STEP)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    options = options_of(*words, megatron=("--load", str(tmp_path), *served))
    resumed = bench.train(options, prefix, EACH_STEP)
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["checksums"] == whole["checksums"]
    plain = bench.train(options, prefix, None)
    if ranks == "1":
        assert plain["losses"] == whole["losses"][4:]
        assert plain["checksums"] == whole["checksums"]
    else:
        assert plain["losses"] == pytest.approx(whole["losses"][4:], rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(prefix: Path, layout: str) -> None:
    """A sum of two values does not depend on their order; with more values, rounding differs."""
    words, megatron = LAYOUTS[layout]
    options = options_of(*TWO_BY_TWO, "--steps", "6", *words, megatron=megatron)
    alone, replicas = bench.train(options, prefix, None), bench.train(options, prefix, EACH_STEP)
    assert len(replicas["checksums"]) == 1, "replicas have parted"
    assert replicas["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    if "--model-ranks" in words:
        assert_same(alone, replicas)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 3])
def test_checkpoints(prefix: Path, tmp_path: Path, every: int) -> None:
    """A replica saves a checkpoint. All replicas load it, and continue as if they were
    uninterrupted. So does a plain job."""
    keep = (
        "--save",
        str(tmp_path / "saved"),
        "--save-interval",
        "4",
        "--ckpt-format",
        "torch_dist",
    )
    sharded = ("--use-distributed-optimizer", "--lr-decay-iters", "8")
    whole = bench.train(
        options_of("--replicas", "2", "--steps", "8", megatron=(*keep, *sharded)),
        prefix,
        (every, 0),
    )
    assert (tmp_path / "saved" / "iter_0000004").is_dir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    load = ("--load", str(tmp_path / "saved"))
    options = options_of("--replicas", "2", "--steps", "8", megatron=(*load, *sharded))
    resumed = bench.train(options, prefix, (every, 0))
    if every == 1:
        assert resumed["losses"] == whole["losses"][4:]
        assert resumed["checksums"] == whole["checksums"]
    else:  # The other replica continues with the first one's moments.
        assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=2e-2)
    plain = bench.train(options, prefix, None)["losses"]
    if every == 1:
        assert plain == pytest.approx(whole["losses"][4:], rel=1e-4)
    else:  # The plain job begins with the same model, and sums where the replicas step alone.
        assert plain[0] == pytest.approx(whole["losses"][4], rel=2e-2)


@pytest.mark.thorough
def test_a_checkpoint_of_a_plain_job(prefix: Path, tmp_path: Path) -> None:
    keep = ("--save", str(tmp_path), "--save-interval", "4", "--ckpt-format", "torch_dist")
    sharded = ("--use-distributed-optimizer", "--lr-decay-iters", "8")
    words = ("--replicas", "2", "--steps", "8")
    whole = bench.train(options_of(*words, megatron=(*keep, *sharded)), prefix, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    options = options_of(*words, megatron=("--load", str(tmp_path), *sharded))
    resumed = bench.train(options, prefix, EACH_STEP)
    # In the plain job the norm has two parts, and is rounded differently.
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-6)
    assert len(resumed["checksums"]) == 1


@pytest.mark.thorough
def test_outer_steps_learn(prefix: Path, tmp_path: Path) -> None:
    """Two optimizers and a delay follow some summed steps, and the loss falls. Before a save all
    replicas are equal, including the biases of their routers."""
    words = (*TWO_BY_TWO, "--steps", "12", "--delay", "1", "--fragments", "2")
    save = ("--save", str(tmp_path), "--save-interval", "10", "--ckpt-format", "torch_dist")
    options = options_of(*words, megatron=(*MOE, *save))
    run = bench.train(options, prefix, (4, 3))
    plain = bench.train(options_of(*words, megatron=MOE), prefix, EACH_STEP)
    # Each replica reports its own third loss.
    assert run["losses"][:2] == plain["losses"][:2]
    assert run["losses"][2] == pytest.approx(plain["losses"][2], rel=1e-6)
    # Outer momentum may learn faster than summed steps.
    pairs = zip(run["losses"], plain["losses"], strict=True)
    assert all(loss <= 1.1 * summed for loss, summed in pairs)
    assert run["losses"][-1] < 0.8 * run["losses"][0]
    assert run["losses"] != plain["losses"]


@pytest.mark.parametrize(
    ("setting", "rate"),
    [
        pytest.param(EACH_STEP, 0.6, id="replicas"),
        pytest.param(None, 0.4, id="one job", marks=pytest.mark.thorough),
    ],
)
def test_outer_steps_are_those_of_torch(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Any, rate: float
) -> None:
    """Two replicas make the steps of torch's SGD from the mean of their parameters, and a job makes
    them from its own. Summed steps fill the momentum. An evaluation finds the outer parameters."""
    every, after, steps = 3, 4, 11
    monkeypatch.setattr(bench, "PACED", Path(__file__).with_name("recorded_gpt.py"))
    monkeypatch.setenv("RECORD", str(tmp_path))
    outer_flag = ("--dpu-outer", f"{every},after={after},dtype=float32")
    evaluate = ("--split", "80,20,0", "--eval-interval", "5", "--eval-iters", "1")
    words = ("--replicas", "2", "--steps", str(steps), "--pace", "0.001")
    run = bench.train(options_of(*words, megatron=(*outer_flag, *evaluate)), prefix, setting)
    assert len(run["checksums"]) == 1
    records = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(records) == 2
    outer = torch.nn.Parameter(records[0]["begin"])
    nesterov = torch.optim.SGD([outer], lr=rate, momentum=0.9, nesterov=True)
    for step in range(1, steps + 1):
        before = [record["before"][step - 1] for record in records]
        stepped = [record["after"][step - 1] for record in records]
        assert torch.equal(*before) == (setting is None or step <= after)
        is_due = step % every == 0 or step == steps
        if is_due:
            outer.grad = outer.detach() - torch.stack(before).mean(0)
            nesterov.step()
        if is_due and step <= after:
            outer.data.copy_(before[0])
        is_outer = is_due and step > after
        for parameter, own in zip(stepped, before, strict=True):
            torch.testing.assert_close(
                parameter, outer.detach() if is_outer else own, rtol=0, atol=2e-6 * is_outer
            )
        assert torch.equal(*stepped) or not is_outer
        for record in records if step in (5, 10) else []:
            torch.testing.assert_close(record["evaluated"][step], outer.detach(), rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_replicas_that_begin_differently_are_told(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of("--replicas", "2", "--steps", "4")
    monkeypatch.setattr(bench, "arguments_of_world", lambda number: ["--seed", str(number + 1)])
    with pytest.raises(
        LaunchError, match="replicas have different parameters or buffers to begin with"
    ):
        bench.train(options, prefix, EACH_STEP)


REFUSED = {
    "use_megatron_fsdp": (True, "--use-megatron-fsdp"),
    "num_distributed_optimizer_instances": (2, "replicas are the instances"),
    "dpu_reduce_backend": ("collective", "--dpu-reduce-backend=collective"),
    "dataloader_type": ("external", "which part of a batch"),
    "moe_router_load_balancing_type": (["global_aux_loss"], "counts tokens of one replica"),
    "non_persistent_ckpt_type": ("local", "one replica saves for all"),
    "qk_clip": (True, "--qk-clip: it scales weights by the largest logit of one replica"),
    "moe_paged_stash": (True, "--moe-paged-stash: a replica cannot make a step again"),
    "full_validation": (True, "--full-validation: replicas would evaluate different numbers"),
}
OUTER_REFUSED = {
    "dpu_optimizer": (True, "--dpu-optimizer: its servers make each step"),
    "optimizer": ("muon", "--optimizer=muon"),
    "use_precision_aware_optimizer": (True, "--use-precision-aware-optimizer"),
    "use_torch_fsdp2": (True, "--use-torch-fsdp2: it shards parameters"),
}
OUTER_REPLICAS_REFUSED = {
    **OUTER_REFUSED,
    "dpu_reduce_wire_dtype": ("int8", "dtype= of --dpu-outer"),
    "world_size": (2, "needs --use-distributed-optimizer"),
}


def arguments(**given: Any) -> Namespace:
    usual = {
        "use_dpu_reduce": True,
        "world_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "use_distributed_optimizer": False,
    }
    return Namespace(**{**usual, **given})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_replicas(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, text = REFUSED[name]
    replica_refusals.check(arguments(**{name: value}))
    monkeypatch.setenv("BYTEPS_REPLICA", "0/2")
    with pytest.raises(ValueError, match=text):
        replica_refusals.check(arguments(**{name: value}))


def test_matrices_that_ranks_keep_are_refused_with_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = arguments(optimizer="muon", dpu_optimizer=True, dpu_optimizer_matrices=False)
    replica_refusals.check(given)
    monkeypatch.setenv("BYTEPS_REPLICA", "0/2")
    with pytest.raises(ValueError, match=r"BYTEPS_REPLICA=0/2 with --dpu-optimizer .*=muon"):
        replica_refusals.check(given)
    replica_refusals.check(arguments(optimizer="muon", dpu_optimizer_matrices=False))
    replica_refusals.check(arguments(optimizer="adam", dpu_optimizer=True))


@pytest.mark.parametrize(
    "quorum", ["2", "2@", "@2", "2@0", "0@1.5", "2@-1", "2@inf", "x@1", "2@1s"]
)
def test_a_quorum_is_so_many_replicas_and_seconds(
    monkeypatch: pytest.MonkeyPatch, quorum: str
) -> None:
    with pytest.raises(ValueError, match=r"--dpu-quorum=2@1\.5 needs replicas"):
        replica_refusals.check(arguments(dpu_quorum="2@1.5"))
    monkeypatch.setenv("BYTEPS_REPLICA", "0/3")
    with pytest.raises(ValueError, match=rf"--dpu-quorum={quorum} is not REPLICAS@SECONDS"):
        replica_refusals.check(arguments(dpu_quorum=quorum))
    replica_refusals.check(arguments(dpu_quorum="2@1.5"))


@pytest.mark.parametrize("name", OUTER_REPLICAS_REFUSED)
def test_refused_with_outer_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, text = OUTER_REPLICAS_REFUSED[name]
    given = arguments(dpu_outer="5", **{name: value})
    if name in OUTER_REFUSED:
        with pytest.raises(ValueError, match=text):
            replica_refusals.check(given)
    else:
        replica_refusals.check(given)
    monkeypatch.setenv("BYTEPS_REPLICA", "0/2")
    with pytest.raises(ValueError, match=text):
        replica_refusals.check(given)


def test_replicas_need_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        replica_refusals.check(arguments(dpu_outer="0"))
    monkeypatch.setenv("BYTEPS_REPLICA", "0/2")
    with pytest.raises(ValueError, match="BYTEPS_REPLICA=0/2 needs --use-dpu-reduce"):
        replica_refusals.check(arguments(use_dpu_reduce=False))


def test_replicas_need_arguments_that_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Megatron's arguments, all replicas of a program would read the same samples."""
    ddp = torch.nn.Module()
    ddp.ddp_config = DistributedDataParallelConfig(average_in_collective=True)
    ddp.config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    ddp.module = torch.nn.Linear(1, 1)
    monkeypatch.setenv("BYTEPS_REPLICA", "1/2")
    for name, value in (("_count", 2), ("_size_counts_replicas", False)):
        monkeypatch.setattr(plan.job, name, value)
    for module, name in (
        (plan.job, "initialize"),
        (plan, "validate_model_config"),
        (plan.summed_later, "part_groups"),
    ):
        monkeypatch.setattr(module, name, lambda *args: None)
    monkeypatch.setattr(plan.job, "replica", lambda: 1)
    with pytest.raises(ValueError, match=r"BYTEPS_REPLICA=1/2 needs Megatron's arguments"):
        plan.register(ddp)
    assert plan.job.replicas_of(Namespace(use_dpu_reduce=True)) == 2
    monkeypatch.setattr(plan, "_kinds", lambda ddp: [])
    monkeypatch.setattr(plan, "bytes_per_server", lambda buckets: [0])
    monkeypatch.setattr(plan, "declare", lambda *args: None)
    plan.register(ddp)


def test_gradients_of_a_model_that_is_gone_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bucket:
        gradient_scaling_factor = 1.0

    config = SimpleNamespace(calculate_per_token_loss=False, average_in_collective=False)
    ddp, job = SimpleNamespace(config=config, ddp_config=config), plan.job
    monkeypatch.setattr(job, "_count", 2)
    monkeypatch.setattr(job, "_each_step", True)
    gone, staying = Bucket(), Bucket()
    job.divide_gradients(ddp, [gone, staying])
    ref = weakref.ref(gone)
    del gone
    gc.collect()
    assert ref() is None
    job.leave_each_other()
    assert staying.gradient_scaling_factor == 1.0
