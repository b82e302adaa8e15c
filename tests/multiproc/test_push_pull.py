"""push_pull sums every dtype and size, in any order, and refuses what it cannot sum."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster

# A page: tensors of moderate size then have many partitions.
SMALL = 4096
# An operation that one rank's failed check left alone ends the test soon.
PATIENCE = {"BYTEPS_OP_TIMEOUT_S": "20"}

LONGER = {"BYTEPS_PARTITION_BYTES": str(SMALL), "BYTEPS_OP_TIMEOUT_S": "60"}

USUAL = ((1, 1), (2, 2), (3, 3), (4, 1))
"""Workers and servers; the other numbers are thorough."""


@pytest.mark.parametrize(
    ("workers", "servers"),
    [
        pytest.param(
            workers, servers, marks=[] if (workers, servers) in USUAL else [pytest.mark.thorough]
        )
        for workers in (1, 2, 3, 4)
        for servers in (1, 2, 3)
    ],
)
def test_every_dtype_and_size(
    make_cluster: Callable[..., Cluster], workers: int, servers: int
) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    cluster = make_cluster(workers=workers, servers=servers, env=env)
    cluster.run("sums:every_dtype", partition_bytes=SMALL)


@pytest.mark.parametrize("partition_bytes", [5000, pytest.param(65536, marks=pytest.mark.thorough)])
def test_partition_sizes(make_cluster: Callable[..., Cluster], partition_bytes: int) -> None:
    """5000 is no whole number of pages: the engine rounds it up."""
    env = {"BYTEPS_PARTITION_BYTES": str(partition_bytes), **PATIENCE}
    cluster = make_cluster(workers=2, servers=2, env=env)
    dtypes = ["float32", "bfloat16", "int64"]
    cluster.run("sums:every_dtype", partition_bytes=partition_bytes, dtypes=dtypes)


@pytest.mark.parametrize("env", [{}, {"BYTEPS_PARTITION_BYTES": "65536"}], ids=["default", "64K"])
def test_large_tensors(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    make_cluster(workers=2, servers=2, env={**env, **PATIENCE}).run("sums:large")


@pytest.mark.parametrize(
    "env",
    [
        {"BYTEPS_DETERMINISTIC": "1"},
        {"BYTEPS_SERVER_WIDE_FLOAT32": "0"},
        {"BYTEPS_PUSH_THREAD": "4", "BYTEPS_SERVER_ENGINE_THREAD": "4"},
        {"BYTEPS_SERVER_WINDOW_BYTES": "1000000000"},
        *({"BYTEPS_KEY_HASH_FN": name} for name in ("raw", "djb2")),
    ],
    ids=lambda env: ",".join(f"{name[7:]}={value}" for name, value in env.items()),
)
def test_settings_change_no_sum(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    full = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE, **env}
    cluster = make_cluster(workers=3, servers=2, env=full)
    cluster.run("sums:every_dtype", partition_bytes=SMALL, dtypes=["float32", "float16"])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_wire_types(make_cluster: Callable[..., Cluster], workers: int) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    make_cluster(workers=workers, servers=2, env=env).run("sums:wire")


@pytest.mark.parametrize("workers", [1, 3])
def test_shapes_and_refusals(make_cluster: Callable[..., Cluster], workers: int) -> None:
    make_cluster(workers=workers, servers=1, env=PATIENCE).run("sums:shapes")


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 3)])
def test_every_order(make_cluster: Callable[..., Cluster], workers: int, servers: int) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    make_cluster(workers=workers, servers=servers, env=env).run("handles:every_order")


def test_every_order_with_many_threads(make_cluster: Callable[..., Cluster]) -> None:
    env = {
        "BYTEPS_PARTITION_BYTES": str(SMALL),
        **PATIENCE,
        "BYTEPS_PUSH_THREAD": "4",
        "BYTEPS_SERVER_ENGINE_THREAD": "8",
        "BYTEPS_SERVER_WINDOW_BYTES": "1000000000",
    }
    make_cluster(workers=2, servers=2, env=env).run("handles:every_order")


@pytest.mark.parametrize(
    "program", ["every_dtype", "rounds_in_flight", "wire_types", "wanted_part"]
)
def test_on_the_cpu(make_cluster: Callable[..., Cluster], program: str) -> None:
    """The programs of tests/gpu."""
    cluster = make_cluster(workers=2, servers=2, env=LONGER)
    cluster.run(f"devices:{program}", device="cpu")


def test_synchronize_can_be_interrupted(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=LONGER)
    cluster.start("devices:interrupted", device="cpu")
    cluster.wait_mark("waiting", [0])
    cluster.workers["worker 0"].send(signal.SIGINT)
    cluster.wait_mark("interrupted", [0])
    cluster.go("push")
    cluster.finish()
