"""What `make soak` calls flat; and a run of some minutes, when thorough tests are asked for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.soak_figures import FLAT_BYTES, QUANTITIES, Sample, replayed, slope, trends

SOAK = Path(__file__).with_name("soak.py")
EVERY_S = 30.0


def samples(
    growth_per_hour: float = 0,
    *,
    quantity: str = "memory",
    node: str = "server 0",
    per_life: float = 0,
    lives: int = 2,
) -> list[Sample]:
    """Lives of an hour each, with some noise, in which one quantity of a process grows."""
    noise = random.Random(3)
    found = []
    for number in range(int(lives * 3600 / EVERY_S)):
        at_s = number * EVERY_S
        life = int(at_s // 3600)
        for name in ("server 0", "worker 0", "worker 1"):
            values = {"memory": 50 << 20, "descriptors": 20, "threads": 8}
            values["memory"] += noise.randrange(200_000)
            if name == node:
                values[quantity] += int(growth_per_hour * (at_s % 3600) / 3600 + per_life * life)
            if number % 10 == 7:  # a connection that is made again
                values["descriptors"] += 6
            its_life = life if name.startswith("worker") else 0
            found.append(Sample(at_s=at_s, node=name, life=its_life, **values))
    return found


def grown(found: list[Sample]) -> set[tuple[str, str, str]]:
    return {(one.node, one.quantity, one.when) for one in trends(found) if not one.flat}


def test_noise_and_peaks_are_flat() -> None:
    found = trends(samples())
    assert {one.quantity for one in found} == set(QUANTITIES)
    assert {one.node for one in found} == {"server 0", "ranks"}
    assert all(one.flat for one in found)


@pytest.mark.parametrize(
    ("quantity", "growth"),
    [("memory", 8 * FLAT_BYTES), ("descriptors", 8), ("threads", 8)],
)
@pytest.mark.parametrize("node", ["server 0", "worker 1"])
def test_what_grows_is_found(quantity: str, growth: float, node: str) -> None:
    """Of ranks, which count together, though only one of them does."""
    name = "ranks" if node.startswith("worker") else node
    wanted = {(name, quantity, f"life {life}") for life in (0, 1)}
    assert grown(samples(growth, quantity=quantity, node=node)) == wanted


def test_what_a_server_keeps_of_each_life_is_found() -> None:
    found = samples(per_life=2 * FLAT_BYTES)
    assert grown(found) == {("server 0", "memory", "lives 0 to 1")}
    # A rank is another process in each life.
    assert not grown(samples(per_life=2 * FLAT_BYTES, node="worker 0"))


def test_a_slope_is_that_of_most_pairs() -> None:
    times = [float(i) for i in range(1000)]
    values = [3.0 * time for time in times]
    values[500] = 1e9
    assert slope(times, values) == pytest.approx(3.0)
    assert slope([1.0], [2.0]) == 0.0


def test_short_lives_do_not_count() -> None:
    long = samples(lives=1)
    for number in range(20):
        at_s = 3600 + number * EVERY_S
        for node in ("server 0", "worker 0", "worker 1"):
            memory = (50 << 20) + number * FLAT_BYTES
            life = 1 if node.startswith("worker") else 0
            long.append(
                Sample(at_s=at_s, node=node, life=life, memory=memory, descriptors=20, threads=8)
            )
    assert {one.when for one in trends(long)} == {"life 0"}


def test_steps_done_again_are_compared(run_dir: Path) -> None:
    lives = {0: {1: 5.0, 2: 4.0, 3: 3.0}, 1: {2: 4.0, 3: 3.5}}
    for life, steps in lives.items():
        lines = [
            json.dumps({"iteration": step, "loss": loss, "tokens": 1, "seconds": 1.0})
            for step, loss in steps.items()
        ]
        (run_dir / f"life-{life}.jsonl").write_text("\n".join(lines) + "\n")
    made, again, wrong = replayed(sorted(run_dir.glob("life-*.jsonl")))
    assert (made, again) == (3, 2)
    assert wrong == ["step 3 gave the loss 3.0, and 3.5 in life-1"]


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
    assert (run_dir / "soak.png").exists()
