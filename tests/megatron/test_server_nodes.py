"""The optimizer on the servers, with node-first sums; and rounding losses in checkpoints."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from byteps.torch import BytePSError
from byteps.torch.server_bucket import ServerBucket
from byteps.torch.step_machine import Speculation, StepMachine
from byteps.torch.wire import feedback
from megatron.core import rerun_state_machine
from megatron.core.distributed import dpu_reduce
from megatron.core.distributed.dpu_reduce.server_buckets import alike
from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer
from megatron.core.rerun_state_machine import RerunState
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.prepare_data import Dataset
from tests.layouts.gpt.layout import RankSeen
from tests.layouts.job import Job, data_arguments
from tests.megatron.training_jobs import Trained, same

RunJob = Callable[..., Job]

SERVERS = ("--use-dpu-reduce", "--dpu-optimizer")
EARLY = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
NODE_FIRST = ("--dpu-reduce-backend", "node-first")
FLAT = ("--dpu-reduce-backend", "flat")
# Pieces are small, so that one is in flight while the host sums another.
PIECES = {"BYTEPS_EMBEDDED_SERVERS": "2", "BYTEPS_NODE_PIECE_BYTES": "2048"}
PIPELINE = ("--pipeline-model-parallel-size", "2")


@pytest.fixture
def seen(run_job: RunJob, dataset: Dataset) -> Callable[..., list[RankSeen]]:
    """Runs a job of ranks, two of which share a host; returns their records."""

    def run(
        *arguments: str, program: str = "train", ranks: int = 4, **settings: object
    ) -> list[RankSeen]:
        words = [*data_arguments(dataset), *SERVERS, *arguments]
        settings = {"per_host": 2, "environment": PIECES, **settings}
        job = run_job(program, ranks, arguments=words, **settings)
        return job.results()

    return run


Seen = Callable[..., list[RankSeen]]


def _assert_same(seen: RankSeen, other: RankSeen) -> None:
    assert [step.loss for step in seen.steps] == [step.loss for step in other.steps]
    for name, value in seen.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.mark.parametrize(
    "types",
    [pytest.param(("--bf16",), id="bf16"), pytest.param((), id="fp32", marks=pytest.mark.thorough)],
)
def test_node_first_is_flat_but_for_rounding_and_half_the_bytes(seen: Seen, types: tuple) -> None:
    """All ranks have the same bits, independent of when gradients are sent."""
    tried, late, flat = (
        seen(*types, *words) for words in ((*EARLY, *NODE_FIRST), NODE_FIRST, (*EARLY, *FLAT))
    )
    for rank in (*tried[1:], *late):
        for name, value in tried[0].parameters.items():
            assert torch.equal(value, rank.parameters[name]), name
    assert [step.grad_norm for step in tried[0].steps] == pytest.approx(
        [step.grad_norm for step in flat[0].steps], rel=1e-2 if types else 1e-5
    )
    for name, value in tried[0].parameters.items():
        bound = 2e-2 if types else 1e-5
        torch.testing.assert_close(value, flat[0].parameters[name], rtol=bound, atol=bound)
    for rank, other in zip(tried, flat, strict=True):
        # The first rank of all loads whole parameters; node first, the ranks of the first host load
        # a part each.
        assert rank.pulled_bytes == pytest.approx(other.pulled_bytes / 2, rel=0.02)


def test_the_table_names_the_way(run_job: RunJob, dataset: Dataset) -> None:
    words = [*data_arguments(dataset), *SERVERS, "--dpu-reduce-backend", "auto"]
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
    for rank in ranks:
        is_none = [step.grad_norm is None or math.isnan(step.grad_norm) for step in rank.steps]
        assert is_none == [False, True, False, False]
        for name, value in rank.parameters.items():
            assert torch.isfinite(value).all()
            assert torch.equal(value, ranks[0].parameters[name]), name


@pytest.mark.thorough
def test_average_in_collective(seen: Seen) -> None:
    """Divided by two inside the host and by two on the servers, which is exact."""
    averaged = seen(*EARLY, *NODE_FIRST, "--ddp-average-in-collective")
    summed = seen(*EARLY, *NODE_FIRST)
    for rank, other in zip(averaged, summed, strict=True):
        _assert_same(rank, other)


def test_passes_that_run_again_are_summed_again(seen: Seen) -> None:
    words = (*EARLY, *NODE_FIRST)
    again = seen(*words, broken="pushed-twice")
    once = seen(*words)
    for rank, other in zip(again, once, strict=True):
        for name, value in rank.parameters.items():
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
        assert [len(rank.steps) for rank in ranks] == [2] * 4
    for of_rank, rest in zip(whole, same, strict=True):
        of_rank.steps = of_rank.steps[2:]
        _assert_same(rest, of_rank)
    assert [step.loss for step in other[0].steps] == pytest.approx(
        [step.loss for step in whole[0].steps], rel=1e-4
    )


def test_a_lost_rank_ends_the_job(run_job: RunJob, dataset: Dataset) -> None:
    """The rank next to the lost one ends, too, because it waits for the lost rank inside the
    host."""
    words = [*data_arguments(dataset), *SERVERS, *EARLY, *NODE_FIRST]
    job = run_job("train", 4, arguments=words, per_host=2, broken="lost", fails=True)
    for rank in (0, 1, 2):
        log = job.log_of(rank).read_text()
        assert "BytePSError" in log or "RuntimeError" in log, rank


class Interrupt(BaseException):
    """Stands for an exception like KeyboardInterrupt, which itself would end the tests."""


@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), Interrupt()])
def test_after_a_step_that_failed_nothing_is_sent_or_saved(error: BaseException) -> None:
    """Any kind of failure counts, in the step or in the backward pass."""
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
    bucket.forget_push()  # The next pass begins with these calls.
    bucket._transfer.end.assert_called_once_with(mock.sentinel.started)
    bucket._shards.give_up.assert_called_once_with()


def test_copies_are_summed_alike(seen: Seen) -> None:
    """Even if stages are spread differently over hosts, tied embeddings are summed alike."""
    hosts = "aabbabab"
    ranks = seen(*PIPELINE, *NODE_FIRST, program="train_on_hosts", ranks=8, hosts=hosts)
    ends = [
        {
            name.rpartition(".")[0].rpartition(".")[2]: value
            for name, value in rank.parameters.items()
        }
        for rank in ranks
    ]
    for first, last in zip(ends[:4], ends[4:], strict=True):
        assert torch.equal(first["word_embeddings"], last["output_layer"])


def test_which_spreads_are_alike() -> None:
    assert alike([]) and alike([(0, 0, 1, 1)]) and alike([(0, 0, 1, 1)] * 2) and alike([(), ()])
    assert not alike([(0, 0, 1, 1), (0, 1, 0, 1)])
    assert not alike([(0, 0, 1, 1), ()])


# Rounding losses are saved and loaded with checkpoints.


Train = Callable[..., Trained]

FEW = {"BYTEPS_NODE_PIECE_BYTES": "1024"}
INT4 = (
    *("--bf16", "--use-dpu-reduce", "--dpu-reduce-wire-dtype", "int4"),
    *("--dpu-reduce-keep-bf16", "2048"),
)
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000")
THOROUGH = pytest.mark.thorough
OPTIMIZER = ("--dpu-optimizer",)
SPLIT = ("--tensor-model-parallel-size", "2")
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
# Tensor-parallel ranks have copies of these parameters, which are large enough for few bits.
POSITIONS = ("--max-position-embeddings", "64")
NONE = "does not say what rounding has lost"


def saved_ranks(folder: Path) -> set[int]:
    """Return a set of the numbers of ranks whose rounding losses a checkpoint has. The number may
    differ by parameter."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        tensor.size[0]
        for key, tensor in saved.items()
        if key.startswith("dpu_feedback.") and not key.endswith(".servers")
        if isinstance(tensor, TensorStorageMetadata)
    }


