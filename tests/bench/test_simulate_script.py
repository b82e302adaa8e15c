"""bench/simulator/run.py: its table, its files, and its comparison with a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulator import run as simulate
from bench.simulator.scenario import payload_fraction

MIB = 1 << 20


def measurement(path: Path, *, factor: float = 1.0, link_bits: int = 800_000_000) -> Path:
    """A file of the benchmark's form, its figures ``factor`` times what was simulated."""
    topology = {"workers": 4, "servers": 4, "colocate": False}
    topology |= {"emulated_hosts": 8, "link_bits": link_bits, "mtu": 9000}
    rate = 100e6 * payload_fraction(9000)
    case = {"size": 64 * MIB, "dtype": "float32", "tensors": 1}
    # 4 of 64 partitions fill the pipeline; a ring sends 2 * 3/4 of the size.
    seconds = {"byteps": 64 * MIB / rate * (1 + 4 / 64), "gloo": 1.5 * 64 * MIB / rate}
    rows = [{"backend": b, "case": case, "p50_s": factor * s} for b, s in seconds.items()]
    content = {
        "schema": 1,
        "meta": {"settings": f"BYTEPS_MIN_PARTITION_BYTES={MIB} BYTEPS_PARTITION_BYTES={MIB}"},
        "runs": [{"name": "", "plan": {"topology": topology}, "rows": rows}],
    }
    path.write_text(json.dumps(content))
    return path


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "4,8", "--servers", "4,8", "--size", "64MiB", "--link", "800mbit"]
    words += ["--stragglers", "1:0.5", "--slow", "1@400mbit", "--partition", "1MiB"]
    assert simulate.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# 64MiB at 800mbit, partitions: 1MiB")
    assert [line.split()[:2] for line in lines[2:]] == [
        [workers, servers] for workers in ("4", "8") for servers in ("4", "8")
    ]
    # The slow worker's link is what all wait for.
    assert all(float(line.split()[3]) > 2 for line in lines[2:])


def test_a_measurement_that_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measurement(tmp_path / "m.json")
    assert simulate.main(["--check", str(path), "--tolerance", "0.001"]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_a_measurement_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measurement(tmp_path / "m.json", factor=1.1)
    assert simulate.main(["--check", str(path)]) == 1
    assert "largest difference 10.0%" in capsys.readouterr().out
