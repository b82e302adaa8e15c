"""bench/parity.py --device cuda, as far as it can be seen without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity
from paritykit import report
from paritykit.compare import Report
from paritykit.forked import Job
from paritykit.layouts import by_name
from paritykit.platforms import CPU, CUDA, Platform


def test_layouts_that_need_more_gpus_are_skipped_and_named(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def compare_all(layouts: list, folder: Path, platform: Platform, jobs: int) -> list[Report]:
        assert (platform, jobs) == (CUDA, 1)
        ran.extend(layout.name for layout in layouts)
        return [Report(layout=layout) for layout in layouts]

    monkeypatch.setattr(parity, "count_gpus", lambda: 2)
    monkeypatch.setattr(parity, "compare_all", compare_all)
    monkeypatch.setattr(report, "_gpus", lambda: "2 x a GPU")
    written = tmp_path / "gpu.md"
    words = ["--device", "cuda", "--layout", "dp2", "dp8-do-overlap", "--markdown", str(written)]
    assert parity.main(words) == 0
    assert ran == ["dp2"]
    assert "dp8-do-overlap: skipped, needs 8 GPUs" in capsys.readouterr().out
    text = written.read_text()
    assert text.startswith("# Correctness on GPUs") and "on 2 x a GPU" in text
    assert "| dp2 | 2 |" in text and "dp8-do-overlap (8)" in text


def test_without_a_gpu_it_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "count_gpus", lambda: 0)
    assert parity.main(["--device", "cuda", "--layout", "dp2"]) == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_only_the_cpu_platform_hides_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (layout,) = by_name(["dp2"])
    for platform, visible, stand_ins in ((CPU, "", "1"), (CUDA, None, "0")):
        job = Job(tmp_path, "paritykit.rank:train", layout.ranks, {}, platform)
        environment = job._environment(0, 1)
        assert environment["MEGATRON_CPU"] == stand_ins
        assert environment.get("CUDA_VISIBLE_DEVICES") == visible
