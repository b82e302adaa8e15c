"""Training with BytePS gives the results of training with all-reduce, in all layouts and with the
arguments of Megatron's functional tests; without the flag, Megatron is unchanged.

With two ranks a sum has one rounding in either backend, so everything must be bit-identical. With
more ranks the order of additions may differ, and both are compared with the exact sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.prepare_data import Dataset
from tests.layouts.functional import arguments as functional_runs
from tests.layouts.functional import rows as functional_rows
from tests.layouts.gpt import runs
from tests.layouts.gpt.layout import RankSeen, Report
from tests.layouts.gpt.rows import LAYOUTS
from tests.layouts.gpt.updates import compare_updates
from tests.layouts.job import Job, data_arguments
from tests.layouts.table import named
from tests.megatron.training_jobs import Trained, assert_same_run

Train = Callable[..., Trained]

BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
ACCUMULATE = ("--global-batch-size", "12")

CASES = {
    "fp32-overlap-buckets": BUCKETS,
    "fp32-accumulate-dropout": (*ACCUMULATE, "--hidden-dropout", "0.2"),
    "per-token-loss": ("--calculate-per-token-loss", *ACCUMULATE),
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_two_ranks_agree_to_the_last_bit(train: Train, arguments: tuple[str, ...]) -> None:
    through_byteps = train(*arguments, "--use-dpu-reduce")
    through_all_reduce = train(*arguments)
    assert_same_run(through_byteps, through_all_reduce)

    # The comparison means something only if the job has trained, ranks differ, and BytePS has made
    # the sums.
    assert len(through_byteps.losses) == 4
    assert through_byteps.losses[-1] < through_byteps.losses[0]
    first, second = (local[0] for local in through_byteps.local_gradients)
    assert not torch.equal(first[0], second[0])
    buckets = len(through_byteps.gradients[0])
    assert (buckets > 1) == ("--ddp-bucket-size" in arguments)
    assert len(through_byteps.names) == 4 * buckets
    assert len(set(through_byteps.names)) == buckets
    assert through_all_reduce.names == []


def test_average_in_collective(train: Train) -> None:
    """gloo cannot average, so the result is compared with a sum of halves, which is exact."""
    averaged = train("--use-dpu-reduce", "--ddp-average-in-collective", *BUCKETS)
    assert_same_run(averaged, train(*BUCKETS))


def test_average_in_collective_node_first(train: Train) -> None:
    """Divided by two inside the host and by two on the servers, which is exact."""
    node = ("--use-dpu-reduce", "--dpu-reduce-backend", "node-first", *BUCKETS)
    averaged = train(*node, "--ddp-average-in-collective", ranks=4, per_host=2)
    assert_same_run(averaged, train(*node, ranks=4, per_host=2))
    assert all("/part" in name for name in averaged.names)


def test_one_rank_pushes_nothing(train: Train) -> None:
    alone = train("--use-dpu-reduce", ranks=1)
    assert alone.names == []
    assert_same_run(alone, train(ranks=1))


# BytePS is optional: without it, or without the flag, Megatron is unchanged.


def test_trains_where_byteps_is_absent(train: Callable[..., Trained]) -> None:
    assert_same_run(train(hide_byteps=True), train())


def test_one_clear_error_where_byteps_is_absent(
    run_job: Callable[..., Job], dataset: Dataset
) -> None:
    arguments = ["--data-path", str(dataset.prefix), "--use-dpu-reduce"]
    job = run_job("train", 2, fails=True, arguments=arguments, hide_byteps=True)
    for rank in range(2):
        text = job.log_of(rank).read_text()
        assert "RuntimeError: --use-dpu-reduce needs the package byteps" in text
        assert "make setup" in text
        assert "initialized tensor model parallel" not in text, "refused before the set-up"


def test_a_flag_on_one_host_alone_is_named(run_job: Callable[..., Job], dataset: Dataset) -> None:
    """If only one host has the flag, the error names it. Otherwise the other rank would go on to a
    collective of Megatron, and wait for ever."""
    environment = {"BYTEPS_START_TIMEOUT_S": "3"}
    arguments = data_arguments(dataset)
    job = run_job(
        "train_with_the_flag_on_rank_0",
        2,
        fails=True,
        arguments=arguments,
        environment=environment,
    )
    said = "ranks [1] of 2 did not start BytePS within 3 s (BYTEPS_START_TIMEOUT_S)"
    assert said in job.log_of(0).read_text(encoding="utf-8")


def test_without_the_flag_byteps_is_not_touched(train: Callable[..., Trained]) -> None:
    run = train()
    assert run.job.result(0).byteps_imported is False
    assert "BytePS" not in run.job.log_of(0).read_text()


# Local attention with context parallelism, compared with a single rank with all tokens.


# Dropout would affect other elements on each rank.
PLAIN = ("--global-batch-size", "2", "--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.mark.parametrize("ranks", [4])
def test_a_split_sequence_gives_the_gradients_of_the_whole(
    train: Train, run_dir: Path, ranks: int
) -> None:
    """A single rank and all ranks together process the same micro-batch with the same
    parameters."""
    folder = str(run_dir / "checkpoint")
    whole = train(*PLAIN, "--save", folder, "--save-interval", "2", ranks=1)
    resume = ("--load", folder, "--ckpt-step", "2", "--no-load-rng")
    split = train(*PLAIN, *resume, "--context-parallel-size", str(ranks), ranks=ranks)
    torch.testing.assert_close(split.losses, whole.losses[2:], rtol=1e-5, atol=0.0)
    for gradient, other in zip(split.gradients[0], whole.gradients[2], strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    # Each rank has different tokens.
    first, second = (local[0][0] for local in split.local_gradients[:2])
    assert not torch.equal(first, second)


def test_positions_are_megatrons() -> None:
    from megatron.core import utils
    from megatron.training.cpu_layers import positions

    class Rank:
        """The part of a process group that the split of a batch uses."""

        def __init__(self, rank: int) -> None:
            self.number = rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda group: 4)
        patch.setattr(torch.distributed, "get_rank", lambda group: group.number)
        for rank in range(4):
            batch = {"tokens": torch.arange(16).view(1, 16)}
            split = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=Rank(rank))
            assert split["tokens"][0].tolist() == positions(rank, 4, 4).tolist()


# The arguments of Megatron's functional tests, with BytePS and with all-reduce.


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.name in functional_rows.QUICK else pytest.mark.thorough,
        )
        for case in functional_rows.CASES
    ],
)
def test_functional_tests_have_the_bits_of_all_reduce(
    fork_server: None, run_dir: Path, case: functional_runs.Case
) -> None:
    report = functional_runs.check(case, run_dir / case.name)
    assert report.misses == []
    assert report.same_bits and report.buckets > 0


# Parallel layouts with BytePS and with all-reduce, by tests/layouts/parity.py.


REPRESENTATIVE = (
    "dp3-fp16-wire",
    "dp4-do-bf16-sent-as-int8-overlap",
    "tp2-dp2-overlap",
    "pp2-dp2-tied-acc2",
    "cp2-dp2-do-bf16-wire",
    "node2-dp4-overlap-acc2",
    "dp2-do-bf16-wire-fp32-scatter-overlap",
    "servers-dp2-no-clip-frozen",
    "servers-tp2-pp2-dp2-tokens",
    "servers-dp4-do-bf16-wire-overlap-gather",
    "servers-dp2-mtp-detached",
    "servers-tp2-dp2-fp16-wire-overflows",
    "servers-dp2-muon-overlap",
    "node2-servers-dp4-bf16-sent-as-int8-overlap",
    "ep2-dp2-mla-mtp-alltoall-do-bf16",
)

THOROUGH = (
    "dp4-do-bf16-wire-acc2",
    "ep2-dp4-overlap-acc2",
    "dp2-do-overlap-acc2",
    "dp4-do-inst2-bf16-wire-overlap",
    "node2-dp4-do-overlap",
    "servers-ep2-tp2-etp1-dp2",
    "dp2-sent-as-bf16",
    "servers-dp4-bf16-sent-as-int4-overlap-acc2",
    "servers-tp2-dp2-sent-as-int8-overlap",
    "servers-pp2-dp2-tied-bf16-sent-as-int4",
    "servers-dp2-fp16-wire-sent-as-int8-overflows",
    "dp2-fp16-wire-sent-as-int4-overflows",
    "node2-dp4-do-sent-as-int4-overlap",
    "pp2-vpp2-dp2-do-overlap",
    "servers-dp4-bf16-wire",
    "servers-pp2-vpp2-dp2-overlap-acc4",
    "node3-servers-ep2-pp2-dp4",
    "servers-pp2-vpp2-dp2-do-gather-in-step",
    "servers-dp2-do-precision-aware",
    "servers-pp2-dp2-mtp-detached-overlap-clips-never",
    "servers-dp4-fp16-wire-static-overlap",
    "ep2-dp2-alltoall-overlap-acc2",
    "dp2-mla-do-overlap",
    "dp2-mtp-overlap-acc2",
    "t5-dp2-overlap-tokens",
    "bert-dp2-do-overlap",
    "dp2-do-muon-overlap",
    "servers-dp2-do-muon-bf16-overlap",
    "servers-tp2-dp2-muon-acc2",
    "servers-pp2-vpp2-dp2-muon-overlap",
    "servers-ep2-dp4-do-muon-bf16",
    "dp2-do-lion-overlap",
    "dp2-soap-overlap",
    "dp2-do-precision-aware-overlap",
    "dp2-do-ramp-overlap",
    "dp2-overlap-tokens-acc2",
)
"""Layouts whose features other layouts cover, too."""


@pytest.mark.parametrize(
    "name",
    [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)],
)
def test_layout(fork_server: None, dataset: Dataset, run_dir: Path, name: str) -> None:
    (layout,) = named(LAYOUTS, [name])
    report = runs.check(layout, run_dir / name, dataset)
    assert report.misses == []
    if not layout.refused:
        assert report.buckets > 0
        assert report.same_bits or not report.bits_must_agree


def test_names_are_unique_and_unknown_ones_are_refused() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    assert named(LAYOUTS, []) == list(LAYOUTS)
    with pytest.raises(ValueError, match="no layout is called nonsense"):
        named(LAYOUTS, ["dp2", "nonsense"])


class Reference:
    """Runs with all-reduce, once per layout."""

    def __init__(self, folder: Path, dataset: Dataset) -> None:
        self._folder = folder
        self._data = data_arguments(dataset)
        self._seen: dict[str, list[RankSeen]] = {}

    def failure(self, name: str, folder: Path, broken: str) -> str:
        """Return the logs of a run that fails, because it was changed (faults.py)."""
        (layout,) = named(LAYOUTS, [name])
        job = runs.train(
            layout,
            folder / broken,
            self._data,
            through_byteps=True,
            program="tests.megatron.rank_programs:train_layout",
            options={"broken": broken},
            fails=True,
        )
        return "".join(job.log_of(rank).read_text() for rank in range(job.ranks))

    def against(self, name: str, folder: Path, broken: str) -> Report:
        """Return the report on a changed run (faults.py) of a layout with the optimizer on the
        servers."""
        (layout,) = named(LAYOUTS, [name])
        if name not in self._seen:
            job = runs.train(layout, self._folder / name, self._data, through_byteps=False)
            self._seen[name] = job.results()
        job = runs.train(
            layout,
            folder / broken,
            self._data,
            through_byteps=True,
            program="tests.megatron.rank_programs:train_layout",
            options={"broken": broken},
        )
        return compare_updates(layout, job.results(), self._seen[name])


@pytest.fixture(scope="module")
def reference(
    fork_server: None, tmp_path_factory: pytest.TempPathFactory, dataset: Dataset
) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), dataset)


def test_a_wrong_update_is_found(reference: Reference, run_dir: Path) -> None:
    """test_compare.py covers wrong sums."""
    report = reference.against("servers-dp2-bf16-acc2", run_dir, "undecayed")
    assert any("parameters differ by" in miss for miss in report.misses), report.misses
    # The changed run is the one with BytePS, not the run that it is compared with.
    assert not any(miss.startswith("all-reduce") for miss in report.misses)


def test_gradients_that_tensor_parallel_ranks_sum_hold_up_no_others(
    reference: Reference, run_dir: Path
) -> None:
    """With the optimizer on the servers and overlap, norms have buckets of their own."""
    name = "servers-tp2-dp2-overlap-acc2"
    report = reference.against(name, run_dir, "sent-before-the-step")
    assert not report.misses


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [
        (
            "servers-tp2-dp2-overlap-acc2",
            "summed-once-more-checked",
            r"gradients of \S*layers\.1\.mlp\.linear_fc2\.weight have changed since",
        ),
        (
            "servers-pp2-vpp2-dp2-overlap-acc4",
            "pushed-too-early-checked",
            r"gradients of \S*word_embeddings\.weight have changed since",
        ),
    ],
)
def test_a_gradient_that_changes_after_it_was_sent_is_named(
    reference: Reference, run_dir: Path, name: str, broken: str, said: str
) -> None:
    """The error names a gradient that changed after it was sent: with the optimizer on the servers
    and overlap, Megatron sums a gradient that was assumed to be final."""
    assert re.search(said, reference.failure(name, run_dir, broken))


@pytest.mark.parametrize(
    "name",
    [
        "servers-tp2-dp2-overlap-acc2",
        pytest.param("servers-pp2-vpp2-dp2-overlap-acc4", marks=pytest.mark.thorough),
        pytest.param("node2-servers-dp4-overlap-acc2", marks=pytest.mark.thorough),
    ],
)
def test_no_gradient_changes_after_it_was_sent(
    reference: Reference, run_dir: Path, name: str
) -> None:
    """No gradient changes after it was sent, whatever Megatron does after the backward pass."""
    assert not reference.against(name, run_dir, "checked").misses


def test_passes_that_run_again_are_sent_again(reference: Reference, run_dir: Path) -> None:
    """If passes run again, with an overlapping server optimizer, only the second gradients
    count."""
    report = reference.against("servers-dp4-overlap-acc2", run_dir, "pushed-twice")
    assert len(report.misses) > 0
    assert all(" pushed " in miss or " pulled " in miss for miss in report.misses), report.misses
