"""Parallel layouts through BytePS and through all-reduce, by tests/layouts/parity.py.

`make parity` runs its whole table; here are those in which the parts that interact meet.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.gpt.compare import compare
from tests.layouts.gpt.outcome import Report
from tests.layouts.gpt.rows import LAYOUTS
from tests.layouts.gpt.runs import check, train
from tests.layouts.gpt.seen import RankSeen
from tests.layouts.gpt.updates import compare_updates
from tests.layouts.rows import named

REPRESENTATIVE = (
    "dp3-fp16-wire",
    "dp4-do-bf16-wire-acc2",
    "dp4-do-bf16-sent-as-int8-overlap",
    "tp2-dp2-overlap",
    "pp2-dp2-tied-acc2",
    "ep2-dp4-overlap-acc2",
    "cp2-dp2-do-bf16-wire",
    "node2-dp4-overlap-acc2",
    "dp2-do-bf16-wire-fp32-scatter-overlap",
    "servers-dp2-no-clip-frozen",
    "servers-tp2-pp2-dp2-tokens",
    "servers-dp4-do-bf16-wire-overlap-gather",
    "servers-dp2-mtp-detached-wait",
    "servers-tp2-dp2-fp16-wire-overflows",
    "servers-dp2-muon-overlap",
    "node2-servers-dp4-bf16-sent-as-int8-overlap",
    "ep2-dp2-mla-mtp-alltoall-do-bf16",
)

THOROUGH = (
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
"""Those whose parts meet in others as well."""


@pytest.mark.parametrize(
    "name",
    [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)],
)
def test_layout(fork_server: None, dataset: Dataset, run_dir: Path, name: str) -> None:
    (layout,) = named(LAYOUTS, [name])
    report = check(layout, run_dir / name, dataset)
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
    """Runs through all-reduce, each layout once."""

    def __init__(self, folder: Path, dataset: Dataset) -> None:
        self._folder = folder
        self._data = data_arguments(dataset)
        self._seen: dict[str, list[RankSeen]] = {}

    def failure(self, name: str, folder: Path, broken: str) -> str:
        """What the ranks of a run write whose reducer is broken so that it fails."""
        (layout,) = named(LAYOUTS, [name])
        job = train(
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
        """The report on a run of the layout whose reducer is broken."""
        (layout,) = named(LAYOUTS, [name])
        if name not in self._seen:
            job = train(layout, self._folder / name, self._data, through_byteps=False)
            self._seen[name] = job.results()
        job = train(
            layout,
            folder / broken,
            self._data,
            through_byteps=True,
            program="tests.megatron.rank_programs:train_layout",
            options={"broken": broken},
        )
        held = compare_updates if layout.servers else compare
        return held(layout, job.results(), self._seen[name])


@pytest.fixture(scope="module")
def reference(
    fork_server: None, tmp_path_factory: pytest.TempPathFactory, dataset: Dataset
) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), dataset)


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [
        ("tp2-dp2-overlap", "divisor", "not the rounded sum of two values"),
        ("tp2-dp2-overlap", "swapped-groups", "not the rounded sum of two values"),
        ("tp2-dp2-overlap", "swapped-buckets", "not the rounded sum of two values"),
        ("dp4-overlap", "divisor-once", "members got different sums"),
        pytest.param("dp4-overlap", "divisor-once", "float32: error", marks=pytest.mark.thorough),
        ("dp4-overlap", "stale", "float32: error"),
        pytest.param(
            *("dp4-do-bf16-wire-acc2", "stale", "bfloat16: error"), marks=pytest.mark.thorough
        ),
        ("servers-dp2-bf16-acc2", "undecayed", "parameters differ by"),
        pytest.param(
            *("servers-dp2-bf16-acc2", "undecayed", "updates are off by"),
            marks=pytest.mark.thorough,
        ),
        ("servers-dp2-bf16-acc2", "one-rank", "copies of "),
        ("servers-pp2-vpp2-dp2-overlap-acc4", "pushed-too-early", "norms differ by"),
        ("servers-tp2-dp2", "copies-counted", "norms differ by"),
        ("servers-tp2-dp2-overlap-acc2", "too-many-zeros", "gradients of the first step are 0"),
        ("servers-dp2-mtp-detached-wait", "one-norm", "norms differ by"),
        ("servers-dp2-fp16-wire", "not-scaled-back", "norms differ by"),
    ],
)
def test_a_broken_reducer_is_found_out(
    reference: Reference, run_dir: Path, name: str, broken: str, said: str
) -> None:
    report = reference.against(name, run_dir, broken)
    assert any(said in miss for miss in report.misses), report.misses
    # It was BytePS that was broken, not the run it is compared with.
    assert not any(miss.startswith("all-reduce") for miss in report.misses)
    assert report.theirs.worst < 0.02


def test_gradients_that_tensor_parallel_ranks_sum_hold_up_no_others(
    reference: Reference, run_dir: Path
) -> None:
    """With the optimizer on the servers, and overlap: norms have buckets of their own."""
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
    """With the optimizer on the servers, and overlap: Megatron sums a gradient that we take for
    complete."""
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
    """Whatever this Megatron does after the backward pass; the results are the same."""
    assert not reference.against(name, run_dir, "checked").misses


def test_passes_that_run_again_are_sent_again(reference: Reference, run_dir: Path) -> None:
    """With the optimizer on the servers, and overlap: the second gradients count, once."""
    report = reference.against("servers-dp4-overlap-acc2", run_dir, "pushed-twice")
    assert len(report.misses) > 0
    assert all(" pushed " in miss or " pulled " in miss for miss in report.misses), report.misses
