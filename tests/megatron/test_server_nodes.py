"""The optimizer on the servers, where ranks of a host sum first: Megatron's training loop on two
hosts of two ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from byteps.torch import BytePSError
from byteps.torch.server_bucket import ServerBucket
from byteps.torch.speculation import Speculation
from byteps.torch.step_machine import StepMachine
from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer
from megatron.core.distributed.dpu_reduce.server_routes import alike

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.gpt.seen import RankSeen
from tests.layouts.job import Job

RunJob = Callable[..., Job]

SERVERS = ("--use-dpu-reduce", "--dpu-optimizer")
EARLY = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
NODE_FIRST = ("--dpu-reduce-route", "node-first")
FLAT = ("--dpu-reduce-route", "flat")
# Small pieces: one is in flight while the host sums another.
PIECES = {"BYTEPS_EMBEDDED_SERVERS": "2", "BYTEPS_NODE_PIECE_BYTES": "2048"}
PIPELINE = ("--pipeline-model-parallel-size", "2")


@pytest.fixture
def seen(run_job: RunJob, dataset: Dataset) -> Callable[..., list[RankSeen]]:
    """What the ranks of a job saw, two of which share a host."""

    def run(
        *arguments: str, program: str = "train", ranks: int = 4, **settings: object
    ) -> list[RankSeen]:
        words = [*data_arguments(dataset), *SERVERS, *arguments]
        settings = {"per_host": 2, "environment": PIECES, **settings}
        job = run_job(program, ranks, arguments=words, **settings)
        return job.results()

    return run


Seen = Callable[..., list[RankSeen]]


def _assert_same(one: RankSeen, other: RankSeen) -> None:
    assert [step.loss for step in one.steps] == [step.loss for step in other.steps]
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.mark.parametrize(
    "types",
    [pytest.param(("--bf16",), id="bf16"), pytest.param((), id="fp32", marks=pytest.mark.thorough)],
)
def test_node_first_is_flat_but_for_rounding_and_half_the_bytes(seen: Seen, types: tuple) -> None:
    """All ranks have the same bits, and whether servers try steps makes no difference."""
    tried, waited, flat = (
        seen(*types, *words)
        for words in (
            (*EARLY, *NODE_FIRST),
            (*NODE_FIRST, "--dpu-optimizer-clip", "wait"),
            (*EARLY, *FLAT),
        )
    )
    for one in (*tried[1:], *waited):
        for name, value in tried[0].parameters.items():
            assert torch.equal(value, one.parameters[name]), name
    assert [step.grad_norm for step in tried[0].steps] == pytest.approx(
        [step.grad_norm for step in flat[0].steps], rel=1e-2 if types else 1e-5
    )
    for name, value in tried[0].parameters.items():
        bound = 2e-2 if types else 1e-5
        torch.testing.assert_close(value, flat[0].parameters[name], rtol=bound, atol=bound)
    for one, other in zip(tried, flat, strict=True):
        # The first rank of all loads whole parameters, or those of the first host a part each.
        assert one.pulled_bytes == pytest.approx(other.pulled_bytes / 2, rel=0.02)


def test_the_table_names_the_way(run_job: RunJob, dataset: Dataset) -> None:
    words = [*data_arguments(dataset), *SERVERS, "--dpu-reduce-route", "auto"]
    for per_host, said in ((2, "BytePS node-first"), (3, "hosts have 1 or 3 ranks")):
        job = run_job("train", 4, arguments=words, per_host=per_host, environment=PIECES)
        log = job.log_of(0).read_text()
        (head,) = [line for line in log.splitlines() if "dense gradients over" in line]
        assert "optimizer on the servers" in head
        (chosen,) = [line for line in log.splitlines() if "yes: " in line]
        assert said in chosen


def test_a_step_with_a_nan_is_skipped(seen: Seen) -> None:
    words = ("--no-check-for-nan-in-loss-and-grad", *EARLY, *NODE_FIRST)
    ranks = seen(*words, program="train_poisoned")
    for one in ranks:
        is_none = [step.grad_norm is None or math.isnan(step.grad_norm) for step in one.steps]
        assert is_none == [False, True, False, False]
        for name, value in one.parameters.items():
            assert torch.isfinite(value).all()
            assert torch.equal(value, ranks[0].parameters[name]), name


def test_average_in_collective(seen: Seen) -> None:
    """Divided by two inside the host and by two on the servers, which is exact."""
    averaged = seen(*EARLY, *NODE_FIRST, "--ddp-average-in-collective")
    summed = seen(*EARLY, *NODE_FIRST)
    for one, other in zip(averaged, summed, strict=True):
        _assert_same(one, other)


@pytest.mark.parametrize("clip", ["speculate", pytest.param("wait", marks=pytest.mark.thorough)])
def test_passes_that_run_again_are_summed_again(seen: Seen, clip: str) -> None:
    words = (*EARLY, *NODE_FIRST, "--dpu-optimizer-clip", clip)
    again = seen(*words, broken="pushed-twice")
    once = seen(*words)
    for one, other in zip(again, once, strict=True):
        for name, value in one.parameters.items():
            assert torch.equal(value, other.parameters[name]), name


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        pytest.param(NODE_FIRST, FLAT, id="to-flat", marks=pytest.mark.thorough),
        pytest.param(FLAT, NODE_FIRST, id="from-flat", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_goes_on_the_other_way(
    seen: Seen, run_dir: Path, saves: tuple[str, ...], resumes: tuple[str, ...]
) -> None:
    shared = ("--bf16", "--hidden-dropout", "0", "--attention-dropout", "0")
    folder = str(run_dir / "checkpoint")
    whole = seen(*shared, *saves, "--save", folder, "--save-interval", "2")
    same = seen(*shared, *saves, "--load", folder, "--ckpt-step", "2")
    other = seen(*shared, *resumes, "--load", folder, "--ckpt-step", "2")
    for ranks in (same, other):
        assert [len(one.steps) for one in ranks] == [2] * 4
    for one, rest in zip(whole, same, strict=True):
        one.steps = one.steps[2:]
        _assert_same(rest, one)
    assert [step.loss for step in other[0].steps] == pytest.approx(
        [step.loss for step in whole[0].steps], rel=1e-4
    )


def test_a_lost_rank_ends_the_job(run_job: RunJob, dataset: Dataset) -> None:
    """Also the rank next to it, which waits for it inside the host."""
    words = [*data_arguments(dataset), *SERVERS, *EARLY, *NODE_FIRST]
    job = run_job("train", 4, arguments=words, per_host=2, broken="lost", fails=True)
    for rank in (0, 1, 2):
        log = job.log_of(rank).read_text()
        assert "BytePSError" in log or "RuntimeError" in log, rank


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), Interrupt()])
def test_after_a_step_that_failed_nothing_is_sent_or_saved(error: BaseException) -> None:
    """By whatever it failed, in the step or in the backward pass."""
    bucket = mock.Mock()
    said = f"earlier step failed .{error!s}" if str(error) else "earlier step failed .Interrupt"
    for fails in ("step", "early"):
        optimizer = ServerOptimizer.__new__(ServerOptimizer)
        optimizer.optimizer = mock.Mock(param_groups=[])
        rule = mock.Mock(groups=[], **{"groups_of.return_value": []})
        optimizer._early, optimizer._loaded, optimizer._unscale = {bucket}, True, 1.0
        optimizer._machine = StepMachine([bucket], rule, Speculation("speculate"), name="it")
        bucket.push_early.side_effect = None if fails == "step" else error
        optimizer._step = mock.Mock(side_effect=error)
        with pytest.raises(type(error)):
            optimizer.step() if fails == "step" else optimizer.bucket_is_ready(bucket)
        bucket.reset_mock(side_effect=True)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        for call in (
            optimizer.step,
            functools.partial(optimizer.bucket_is_ready, bucket),
            functools.partial(optimizer.sharded_state_dict, {}, metadata=metadata),
        ):
            with pytest.raises(BytePSError, match=said):
                call()
        assert not bucket.push_early.called


def test_a_load_forgets_what_was_sent_of_a_step_that_failed() -> None:
    bucket = ServerBucket.__new__(ServerBucket)
    bucket._shards, bucket._transfer = mock.Mock(), mock.Mock()
    bucket._pushed, bucket._check = mock.sentinel.started, None
    bucket._transfer.end.side_effect = BytePSError("worker 1 was lost")
    bucket.give_up()
    bucket.forget_push()  # as the next pass begins
    bucket._transfer.end.assert_called_once_with(mock.sentinel.started)
    bucket._shards.give_up.assert_called_once_with()


def test_copies_are_summed_alike(seen: Seen) -> None:
    """Where stages are spread over hosts differently, tied embeddings would drift apart."""
    hosts = "aabbabab"
    ranks = seen(*PIPELINE, *NODE_FIRST, program="train_on_hosts", ranks=8, hosts=hosts)
    ends = [
        {
            name.rpartition(".")[0].rpartition(".")[2]: value
            for name, value in one.parameters.items()
        }
        for one in ranks
    ]
    for first, last in zip(ends[:4], ends[4:], strict=True):
        assert torch.equal(first["word_embeddings"], last["output_layer"])


def test_which_spreads_are_alike() -> None:
    assert alike([]) and alike([(0, 0, 1, 1)]) and alike([(0, 0, 1, 1)] * 2) and alike([(), ()])
    assert not alike([(0, 0, 1, 1), (0, 1, 0, 1)])
    assert not alike([(0, 0, 1, 1), ()])