@pytest.mark.parametrize(
    ("arguments", "job"),
    [
        pytest.param(("--swiglu",), {}, id="flat", marks=THOROUGH),
        pytest.param(SHARDED, {}, id="sharded", marks=THOROUGH),
        pytest.param((*SHARDED, *NODE_FIRST), {"ranks": 4, "per_host": 2}, id="node-first"),
        pytest.param((*SHARDED, *POSITIONS, *SPLIT), {"ranks": 4}, id="split", marks=THOROUGH),
        pytest.param(OPTIMIZER, {}, id="servers", marks=THOROUGH),
    ],
)
def test_a_job_that_resumes_makes_the_steps_of_one_that_goes_on(
    train: Train, run_dir: Path, arguments: tuple[str, ...], job: Mapping[str, Any]
) -> None:
    shared = (*INT4, *DROPOUT, *arguments)
    settings = {**job, "environment": FEW}
    save = ("--save", str(run_dir / "checkpoint"), "--save-interval", "2")
    saves = train(*shared, *save, **settings)
    rest = train(*shared, "--load", save[1], "--ckpt-step", "2", **settings)
    assert rest.losses == saves.losses[2:]
    if arguments != OPTIMIZER:
        assert same(rest.gradients, saves.gradients[2:])
    for name, value in saves.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name
    assert saved_ranks(run_dir / "checkpoint/iter_0000002") == {1}


def test_what_each_rank_has_lost_is_saved_on_request(train: Train, run_dir: Path) -> None:
    """If each rank's losses are saved, a job that saves makes the same steps as one that
    does not."""
    shared = (*INT4, *DROPOUT, *SHARDED, "--dpu-feedback-per-rank")
    save = ("--save", str(run_dir / "checkpoint"), "--save-interval", "2")
    whole = train(*shared, environment=FEW)
    saves = train(*shared, *save, environment=FEW)
    rest = train(*shared, "--load", save[1], "--ckpt-step", "2", environment=FEW)
    assert saves.losses == whole.losses
    assert rest.losses == whole.losses[2:]
    assert same(rest.gradients, whole.gradients[2:])
    for name, value in whole.parameters.items():
        assert torch.equal(value, saves.parameters[name]), name
        assert torch.equal(value, rest.parameters[name]), name
    assert saved_ranks(run_dir / "checkpoint/iter_0000002") == {2}


