"""bps.declare, and what members of a group must agree on."""

from __future__ import annotations

from collections.abc import Callable

from tests.multiproc.cluster import Cluster


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
