"""tests/layouts/parity.py --device cuda, as far as it can be seen without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpus
from layouts import parity
from layouts.gpt import report
from layouts.gpt.compare import Report
from layouts.gpt.rows import by_name
from layouts.job import Job
from layouts.platforms import CPU, CUDA, Platform


def test_the_page_has_every_layout(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def compare_all(
        layouts: list, folder: Path, platform: Platform, jobs: int, budget: float | None
    ) -> list[Report]:
        assert (platform, jobs, budget) == (CUDA, 1, 60.0)
        ran.extend(layout.name for layout in layouts)
        return [Report(layout=layout) for layout in layouts]

    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setattr(parity, "compare_all", compare_all)
    monkeypatch.setattr(report, "_gpus", lambda: "2 x a GPU")
    written = tmp_path / "gpu.md"
    words = ["--device", "cuda", "--markdown", str(written), "--budget", "60"]
    names = ["dp2", "node4-dp8-overlap", "do-fp32-scatter"]
    assert parity.main([*words, "--layout", *names]) == 0
    assert ran == names
    text = written.read_text()
    assert text.startswith("# Correctness on GPUs") and "on 2 x a GPU" in text
    assert all(f"| {name} | " in text for name in names)


def test_without_a_gpu_it_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 0)
    assert parity.main(["--device", "cuda", "--layout", "dp2"]) == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_only_the_cpu_platform_hides_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (layout,) = by_name(["dp2"])
    for platform, visible, stand_ins in ((CPU, "", "1"), (CUDA, "4,5", "0")):
        job = Job(tmp_path, "layouts.gpt.rank:train", layout.ranks, {}, platform)
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
    job = Job(tmp_path, "layouts.gpt.rank:train", 5, {}, CUDA, per_host, first_gpu=1)
    seen = []
    for rank in range(5):
        environment = job._environment(rank, 1)
        visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
        machine = environment["NCCL_HOSTID"].removeprefix("machine")
        seen.append((visible[int(environment["LOCAL_RANK"])], machine))
    assert seen == placed
