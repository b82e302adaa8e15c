"""What `make soak` calls flat; and a run of some minutes, when thorough tests are asked for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from soak_figures import FLAT_BYTES, QUANTITIES, Sample, draw, replayed, slope, trends

SOAK = Path(__file__).with_name("soak.py")
EVERY_S = 5.0


def samples(
    growth_per_hour: float, *, quantity: str = "memory", node: str = "server 0", life: int = 0
) -> list[Sample]:
    """An hour of a process with some noise, of which one quantity grows."""
    noise = random.Random(3)
    base = {"memory": 50 << 20, "descriptors": 20, "threads": 8}
    found = []
    for number in range(int(3600 / EVERY_S)):
        at_s = number * EVERY_S
        values = {**base, "memory": base["memory"] + noise.randrange(200_000)}
        values[quantity] += int(growth_per_hour * at_s / 3600)
        if number % 50 == 7:  # a connection that is made again
            values["descriptors"] += 6
        found.append(Sample(at_s=at_s, node=node, life=life, **values))
    return found


def test_noise_and_peaks_are_flat() -> None:
    found = trends(samples(0))
    assert [one.quantity for one in found] == list(QUANTITIES)
    assert all(one.flat for one in found)
    # Only the last half counts: a process may grow while it warms up.
    early = samples(0)
    assert all(one.span_s <= 1800 for one in trends(early))


@pytest.mark.parametrize(
    ("quantity", "growth"),
    [("memory", 8 * FLAT_BYTES), ("descriptors", 4), ("threads", 4)],
)
def test_what_grows_is_found(quantity: str, growth: float) -> None:
    grown = [one.quantity for one in trends(samples(growth, quantity=quantity)) if not one.flat]
    assert grown == [quantity]


def test_a_slope_is_that_of_most_pairs() -> None:
    times = [float(i) for i in range(1000)]
    values = [3.0 * time for time in times]
    values[500] = 1e9
    assert slope(times, values) == pytest.approx(3.0)
    assert slope([1.0], [2.0]) == 0.0


def test_short_lives_of_a_worker_do_not_count() -> None:
    long = samples(0, node="worker 0", life=1)
    short = samples(1e9, node="worker 0", life=2)[:20]
    assert {one.life for one in trends([*long, *short])} == {1}


def test_steps_done_again_are_compared(run_dir: Path) -> None:
    lives = {0: {1: 5.0, 2: 4.0, 3: 3.0}, 1: {2: 4.0, 3: 3.5}}
    for life, steps in lives.items():
        lines = [
            json.dumps({"iteration": step, "loss": loss, "tokens": 1, "seconds": 1.0})
            for step, loss in steps.items()
        ]
        (run_dir / f"life-{life}.jsonl").write_text("\n".join(lines) + "\n")
    steps, again, wrong = replayed(sorted(run_dir.glob("life-*.jsonl")))
    assert (steps, again) == (3, 2)
    assert wrong == ["step 3 gave the loss 3.0, and 3.5 in life-1"]


def test_the_picture_is_the_same_file(run_dir: Path) -> None:
    pictures = [run_dir / "one.svg", run_dir / "other.svg"]
    for picture in pictures:
        draw(samples(0), [(10.0, "reset"), (20.0, "kill")], picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.thorough
@pytest.mark.requires("root")
@pytest.mark.timeout(3600)
def test_a_short_soak(run_dir: Path) -> None:
    """A rank is killed once. In so short a time nothing can be said of what is flat."""
    command = [sys.executable, "-W", "ignore", str(SOAK), "--minutes", "1", "--out", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert not [line for line in wrong if " grew by " not in line], done.stdout + done.stderr
    assert "the same loss to the last bit" in done.stdout
    assert (run_dir / "soak.svg").exists()
