"""scripts/examples/slurm.sbatch, in a real Slurm whose nodes are emulated hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.cluster import HERE, REPOSITORY
from tests.multiproc.slurm import SlurmCluster

SCRIPT = REPOSITORY / "scripts/examples/slurm.sbatch"
JOB = HERE / "jobs/scripts_job.py"
NODES = 4

pytestmark = [
    pytest.mark.requires("root", "slurm"),
    pytest.mark.thorough,
    pytest.mark.timeout(900),
]


@pytest.fixture
def slurm(run_dir: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(run_dir / "slurm", NODES) as cluster:
        yield cluster


def submit(slurm: SlurmCluster, folder: Path, *job: str, export: str = "") -> tuple[int, str]:
    """The status that the job ended with, and what it printed."""
    output = folder / "job.log"
    ended = slurm.run(
        "sbatch", "--wait", f"--nodes={NODES}", f"--output={output}",
        f"--export=ALL{export}", str(SCRIPT), *job, timeout_s=600,
    )  # fmt: skip
    said = output.read_text(errors="replace") if output.exists() else ""
    return ended.returncode, f"{ended.stdout}{ended.stderr}\n{said}"


def ranks_of(said: str) -> dict[str, str]:
    """What each rank says of its sums, by rank."""
    return dict(re.findall(r"rank (\d) of (\d): sums are right", said))


def test_half_of_the_nodes_train(slurm: SlurmCluster, run_dir: Path) -> None:
    status, said = submit(slurm, run_dir, str(JOB), "once", str(run_dir))
    assert status == 0, said
    assert ranks_of(said) == {"0": "2", "1": "2"}, said
    # The scheduler and the workers are on the first nodes, the servers on the last.
    servers = set(re.findall(r"address (10\.77\.0\.\d+) .*NUMA", said))
    assert {"10.77.0.3", "10.77.0.4"} <= servers, said


def test_three_nodes_of_two_ranks_and_one_server(slurm: SlurmCluster, run_dir: Path) -> None:
    export = ",SERVER_NODES=1,GPUS_PER_NODE=2"
    status, said = submit(slurm, run_dir, str(JOB), "once", str(run_dir), export=export)
    assert status == 0, said
    assert ranks_of(said) == {str(rank): "6" for rank in range(6)}, said


def test_a_failure_ends_the_job_with_its_status(slurm: SlurmCluster, run_dir: Path) -> None:
    # The program fails at once: it is given no folder.
    status, said = submit(slurm, run_dir, str(JOB), "once")
    assert status != 0, said
    assert "IndexError" in said
    # Nothing of the job is left on any node.
    assert slurm.run("squeue", "--noheader").stdout.strip() == ""
