"""What rounding to few bits has lost is saved and loaded with checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byteps.torch.feedback import feedback
from megatron.core import rerun_state_machine
from megatron.core.distributed import dpu_reduce
from megatron.core.rerun_state_machine import RerunState

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.job import Job
from tests.megatron import owed
from tests.megatron.training_jobs import Trained, same

Train = Callable[..., Trained]

FEW = {"BYTEPS_KEEP_BF16_BYTES": "2048", "BYTEPS_NODE_PIECE_BYTES": "1024"}
INT4 = ("--bf16", "--use-dpu-reduce", "--dpu-reduce-wire-dtype", "int4")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000")
THOROUGH = pytest.mark.thorough
SERVERS = ("--dpu-optimizer",)
SPLIT = ("--tensor-model-parallel-size", "2")
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
NODE_FIRST = ("--dpu-reduce-route", "node-first")
# Tensor-parallel ranks have copies of these parameters, which are large enough for few bits.
POSITIONS = ("--max-position-embeddings", "64")
NONE = "does not say what rounding has lost"


@pytest.mark.parametrize(
    ("arguments", "job"),
    [
        pytest.param(("--swiglu",), {}, id="flat"),
        pytest.param(SHARDED, {}, id="sharded", marks=THOROUGH),
        pytest.param((*SHARDED, *NODE_FIRST), {"ranks": 4, "per_host": 2}, id="node-first"),
        pytest.param((*SHARDED, *POSITIONS, *SPLIT), {"ranks": 4}, id="split", marks=THOROUGH),
        pytest.param(SERVERS, {}, id="servers"),
    ],
)
def test_a_job_that_resumes_makes_the_steps_of_one_that_goes_on(
    train: Train, run_dir: Path, arguments: tuple[str, ...], job: Mapping[str, Any]
) -> None:
    shared = (*INT4, *DROPOUT, *arguments)
    settings = {**job, "environment": FEW}
    save = ("--save", str(run_dir / "checkpoint"), "--save-interval", "2")
    whole = train(*shared, **settings)
    saves = train(*shared, *save, **settings)
    rest = train(*shared, "--load", save[1], "--ckpt-step", "2", **settings)
    assert saves.losses == whole.losses
    assert rest.losses == whole.losses[2:]
    if arguments != SERVERS:
        assert same(rest.gradients, whole.gradients[2:])
    for name, value in whole.parameters.items():
        assert torch.equal(value, saves.parameters[name]), name
        assert torch.equal(value, rest.parameters[name]), name


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


@pytest.mark.parametrize(
    ("saves", "resumes", "only"),
    [
        pytest.param((4,), (2,), "", id="fewer"),
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
        pytest.param((2, *RESHARDABLE), (2, *SERVERS), "", id="to-servers"),
        pytest.param(
            (2, "--dpu-optimizer"),
            (2, *RESHARDABLE),
            "",
            id="from-servers",
            marks=THOROUGH,
        ),
        pytest.param((4, "--pipeline-model-parallel-size", "2"), (2,), "embedding", id="no-stages"),
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
    """Of each parameter: what ranks and servers have lost, as a part of the gradient."""
    plain = (*INT4, *POSITIONS, *data_arguments(dataset), "--global-batch-size", "24")
    save = ("--save", str(run_dir / "checkpoint"), "--save-interval", "2")
    load = ("--load", save[1], "--ckpt-step", "2")
    vocabulary = ("--make-vocab-size-divisible-by",)

    def found(ranks: int, *arguments: str) -> dict[str, torch.Tensor]:
        divisible = "2" if set(SPLIT) <= set(arguments) else "4"
        job = run_job(
            "train_owed",
            ranks,
            arguments=[*plain, *arguments, *vocabulary, divisible],
            environment=FEW,
        )
        return owed.together(job.results())

    before = found(*saves, *save)
    after = found(*resumes, *load)
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
