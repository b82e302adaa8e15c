"""push_pull sums every dtype and size, over all ranks or groups, as declared, and refuses
unsupported arguments. The other parts of upstream's Python interface work, too."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import RUN_S, Cluster, Spawned, resident_bytes, wait_all

# The size of a page, so that tensors of moderate size have many partitions.
SMALL = 4096
# If a check fails on one rank, operations that wait for this rank end soon.
PATIENCE = {"BYTEPS_OP_TIMEOUT_S": "20"}

LONGER = {"BYTEPS_PARTITION_BYTES": str(SMALL), "BYTEPS_OP_TIMEOUT_S": "60"}

USUAL = ((1, 1), (4, 3))
"""Numbers of workers and servers; other numbers are thorough tests."""


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
    """5000 is not a multiple of the page size, so the engine rounds it up."""
    env = {"BYTEPS_PARTITION_BYTES": str(partition_bytes), **PATIENCE}
    cluster = make_cluster(workers=2, servers=2, env=env)
    dtypes = ["float32", "bfloat16", "int64"]
    cluster.run("sums:every_dtype", partition_bytes=partition_bytes, dtypes=dtypes)


def test_large_tensors(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=PATIENCE).run("sums:large")


@pytest.mark.parametrize(
    "env",
    [
        {
            "BYTEPS_DETERMINISTIC": "1",
            "BYTEPS_SERVER_WINDOW_BYTES": "1000000000",
            "BYTEPS_KEY_HASH_FN": "raw",
        },
        {
            "BYTEPS_SERVER_WIDE_FLOAT32": "0",
            "BYTEPS_PUSH_THREAD": "4",
            "BYTEPS_SERVER_ENGINE_THREAD": "4",
            "BYTEPS_KEY_HASH_FN": "djb2",
        },
    ],
    ids=["one-thread", "many-threads"],
)
def test_settings_change_no_sum(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    full = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE, **env}
    cluster = make_cluster(workers=3, servers=2, env=full)
    cluster.run("sums:every_dtype", partition_bytes=SMALL, dtypes=["float32", "float16"])


def test_wire_types(make_cluster: Callable[..., Cluster]) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    make_cluster(workers=3, servers=2, env=env).run("sums:wire")


def test_averages_of_large_integers(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=1, env=PATIENCE).run("sums:integers")


@pytest.mark.parametrize("workers", [1, 3])
def test_shapes_and_refusals(make_cluster: Callable[..., Cluster], workers: int) -> None:
    make_cluster(workers=workers, servers=1, env=PATIENCE).run("sums:shapes")


def test_every_order_with_many_threads(make_cluster: Callable[..., Cluster]) -> None:
    env = {
        "BYTEPS_PARTITION_BYTES": str(SMALL),
        **PATIENCE,
        "BYTEPS_PUSH_THREAD": "4",
        "BYTEPS_SERVER_ENGINE_THREAD": "8",
        "BYTEPS_SERVER_WINDOW_BYTES": "1000000000",
    }
    make_cluster(workers=3, servers=3, env=env).run("declare:every_order")


@pytest.mark.parametrize("program", ["rounds_in_flight", "wanted_part"])
def test_on_the_cpu(make_cluster: Callable[..., Cluster], program: str) -> None:
    """Programs of tests/gpu also run on the CPU."""
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


def test_who_is_far_ahead_waits(make_cluster: Callable[..., Cluster]) -> None:
    """DDP can cause this case: its buckets of the same length share a name, and another rank may
    pause."""
    cluster = make_cluster(workers=2, servers=1, env=PATIENCE)
    cluster.start("sums:far_ahead")
    cluster.wait_mark("begun", [0])
    cluster.go("begin")
    cluster.finish()


def test_sums_in_the_order_of_ranks(make_cluster: Callable[..., Cluster]) -> None:
    """The declaration of a tensor asks for this order. The setting of the servers is off."""
    cluster = make_cluster(workers=3, servers=2, env=PATIENCE)
    cluster.start("sums:in_order")
    for name in ("as they come", "in the order of ranks"):
        cluster.wait_mark(name, [0, 2])
        cluster.go(name)
    cluster.finish()


# Declaration, cutting and placement of tensors, and agreement of a group's members.


def test_released_names_are_declared_anew(make_cluster: Callable[..., Cluster]) -> None:
    """Parameters and sums are declared with another shape each time. Servers keep no more memory
    after 30 times than after 6; each time takes 12 MB."""
    cluster = make_cluster(workers=2, servers=2, env=LONGER)
    cluster.start("release:lives")
    held = []
    for number in (1, 2):
        cluster.wait_mark(f"looked{number}", range(2), RUN_S)
        held.append(sum(resident_bytes(server.pid) for server in cluster.servers))
        cluster.go(f"look{number}")
    cluster.finish()
    assert held[1] - held[0] <= 4 * (12 << 20), held


def test_who_goes_on_with_a_released_name(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=PATIENCE)
    cluster.start("release:goes_on_alone")
    cluster.wait_mark("released", [0])
    cluster.go("push")
    cluster.wait_mark("heard", [1])
    cluster.go("end")
    cluster.finish()


def test_many_tensors(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2).run("declare:many")


def test_hash_functions_must_agree(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2)
    cluster.start_nodes()
    for rank, name in enumerate(("djb2", "raw")):
        cluster.start_worker(rank, "declare:hashed", env={"BYTEPS_KEY_HASH_FN": name})
    cluster.wait_mark("declared", [0])
    cluster.go("second")
    cluster.wait_mark("done", [0, 1])
    cluster.go("end")
    cluster.finish()


def test_parameters_without_names(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2).run("declare:broadcast")


@pytest.mark.parametrize("servers", [3, 8])
def test_partitions_are_spread_over_servers(
    make_cluster: Callable[..., Cluster], servers: int
) -> None:
    """Servers get equal parts of a step's sums."""
    make_cluster(workers=1, servers=servers).run("declare:spread", servers=servers)


