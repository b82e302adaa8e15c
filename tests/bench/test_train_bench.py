"""bench/train_bench.py, from made-up launches to a short training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.training import run as train_bench
from bench.training.run import Trained
from tests.megatron.conftest import fork_server, tree, warm_python  # noqa: F401 (fixtures)

SMALL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]


def trained(backend: str, index: int, step_s: list[float], **changes: Any) -> Trained:
    usual: dict[str, Any] = {"tokens": 1000, "losses": [5.0, 4.0], "checksum": "a", "busy": 0.5}
    usual["gpu_bytes"] = 2_500_000_000
    return Trained(backend=backend, index=index, step_s=step_s, **(usual | changes))


LAUNCHES = [
    trained("byteps", 0, [0.1, 0.1, 9.0]),
    trained("all-reduce", 0, [0.2]),
    trained("byteps", 1, [0.2]),
    trained("all-reduce", 1, [0.25]),
]


def test_a_ratio_meets_its_threshold() -> None:
    assert train_bench.report(LAUNCHES, train_bench.parse(["--min-ratio", "1.4"]), []) == 0
    assert train_bench.report(LAUNCHES, train_bench.parse(["--min-ratio", "1.6"]), []) == 1


def test_launches_that_learnt_something_else() -> None:
    first = LAUNCHES[0]
    other = trained("all-reduce", 0, [0.2], checksum="b")
    apart = trained("all-reduce", 0, [0.2], losses=[5.0, 4.1], checksum="b")
    broken = trained("all-reduce", 0, [0.2], losses=[5.0, float("nan")], checksum="b")
    assert "with two workers they may not" in str(train_bench.complaint([first, other], 2))
    assert train_bench.complaint([first, other], 4) is None
    assert "the loss of step 2 differs by 2.5e-02" in str(train_bench.complaint([first, apart], 4))
    assert "the loss of step 2 differs by nan" in str(train_bench.complaint([first, broken], 4))
    options = train_bench.parse([])
    assert train_bench.report([first, apart], options, []) == 1


def words(folder: Path) -> list[str]:
    source = folder / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    usual = ["--data", str(source), "--data-cache", str(folder / "data"), "--timeout", "240"]
    return [*usual, "--steps", "4", "--warmup", "1", "--launches", "1"]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_a_short_training(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: str,
) -> None:
    monkeypatch.setenv("MEGATRON_CPU", "1")
    code = train_bench.main([*words(run_dir), "--workers", workers, "--", *SMALL])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "byteps over all-reduce: " in said.out and "times as fast" in said.out
