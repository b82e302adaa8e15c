"""Training with the optimizer on the servers, when a rank or a server is lost within a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.job import Job

RunJob = Callable[..., Job]

# Steps are kept, not made again; in each of them Megatron compares the ranks' parameters.
ARGUMENTS = (
    *("--bf16", "--use-dpu-reduce", "--dpu-optimizer", "--clip-grad", "100"),
    *("--overlap-grad-reduce", "--check-weight-hash-across-dp-replicas-interval", "1"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)
SERVERS = {"BYTEPS_EMBEDDED_SERVERS": "2", "BYTEPS_PARTITION_BYTES": "4096"}
# How many steps the others have made when they fail.
MADE = {"pushed": 2, "answered": 3}
LOST = {
    "server": r"BytePSError: .*server [01]\b.*lost",
    # Megatron's own collectives may be the first to tell.
    "rank": r"worker 1\b.*was lost|Connection (closed|reset) by peer",
}


def digests_of(job: Job) -> list[str]:
    """Of the parameters after each step, the same on both ranks."""
    found = [(job.folder / f"digests.{rank}").read_text() for rank in range(job.ranks)]
    assert len(set(found)) == 1
    return json.loads(found[0])


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("server", "answered"),
        pytest.param("rank", "answered", marks=pytest.mark.thorough),
        pytest.param("server", "pushed", marks=pytest.mark.thorough),
        pytest.param("rank", "pushed", marks=pytest.mark.thorough),
    ],
)
def test_one_is_killed_within_a_step(
    run_job: RunJob, dataset: Dataset, run_dir: Path, victim: str, phase: str
) -> None:
    """The others end with an error that names it, with the parameters that the ranks of an
    uninterrupted run have. The job resumes from its checkpoint to the bits of that run."""
    folder = str(run_dir / "checkpoint")

    def run(*arguments: str, **settings: object) -> Job:
        words = [*data_arguments(dataset), *ARGUMENTS, *arguments]
        return run_job("train_faulty", 2, arguments=words, environment=SERVERS, **settings)

    whole = run()
    expected = digests_of(whole)
    assert len(set(expected)) == 4
    save = ("--save", folder, "--save-interval", "2")
    broken = run(*save, victim=victim, phase=phase, fails=True)
    for rank in range(1 if victim == "rank" else 2):
        assert re.search(LOST[victim], broken.log_of(rank).read_text(errors="replace"))
        made = json.loads((broken.folder / f"digests.{rank}").read_text())
        assert made == expected[: MADE[phase]]
        left = broken.folder / f"left.{rank}"
        # Nothing is left of a step that failed; the next one may have failed before its update.
        assert not left.exists() or left.read_text() == made[-1]
    rest = run("--load", folder, "--ckpt-step", "2")
    assert digests_of(rest) == expected[2:]
    for rank in range(2):
        wanted = [step.loss for step in whole.result(rank).steps]
        assert [step.loss for step in rest.result(rank).steps] == wanted[2:]


def test_servers_with_too_little_memory(run_job: RunJob, dataset: Dataset) -> None:
    """The job ends at its start, on all ranks, and says what is needed and what there is."""
    little = {**SERVERS, "BYTEPS_SERVER_STATE_BYTES": "100000"}
    words = [*data_arguments(dataset), *ARGUMENTS]
    job = run_job("train_faulty", 2, arguments=words, environment=little, fails=True)
    for rank in range(2):
        assert re.search(
            r"BytePSError: .*too little memory for the optimizer state of '.+': it needs \d+ bytes"
            r".*may keep 100000 \(BYTEPS_SERVER_STATE_BYTES\)",
            job.log_of(rank).read_text(errors="replace"),
        )
        # No step was made, and none was begun.
        assert not (job.folder / f"digests.{rank}").exists()
        assert not (job.folder / f"left.{rank}").exists()
