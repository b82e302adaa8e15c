"""The closed forms against numbers worked out by hand, and in their limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from byteps import cost_model as costmodel

M, B = 64e6, 8e6
M_OVER_B = 8.0


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.0), (2, 8.0), (4, 12.0), (8, 14.0)])
def test_ring(workers: int, seconds: float) -> None:
    assert costmodel.ring(workers, M, B) == pytest.approx(seconds)
    assert costmodel.colocated(workers, M, B) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("workers", "servers", "seconds"),
    [(4, 4, 8.0), (4, 8, 8.0), (4, 2, 16.0), (4, 1, 32.0), (8, 6, 8 * 8 / 6)],
)
def test_servers_on_machines_of_their_own(workers: int, servers: int, seconds: float) -> None:
    assert costmodel.own_machines(workers, servers, M, B) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("workers", "servers", "over_m_b"),
    # 4 + 2: 2*4*3 / (16 + 8 - 4) = 24/20; 8 + 4: 2*8*7 / (64 + 32 - 8) = 112/88.
    [(4, 0, 1.5), (4, 2, 1.2), (4, 4, 1.0), (4, 9, 1.0), (8, 4, 112 / 88), (2, 1, 1.0)],
)
def test_servers_on_both_kinds_of_machine(workers: int, servers: int, over_m_b: float) -> None:
    assert costmodel.both_kinds(workers, servers, M, B) == pytest.approx(over_m_b * M_OVER_B)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_best_shares_are_all_of_it_and_no_others_are_better(workers: int) -> None:
    for servers in range(1, workers + 2):
        shares = costmodel.best_shares(workers, servers)
        assert servers * shares.extra + workers * shares.beside == pytest.approx(1.0)
        best = costmodel.both_kinds(workers, servers, 1.0, 1.0)
        for moved in (-0.01, 0.01):
            beside = shares.beside + moved / workers
            if beside < 0:
                continue
            extra = (1 - workers * beside) / servers
            assert max(workers * extra, 1 + (workers - 2) * beside) >= best - 1e-12


def test_gain_over_a_ring() -> None:
    assert [costmodel.gain(2, k) for k in (0, 1, 2, 5)] == [1, 1, 1, 1]
    assert costmodel.gain(4, 4) == pytest.approx(1.5)
    assert costmodel.gain(8, 8) == pytest.approx(1.75)
    assert costmodel.gain(10**6, 10**6) == pytest.approx(2.0, rel=1e-5)
    for workers in (2, 4, 7, 32):
        for servers in range(workers + 2):
            ratio = costmodel.ring(workers, M, B) / costmodel.both_kinds(workers, servers, M, B)
            assert costmodel.gain(workers, servers) == pytest.approx(ratio)


def test_bytes_per_parameter() -> None:
    assert [scheme.bytes_per_parameter() for scheme in costmodel.SCHEMES] == [8, 4, 4, 2]
    assert [scheme.bytes_per_parameter(4) for scheme in costmodel.SCHEMES] == [6, 3, 4, 2]


def test_fill_of_the_partitions() -> None:
    assert costmodel.partitions_fill(4, 4, 1e6, B) == pytest.approx(0.5)
    assert costmodel.partitions_fill(8, 4, 1e6, B) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: costmodel.ring(0, M, B),
        lambda: costmodel.own_machines(4, 0, M, B),
        lambda: costmodel.both_kinds(4, -1, M, B),
        lambda: costmodel.ring(4, -1.0, B),
        lambda: costmodel.ring(4, M, 0.0),
    ],
)
def test_numbers_that_make_no_sense(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"there must be one|neither may be"):
        call()


@pytest.mark.parametrize(
    ("hosts", "extra", "per_machine", "local"),
    # x : y = 2(n-1) : n-k, as few processes as that takes within 3 %.
    [
        (4, 2, 3, 1),
        (4, 4, 1, 0),
        (4, 6, 1, 0),
        (4, 1, 2, 1),
        (8, 2, 2, 1),
        (4, 0, 1, 1),
        (8, 4, 3, 1),
    ],
)
def test_numbers_of_processes_stand_for_shares(
    hosts: int, extra: int, per_machine: int, local: int
) -> None:
    servers = costmodel.best_servers(hosts, extra)
    assert (servers.per_machine, servers.local) == (per_machine, local)


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 16, 64])
def test_every_number_of_machines_is_within_three_percent_of_the_best(hosts: int) -> None:
    for extra in range(1, hosts + 2):
        servers = costmodel.best_servers(hosts, extra)
        seconds = costmodel.push_pull(servers, M, M).seconds(B, B)
        assert seconds <= 1.031 * costmodel.both_kinds(hosts, extra, M, B)
        assert seconds <= costmodel.ring(hosts, M, B) * 1.031


def test_the_load_of_a_push_pull_that_pulls_less() -> None:
    """A sharded optimizer: all is pushed, a quarter comes back to each host."""
    own = costmodel.Servers(hosts=4, extra=2)
    assert costmodel.push_pull(own, 8.0, 2.0) == costmodel.Load(host=8.0, server=16.0)
    # One server on each host: 6 of a host's 8 leave it, and 2 * 3 / 4 of its server's answers.
    beside = costmodel.Servers(hosts=4, extra=0, local=1)
    assert costmodel.push_pull(beside, 8.0, 2.0).host == pytest.approx(6 + 1.5)
    assert costmodel.push_pull(beside, 8.0, 8.0).host == pytest.approx(12.0), "as a ring's"


def test_collectives_load_the_card_once_for_all_ranks_of_a_host() -> None:
    hosts = (0, 0, 1, 1, 2, 2, 3, 3)
    assert costmodel.reduce_scatters([hosts], 8.0).host == pytest.approx(7.0)
    assert costmodel.all_reduces([hosts], 8.0).host == pytest.approx(12.0)
    assert costmodel.all_reduces([(0, 0), (1, 1)], 8.0).host == 0.0
    # Two rings through the same hosts.
    assert costmodel.all_reduces([(0, 1), (0, 1)], 4.0).host == pytest.approx(8.0)
    with pytest.raises(ValueError, match="a host and a server at least"):
        costmodel.Servers(hosts=1, extra=0)
