"""A few seeds of `make chaos`, and the figures of `make soak`; a short soak is thorough."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.broken_job import Result
from tests.chaos.chaos import find_programs, play
from tests.chaos.seeds import Script, make_script
from tests.chaos.soak_figures import FLAT_BYTES, Sample, replayed, trends

BOUNDED = (1, 2, 3, 4, 5, 1023)
"""The last seed is kept and encrypted, and a worker is killed."""
LOSING_ALL = (5005,)
"""A job with replicas that loses servers and its scheduler."""
LASTING = {
    "servers and replicas": (2014, 2031),
    "the scheduler": (3001, 3002, 3006),
    "servers with copies": (4007,),
}
"""Jobs by the processes that they lose. tests/multiproc tests each kind of loss separately."""
MOST_JOBS_S = 240


@pytest.fixture(scope="module")
def programs() -> Path:
    return find_programs("")


def _play_rightly(seeds: Sequence[int], programs: Path, run_dir: Path) -> list[Result]:
    """Play the jobs of these seeds and check that none fails."""
    results = play([make_script(seed) for seed in seeds], programs, run_dir)
    wrong = {result.script.seed: result.wrong for result in results if result.wrong}
    assert not wrong
    return results


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_end_well_or_by_name(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(BOUNDED, programs, run_dir)
    # The seeds are chosen so that faults have effects.
    assert any(not result.survived for result in results)
    assert results[-1].lives > 1 and results[-1].ended["worker 0"] == 0


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_a_job_goes_on_without_servers_and_scheduler(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(LOSING_ALL, programs, run_dir)
    assert all(result.script.replicas for result in results)
    assert any(run_dir.glob("seed-*/scheduler-again-*.log"))
    assert any(run_dir.glob("seed-*/server-*-again-*.log"))


@pytest.mark.thorough
@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
@pytest.mark.parametrize("lost", LASTING)
def test_jobs_go_on_after_a_loss(programs: Path, run_dir: Path, lost: str) -> None:
    results = _play_rightly(LASTING[lost], programs, run_dir)
    if lost == "the scheduler":
        again = [log.read_text() for log in run_dir.glob("seed-*/scheduler-again-*.log")]
        assert any("goes on with the job of another one that died" in text for text in again)
    else:
        assert all(result.replaced > 0 for result in results)


@pytest.mark.requires("root")
def test_a_job_in_which_nothing_breaks_goes_on(programs: Path, run_dir: Path) -> None:
    script = Script(seed=0, workers=3, servers=2, rounds=10, tensors=3, size=400_000, faults=())
    (result,) = play([script], programs, run_dir)
    assert result.ended == dict.fromkeys(script.nodes, 0)
    assert not result.wrong


# Growth checks of `make soak`, and a run of some minutes as a thorough test.


CHAOS = Path(__file__).with_name("chaos.py")
EVERY_S = 30.0


def samples(
    growth_per_hour: float = 0,
    *,
    quantity: str = "memory",
    node: str = "server 0",
    per_life: float = 0,
    lives: int = 2,
) -> list[Sample]:
    """Make noisy samples of generations of an hour each, in which a quantity of a process grows."""
    noise = random.Random(3)
    taken = []
    for number in range(int(lives * 3600 / EVERY_S)):
        at_s = number * EVERY_S
        life = int(at_s // 3600)
        for name in ("server 0", "worker 0", "worker 1"):
            values = {"memory": 50 << 20, "descriptors": 20, "threads": 8}
            values["memory"] += noise.randrange(200_000)
            if name == node:
                values[quantity] += int(growth_per_hour * (at_s % 3600) / 3600 + per_life * life)
            if number % 10 == 7:  # a replaced connection
                values["descriptors"] += 6
            its_life = life if name.startswith("worker") else 0
            taken.append(Sample(at_s=at_s, node=name, life=its_life, **values))
    return taken


def grown(taken: list[Sample]) -> set[tuple[str, str, str]]:
    return {(trend.node, trend.quantity, trend.when) for trend in trends(taken) if not trend.flat}


@pytest.mark.parametrize(
    ("quantity", "growth"),
    [("memory", 8 * FLAT_BYTES), ("descriptors", 8), ("threads", 8)],
)
@pytest.mark.parametrize("node", ["server 0", "worker 1"])
def test_what_grows_is_found(quantity: str, growth: float, node: str) -> None:
    """Growth of a single rank is reported for all ranks together."""
    name = "ranks" if node.startswith("worker") else node
    wanted = {(name, quantity, f"life {life}") for life in (0, 1)}
    assert grown(samples(growth, quantity=quantity, node=node)) == wanted


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
    """A rank is killed once. The time is too short for growth checks."""
    command = [sys.executable, "-W", "ignore", str(CHAOS), "--minutes", "1"]
    command += ["--logs", str(run_dir / "soak")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert not [line for line in wrong if " grew by " not in line], done.stdout + done.stderr
    assert "the same loss to the last bit" in done.stdout
    assert (run_dir / "soak/samples.json").exists()