@pytest.mark.thorough
def test_a_checkpoint_without_it_is_loaded_and_one_with_it_by_bf16(
    train: Train, run_dir: Path
) -> None:
    folders = [str(run_dir / name) for name in ("plain", "int4")]
    plain = ("--bf16", "--use-dpu-reduce", *DROPOUT)
    first = train(*plain, "--save", folders[0], "--save-interval", "2")
    rest = train(*INT4, *DROPOUT, "--load", folders[0], "--ckpt-step", "2", environment=FEW)
    assert len(rest.losses) == 2
    assert NONE in rest.job.log_of(0).read_text()
    train(*INT4, *DROPOUT, "--save", folders[1], "--save-interval", "2", environment=FEW)
    other = train(*plain, "--load", folders[1], "--ckpt-step", "2")
    assert len(other.losses) == 2 == len(first.losses[2:])
    assert NONE not in other.job.log_of(0).read_text()


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return each parameter's rounding losses, from the results of `train_owed` on each rank."""
    parts: dict[str, dict[int, Any]] = {}
    axes: dict[str, int] = {}
    for rank in ranks:
        for name, (values, axis) in rank["owed"].items():
            number = rank["tensor_rank"]
            # A copy. Its gradient equals that of the first parameter.
            if axis is None and number > 0:
                continue
            axes[name] = axis or 0
            of_rank = parts.setdefault(name, {})
            of_rank[number] = of_rank.get(number, 0) + values
    return {
        name: torch.cat([part for _, part in sorted(of_rank.items())], dim=axes[name])
        for name, of_rank in parts.items()
    }


@pytest.mark.parametrize(
    ("saves", "resumes", "only"),
    [
        pytest.param((4,), (2,), "", id="fewer", marks=THOROUGH),
        pytest.param((2,), (4, *SPLIT), "", id="split", marks=THOROUGH),
        pytest.param((4, *SPLIT), (2,), "", id="whole", marks=THOROUGH),
        pytest.param(
            (2, "--ddp-average-in-collective"),
            (3,),
            "",
            id="more-and-no-average",
            marks=THOROUGH,
        ),
        pytest.param((2,), (4, "--ddp-average-in-collective"), "", id="average"),
        pytest.param((2, *RESHARDABLE), (2, *OPTIMIZER), "", id="to-servers", marks=THOROUGH),
        pytest.param(
            (2, "--dpu-optimizer"),
            (2, *RESHARDABLE),
            "",
            id="from-servers",
            marks=THOROUGH,
        ),
        pytest.param(
            (4, "--pipeline-model-parallel-size", "2"),
            (2,),
            "embedding",
            id="no-stages",
            marks=THOROUGH,
        ),
    ],
)
def test_in_another_layout_the_next_steps_owe_as_much(
    run_job: Callable[..., Job],
    dataset: Dataset,
    run_dir: Path,
    saves: tuple[Any, ...],
    resumes: tuple[Any, ...],
    only: str,
) -> None:
    """Compare, for each parameter, the rounding losses that ranks and servers still keep, relative
    to its gradient."""
    plain = (*INT4, *POSITIONS, *data_arguments(dataset), "--global-batch-size", "24")
    save = ("--save", str(run_dir / "checkpoint"), "--save-interval", "2")
    load = ("--load", save[1], "--ckpt-step", "2")
    vocabulary = ("--make-vocab-size-divisible-by",)

    def owed(ranks: int, *arguments: str) -> dict[str, torch.Tensor]:
        divisible = "2" if set(SPLIT) <= set(arguments) else "4"
        job = run_job(
            "train_owed",
            ranks,
            arguments=[*plain, *arguments, *vocabulary, divisible],
            environment=FEW,
        )
        return together(job.results())

    before = owed(*saves, *save)
    after = owed(*resumes, *load)
    names = [name for name in after if re.search(only, name)]
    assert names
    for name in names:
        assert before[name].abs().max() > 0
        largest = before[name].abs().max().item()
        assert torch.allclose(before[name], after[name], rtol=2**-7, atol=largest * 2**-6), name


def test_a_step_that_is_made_again_begins_without(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(state=RerunState.INITIAL_RUN)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    config = SimpleNamespace(dpu_optimizer=False, dpu_reduce_wire_dtype="int4")
    lost, forgets = feedback.of("again", 3, torch.device("cpu"))
    lost.fill_(1)
    for state, is_kept in ((RerunState.INITIAL_RUN, True), (RerunState.RERUNNING_IN_PLACE, False)):
        machine.state = state
        dpu_reduce.gradients_will_be_zeroed(SimpleNamespace(ddp_config=config))
        lost, forgets = feedback.of("again", 3, torch.device("cpu"))
        assert (lost.tolist(), forgets) == (([1.0] * 3, False) if is_kept else ([0.0] * 3, True))
    feedback.forget()
