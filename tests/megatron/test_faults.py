"""Training when a rank or a server is lost within a step, when servers are lost and replaced, and
when a gradient is NaN."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from scripts.prepare_data import Dataset
from tests.layouts.job import Job, data_arguments
from tests.megatron.training_jobs import Trained, assert_same_run
from tests.multiproc.cluster import RUN_S, START_S, Cluster, Spawned

RunJob = Callable[..., Job]

# Speculative steps are kept, and Megatron compares the ranks' parameters in each step.
ARGUMENTS = (
    *("--bf16", "--use-dpu-reduce", "--dpu-optimizer", "--clip-grad", "100"),
    *("--overlap-grad-reduce", "--check-weight-hash-across-dp-replicas-interval", "1"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)
SERVERS = {"BYTEPS_EMBEDDED_SERVERS": "2", "BYTEPS_PARTITION_BYTES": "4096"}
# Number of steps that the other ranks make before they fail.
MADE = {"pushed": 2, "answered": 3}
# Servers are numbered as they register, so any of the four may be the killed one.
LOST = {
    "server": r"BytePSError: .*server [0-3]\b.*lost",
    # Megatron's own collectives may fail before BytePS does.
    "rank": r"worker 1\b.*was lost|Connection (closed|reset) by peer",
}


def digests_of(job: Job) -> list[str]:
    """Return digests of the parameters after each step, the same on both ranks."""
    texts = [(job.folder / f"digests.{rank}").read_text() for rank in range(job.ranks)]
    assert len(set(texts)) == 1
    return json.loads(texts[0])


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("server", "answered"),
        pytest.param("rank", "answered", marks=pytest.mark.thorough),
        pytest.param("server", "pushed", marks=pytest.mark.thorough),
        pytest.param("rank", "pushed", marks=pytest.mark.thorough),
    ],
)
def test_a_process_is_killed_within_a_step(
    run_job: RunJob, dataset: Dataset, run_dir: Path, victim: str, phase: str
) -> None:
    """When one process is killed, the other ranks end with an error that names it, and with the
    parameters of an uninterrupted run. The job resumes with the bits of that run."""
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
        # A failed step changes nothing. The step after it may have failed before its update.
        assert not left.exists() or left.read_text() == made[-1]
    rest = run("--load", folder, "--ckpt-step", "2")
    assert digests_of(rest) == expected[2:]
    for rank in range(2):
        wanted = [step.loss for step in whole.result(rank).steps]
        assert [step.loss for step in rest.result(rank).steps] == wanted[2:]


def test_servers_with_too_little_memory(run_job: RunJob, dataset: Dataset) -> None:
    """The job ends at its start, on all ranks. The error has the required and the available
    memory."""
    little = {**SERVERS, "BYTEPS_SERVER_STATE_BYTES": "100000"}
    words = [*data_arguments(dataset), *ARGUMENTS]
    job = run_job("train_faulty", 2, arguments=words, environment=little, fails=True)
    for rank in range(2):
        assert re.search(
            r"BytePSError: .*too little memory for the optimizer state of '.+': it needs \d+ bytes"
            r".*may keep 100000 \(BYTEPS_SERVER_STATE_BYTES\)",
            job.log_of(rank).read_text(errors="replace"),
        )
        # The rank has neither made nor begun a step.
        assert not (job.folder / f"digests.{rank}").exists()
        assert not (job.folder / f"left.{rank}").exists()


# Servers are lost during training while spares wait: the result is the same.


SETTINGS = {
    "BYTEPS_REPLACE_SERVERS_S": "60",
    "BYTEPS_PARTITION_BYTES": "4096",
    "BYTEPS_NODE_PIECE_BYTES": "2048",
}
EARLY = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
CASES = {
    "fp32": (2, EARLY),
    "bf16-wire": (2, ("--bf16", "--grad-reduce-in-bf16", *EARLY)),
    "sharded": (2, ("--use-distributed-optimizer", *EARLY)),
    "node-first": (4, ("--dpu-reduce-backend", "node-first", *EARLY)),
    "servers": (2, ("--dpu-optimizer", *EARLY)),
    "servers-node-first": (4, ("--dpu-optimizer", "--bf16", *EARLY)),
    "servers-int8": (2, ("--dpu-optimizer", *EARLY, "--dpu-reduce-wire-dtype", "int8")),
}
COPIES = {**SETTINGS, "BYTEPS_BACKUP_STATE": "1"}
IN_EACH_RUN = ("fp32", "servers-int8")


@pytest.fixture
def make_nodes(run_dir: Path) -> Iterator[Callable[[int, dict[str, str]], Cluster]]:
    """Start a scheduler and four servers, of which two are spares, for this number of ranks."""
    with ExitStack() as stack:

        def make(ranks: int, settings: dict[str, str]) -> Cluster:
            nodes = Cluster(run_dir / "nodes", None, workers=ranks, servers=2, env=settings)
            stack.enter_context(nodes)
            nodes.start_nodes()
            for server in nodes.servers:
                wait_for_text(server, "has taken this server")
            for _ in range(2):
                wait_for_text(nodes.start_server(), "waiting for the place of a server")
            return nodes

        yield make


def wait_for_text(node: Spawned, text: str) -> None:
    deadline = time.monotonic() + START_S
    while text not in node.text:
        assert node.running and time.monotonic() < deadline, node.text
        time.sleep(0.01)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in IN_EACH_RUN else pytest.mark.thorough)
        for case in CASES
    ],
)
def test_all_bits_are_those_of_a_run_that_lost_none(
    run_job: Callable[..., Job],
    dataset: Dataset,
    make_nodes: Callable[[int, dict[str, str]], Cluster],
    case: str,
) -> None:
    """One server is killed during the sums of the second step, and one during those of the third.

    If servers keep the optimizer, only one is killed, because copying its state takes time.
    """
    ranks, words = CASES[case]
    settings, deaths = (COPIES, 1) if case.startswith("servers") else (SETTINGS, 2)
    arguments = [*data_arguments(dataset), "--use-dpu-reduce", *words]
    per_host = ranks // 2
    whole = Trained.of(
        run_job("train", ranks, arguments=arguments, per_host=per_host, environment=SETTINGS)
    )
    nodes = make_nodes(ranks, settings)
    lost = nodes.servers[:deaths]
    where = {
        name: value
        for name, value in nodes.node_environment().items()
        if name.startswith(("DMLC_", "BYTEPS_"))
    }
    job = run_job(
        "train_without_servers",
        ranks,
        arguments=arguments,
        per_host=per_host,
        environment=where,
        victims=[server.pid for server in lost],
    )
    assert_same_run(Trained.of(job), whole)
    assert len(whole.losses) == 4
    for node in (nodes.scheduler, *nodes.servers[deaths : deaths + 2]):
        assert node.wait(RUN_S) == 0, node.text
    said = nodes.scheduler.text
    assert said.count("has taken the place of the server that was lost") == deaths, said


# A NaN gradient: found before it is summed, summed like any other, or skipped.


BACKENDS = {"byteps": ("--use-dpu-reduce",), "all-reduce": ()}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_check_ends_the_job(run_job: RunJob, dataset: Dataset, backend: tuple[str]) -> None:
    """The rank that finds the fault reports it, and the other rank does not wait for it."""
    arguments = [*data_arguments(dataset), *backend]
    job = run_job("train_poisoned", 2, fails=True, arguments=arguments)
    assert "found NaN in local grad norm for bucket #0" in job.log_of(1).read_text()
    assert "found NaN" not in job.log_of(0).read_text()


def test_without_the_check_both_backends_sum_it(run_job: RunJob, dataset: Dataset) -> None:
    """The sum is NaN in the same element as with all-reduce, on every rank, and in no other
    element."""
    arguments = [*data_arguments(dataset), "--no-check-for-nan-in-loss-and-grad"]
    where = []
    for backend in BACKENDS.values():
        job = run_job("train_poisoned", 2, arguments=[*arguments, *backend])
        for rank in range(2):
            (total,) = job.result(rank).steps[1].sums.values()
            where.append(torch.isnan(total.result).nonzero().tolist())
    assert where == [[[5]]] * 4


def test_with_the_optimizer_on_the_servers_the_step_is_skipped(
    run_job: RunJob, dataset: Dataset
) -> None:
    """All ranks skip the poisoned step. Training goes on, and ranks agree bit for bit. Servers step
    speculatively in the steps before and after it, which are clipped, but not in the last step."""
    arguments = [*data_arguments(dataset), "--no-check-for-nan-in-loss-and-grad"]
    arguments += ["--use-dpu-reduce", "--dpu-optimizer", "--overlap-grad-reduce"]
    job = run_job("train_poisoned", 2, arguments=arguments)
    for rank in range(2):
        norms = [step.grad_norm for step in job.result(rank).steps]
        is_none = [norm is None or math.isnan(norm) for norm in norms]
        assert is_none == [False, True, False, False]
    logs = job.log_of(0).read_text() + job.log_of(1).read_text()
    assert "number of skipped iterations:   1" in logs
    other = job.result(1).parameters
    for name, value in job.result(0).parameters.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, other[name]), name