@pytest.mark.parametrize(
    ("rates", "slowest"), [(("25", "100"), 25), (("100", None), 0)], ids=["the-slowest", "unknown"]
)
def test_the_slowest_workers_link_decides(
    make_cluster: Callable[..., Cluster], rates: tuple[str | None, str | None], slowest: int
) -> None:
    """Partitions have the length for the slowest link, the same on all workers."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start_nodes()
    for rank, rate in enumerate(rates):
        env = {} if rate is None else {"BYTEPS_LINK_GBPS": rate}
        cluster.start_worker(rank, "declare:by_link", env=env, slowest=slowest)
    cluster.finish()


def test_another_hash_function_of_keys(make_cluster: Callable[..., Cluster]) -> None:
    env = {"BYTEPS_KEY_HASH_FN": "djb2"}
    make_cluster(workers=1, servers=3, env=env).run("declare:placed_by_hash")


# Sums over groups of ranks, and members that disagree.


def test_groups_under_one_name_do_not_mix(make_cluster: Callable[..., Cluster]) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    make_cluster(workers=4, servers=3, env=env).run("sums:disjoint")


def test_parts_of_a_sum(make_cluster: Callable[..., Cluster]) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(SMALL), **PATIENCE}
    make_cluster(workers=3, servers=2, env=env).run("sums:parts")


def test_members_that_disagree(make_cluster: Callable[..., Cluster]) -> None:
    """Every member gets an error with the key's name and both ranks, long before any timeout."""
    cluster = make_cluster(workers=2, servers=2, env={"BYTEPS_PARTITION_BYTES": str(SMALL)})
    cluster.run("sums:mismatch")
    errors = list(cluster.folder.glob("mismatch.*"))
    assert len(errors) == 2 * 4
    for error in errors:
        text = error.read_text()
        assert "layer.weight" in text
        assert re.search(r"worker 0\b.*worker 1\b|worker 1\b.*worker 0\b", text), text


# Upstream's Python interface: the supported part works, and the rest is not in the wheel.


def test_averages_of_gradients_are_those_of_ddp(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=PATIENCE).run("averages:as_ddp")


def test_gradients_of_the_same_averager_meet(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=PATIENCE).run("averages:identity")


def test_a_backward_pass_that_raises_on_one_rank(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=PATIENCE)
    cluster.start("averages:failed_pass")
    wait_all(list(cluster.workers.values()), RUN_S)
    cluster.demand_checks()


PROGRAMS = ("clipped", "compressed", "state", "broadcasts")


@pytest.mark.parametrize(
    ("workers", "program"),
    [(4, "distributed"), (1, "alone"), *((2, program) for program in PROGRAMS)],
)
def test_upstreams_optimizer(
    make_cluster: Callable[..., Cluster], workers: int, program: str
) -> None:
    cluster = make_cluster(workers=workers, servers=1, env={"BYTEPS_OP_TIMEOUT_S": "20"})
    cluster.run(f"optimizer:{program}", device="cpu")
    if program == "broadcasts":
        said = cluster.workers["worker 0"].text
        assert "1 handles were never synchronized, the first of 'forgotten'" in said, said


def test_a_server_that_is_imported(make_cluster: Callable[..., Cluster]) -> None:
    """Upstream starts servers by `DMLC_ROLE=server python -c 'import byteps.server'`."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start_scheduler()
    command = [sys.executable, "-c", "import byteps.server"]
    env = {**cluster.node_environment(), "DMLC_ROLE": "server"}
    cluster.servers.append(Spawned("server 0", command, env, cluster.folder))
    for rank in range(2):
        cluster.start_worker(rank, "optimizer:clipped", device="cpu")
    cluster.finish()


@pytest.mark.parametrize("name", ["__version__", "common", "torch.cross_barrier", "torch.parallel"])
def test_what_nothing_tries_is_not_installed(name: str) -> None:
    assert importlib.util.find_spec(f"byteps.{name}") is None
