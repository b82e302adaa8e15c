"""Servers are lost in a training while others wait for their places: it makes no difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.job import Job
from tests.megatron.training_jobs import Trained, assert_same_run
from tests.multiproc.cluster import RUN_S, START_S, Cluster, Spawned

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
    "node-first": (4, ("--dpu-reduce-route", "node-first", *EARLY)),
    "servers": (2, ("--dpu-optimizer", *EARLY)),
    "servers-node-first": (4, ("--dpu-optimizer", "--bf16", *EARLY)),
    "servers-int8": (2, ("--dpu-optimizer", *EARLY, "--dpu-reduce-wire-dtype", "int8")),
}
COPIES = {**SETTINGS, "BYTEPS_BACKUP_STATE": "1"}
IN_EACH_RUN = ("fp32", "servers")


@pytest.fixture
def make_nodes(run_dir: Path) -> Iterator[Callable[[int, dict[str, str]], Cluster]]:
    """A scheduler and four servers, two of which wait, for so many ranks."""
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
    """One is killed in the second step, the other one in the third, within their sums.

    Of servers that keep the optimizer one is: another one's copy takes a moment.
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
