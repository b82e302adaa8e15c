"""parity.py --device cuda and te_layouts.py, as far as they can be seen without a GPU."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from scripts import gpus
from scripts.prepare_data import Dataset
from tests.layouts import command, parity, te_layouts
from tests.layouts.gpt import runs
from tests.layouts.gpt.outcome import Report
from tests.layouts.gpt.rows import LAYOUTS, Layout
from tests.layouts.gpt.te_rows import TE_LAYOUTS
from tests.layouts.job import Job
from tests.layouts.platforms import CPU, CUDA, CUDA_TE, Platform
from tests.layouts.rows import named

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_every_type(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def check(layout: Layout, folder: Path, dataset: Dataset, platform: Platform) -> Report:
        assert platform is CUDA
        ran.append(layout.name)
        return Report(layout=layout)

    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setattr(runs, "check", check)
    monkeypatch.setattr(command, "machine_of", lambda device: f"2x a GPU of {device}")
    written = tmp_path / "gpu.md"
    words = ["--device", "cuda", "--markdown", str(written), "--budget", "60"]
    names = ["dp2", "node4-dp8-overlap", "servers-lion"]
    assert parity.main([*words, "--layout", *names]) == 0
    assert ran == names
    text = written.read_text()
    assert text.startswith("# Correctness on GPUs") and "on 2x a GPU of cuda" in text
    assert "| fp32 | 2 | 0.00e+00 | 0.00e+00 | 0.0e+00 |" in text and "| refused | 1 | - |" in text
    assert "Not run: dp2-bf16-wire-overlap-acc2, " in text and "MISS" not in text


def test_rows_of_transformer_engine_are_put_into_the_document(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(layout: Layout, folder: Path, dataset: Dataset, platform: Platform) -> Report:
        assert platform is CUDA_TE
        return Report(layout=layout, same_bits=True)

    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setattr(runs, "check", check)
    monkeypatch.setattr(command, "machine_of", lambda device: f"2x a GPU of {device}")
    monkeypatch.setattr(metadata, "version", lambda name: f"9 of {name}")
    document = tmp_path / "gpu.md"
    shutil.copy(ROOT / "docs/results/correctness-gpu.md", document)
    before = document.read_text()
    assert te_layouts.main(["--markdown", str(document)]) == 0
    text = document.read_text()
    assert text.count("2x a GPU of cuda, Transformer Engine 9 of transformer-engine") == 2
    for layout in TE_LAYOUTS:
        assert text.count(f"| {layout.name} |") == 1
    # The rest of the page is as it was.
    assert before.partition("<!-- te-sums")[0] == text.partition("<!-- te-sums")[0]
    assert before.rpartition("<!-- end -->")[2] == text.rpartition("<!-- end -->")[2]


def test_without_a_gpu_it_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        parity.main(["--device", "cuda", "--layout", "dp2"])
    assert "sees no GPU" in capsys.readouterr().err


def test_only_the_cpu_platform_hides_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (layout,) = named(LAYOUTS, ["dp2"])
    for platform, visible, stand_ins in ((CPU, "", "1"), (CUDA, "4,5", "0")):
        job = Job(tmp_path, "tests.layouts.gpt.rank:train", layout.ranks, {}, platform)
        environment = job._environment(0, 1)
        assert environment["MEGATRON_CPU"] == stand_ins
        assert environment["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("per_host", "placed"),
    [
        # Three GPUs for five ranks, from the second GPU on: the fourth rank is on a second machine.
        (1, [("1", "0"), ("2", "0"), ("0", "0"), ("1", "1"), ("2", "1")]),
        (2, [("1", "0"), ("2", "0"), ("0", "1"), ("1", "1"), ("2", "2")]),
        (4, [("1", "0"), ("2", "0"), ("0", "0"), ("1", "1"), ("2", "1")]),
    ],
)
def test_ranks_that_outnumber_gpus_share_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    per_host: int,
    placed: list[tuple[str, str]],
) -> None:
    """NCCL refuses two ranks of one machine on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    job = Job(tmp_path, "tests.layouts.gpt.rank:train", 5, {}, CUDA, per_host, first_gpu=1)
    seen = []
    for rank in range(5):
        environment = job._environment(rank, 1)
        visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
        machine = environment["NCCL_HOSTID"].removeprefix("machine")
        seen.append((visible[int(environment["LOCAL_RANK"])], machine))
    assert seen == placed
