"""What any transport has to do, over TCP and over RDMA alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.rdma.transports import VARIANTS, Transport

PAGE = 4096
INLINE = 1024
PATIENCE = {"BYTEPS_OP_TIMEOUT_S": "60"}
ROUNDS = 300
"""A leak of one registration, file or tensor a round stands far above what is allowed."""

each = pytest.mark.transports("tcp", "rdma")
each_variant = pytest.mark.transports("tcp", *VARIANTS)

Make = Callable[..., Cluster]


@each_variant
def test_sizes_around_the_limits(make_over: Make) -> None:
    """Around what fits a small message, a partition, and none."""
    env = {"BYTEPS_PARTITION_BYTES": str(2 * PAGE), "BYTEPS_RDMA_INLINE_BYTES": str(INLINE)}
    around = [*range(INLINE - 4, INLINE + 5), *range(INLINE - 400, INLINE, 37)]
    counts = [1, 2, 3, 63, 64, 65, *around, PAGE - 1, PAGE, PAGE + 1]
    counts += [2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 20 * PAGE + 5]
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("planes:sizes", counts=counts)


@pytest.mark.transports("tcp", "rdma", "rdma-one-plane", "rdma-shallow")
def test_many_in_flight(make_over: Make) -> None:
    """More than any queue holds, both ways at once."""
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE), "BYTEPS_SERVER_WINDOW_BYTES": "1000000000"}
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("planes:many", count=150)


@each
def test_several_peers(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    make_over(workers=4, servers=3, env={**env, **PATIENCE}).run("planes:many", count=60)


@each
def test_every_dtype_and_size(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    cluster = make_over(workers=2, servers=2, env={**env, **PATIENCE})
    cluster.run("sums:every_dtype", partition_bytes=PAGE)


@pytest.mark.transports("tcp", "rdma", "rdma-3-endpoints")
def test_large_tensors(make_over: Make) -> None:
    make_over(workers=2, servers=2, env=PATIENCE).run("sums:large")


@each
def test_wire_types(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("sums:wire")


@each
def test_few_bits(make_over: Make) -> None:
    """To the bit those of a reference, which knows of no transport."""
    env = {**PATIENCE, "BYTEPS_DETERMINISTIC": "1"}
    make_over(workers=3, servers=2, env=env).run("few_bits:sums")


@each
def test_groups(make_over: Make) -> None:
    make_over(workers=4, servers=2, env=PATIENCE).run("groups:disjoint")


@each
def test_leaving_and_coming_back(make_over: Make) -> None:
    make_over(workers=2, servers=1, env=PATIENCE).run("observed:two_lives")


@pytest.mark.transports("tcp", "rdma", "rdma-one-plane")
def test_many_rounds_leave_nothing(make_over: Make, transport: Transport) -> None:
    """No registration, no file, no memory, in workers; servers are watched from outside."""
    cluster = make_over(workers=2, servers=1, env=PATIENCE)
    cluster.run("planes:rounds", rdma=transport.is_rdma, rounds=ROUNDS, timeout_s=600)
