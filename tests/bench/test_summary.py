"""Figures from samples: medians, spreads, limits, thresholds."""

from __future__ import annotations

import pytest

from bench.kit.plan import Topology
from bench.pushpull.gates import Gate, judge
from bench.pushpull.limits import busiest_link, least_seconds
from bench.pushpull.measure import iteration_seconds
from bench.pushpull.summary import percentile, ratio, row
from tests.bench.made_up import CASE, make_run


def test_percentiles_are_samples() -> None:
    samples = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(samples, 50) == 3.0
    assert percentile(samples, 99) == 5.0
    assert percentile([7.0], 50) == 7.0
    assert percentile(list(range(1, 101)), 99) == 99


def test_the_slowest_rank_counts() -> None:
    # Rank 1 begins 2 s after rank 0, which therefore waits for it.
    spans = [(0, 5_000_000_000), (2_000_000_000, 6_000_000_000)]
    assert iteration_seconds(spans, one_clock=True) == 4.0
    assert iteration_seconds(spans, one_clock=False) == 5.0


@pytest.mark.parametrize(
    ("backend", "workers", "servers", "colocate", "share"),
    [
        ("gloo", 2, 1, False, 1.0),
        ("gloo", 4, 4, False, 1.5),
        ("nccl", 8, 8, False, 1.75),
        ("byteps", 4, 4, False, 1.0),
        ("byteps", 4, 2, False, 2.0),
        ("byteps", 2, 4, False, 1.0),
        ("byteps", 4, 4, True, 1.5),
        ("byteps", 2, 2, True, 1.0),
        ("byteps", 8, 1, True, 7.0),
        ("byteps", 1, 1, True, 0.0),
    ],
)
def test_the_busiest_link(
    backend: str, workers: int, servers: int, colocate: bool, share: float
) -> None:
    topology = Topology(workers=workers, servers=servers, colocate=colocate)
    assert busiest_link(backend, topology) == pytest.approx(share)


@pytest.mark.parametrize(
    ("backend", "share"),
    # Four hosts of two ranks: 2 * 7/8 in a flat ring, 2 * 3/4 in two levels, once through servers.
    [("gloo", 1.75), ("gloo-nodes", 1.5), ("nccl", 1.5), ("byteps", 1.0)],
)
def test_the_busiest_link_of_hosts_with_two_ranks(backend: str, share: float) -> None:
    topology = Topology(workers=8, ranks_per_host=2, servers=4)
    assert busiest_link(backend, topology) == pytest.approx(share)


def test_the_busiest_link_with_servers_of_both_kinds() -> None:
    """x = 3/10 on each machine, y = 1/10 next to each worker: 4 * 3/10 = 1 + 2 * 1/10."""
    both = Topology(workers=4, servers=2, servers_per_machine=3, local_servers=1)
    assert busiest_link("byteps", both) == pytest.approx(1.2)


def test_the_limit_counts_all_nics() -> None:
    one = Topology(workers=2, servers=1, emulated_hosts=3, link_bits=8_000_000)
    two = Topology(**{**one.__dict__, "nics_per_host": 2})
    assert least_seconds("byteps", one, 1_000_000) == pytest.approx(2.0)
    assert least_seconds("byteps", two, 1_000_000) == pytest.approx(1.0)


def test_no_limit_without_a_link() -> None:
    assert least_seconds("byteps", Topology(workers=2, servers=1), 4096) is None


def test_a_row_takes_the_median_of_the_launches_medians() -> None:
    run = make_run(
        {"byteps": [[1.0, 1.1, 1.2], [1.25, 1.25, 9.0], [2.0, 2.0, 2.0]], "gloo": [[3.0] * 3] * 3}
    )
    found = row(run, "byteps", CASE)
    assert found.p50_s == 1.25
    assert found.p99_s == 9.0
    assert found.algbw == pytest.approx((1 << 20) / 1.25)
    assert found.busbw is None
    # 1 MiB over 8 MiBit/s takes a second.
    assert found.of_limit == pytest.approx(1 / 1.25)
    assert found.cpu_s_per_gb == pytest.approx(0.4 / 3 * 1e9 / (1 << 20))
    gloo = row(run, "gloo", CASE)
    assert gloo.servers is None
    assert gloo.of_limit == pytest.approx(1.5 / 3.0)
    assert gloo.busbw == pytest.approx(1.5 * (1 << 20) / 3.0)
    assert gloo.cpu_s_per_gb == pytest.approx(0.3 / 3 * 1e9 / (1 << 20))


def test_a_ratio_pairs_the_launches_of_a_round() -> None:
    run = make_run({"byteps": [[1.0], [2.0], [1.0]], "gloo": [[1.5], [4.0], [1.4]]})
    found = ratio(run.of("byteps", CASE), run.of("gloo", CASE))
    assert (found.value, found.low, found.high) == (1.5, 1.4, 2.0)
    assert found.launches == 3


def test_a_round_that_was_too_busy_is_left_out_for_all() -> None:
    run = make_run({"byteps": [[1.0], [5.0]], "gloo": [[1.5], [1.5]]}, busy={1: 0.9})
    assert row(run, "byteps", CASE).p50_s == 1.0
    assert len(run.of("gloo", CASE)) == 1


def test_all_rounds_count_when_none_was_quiet() -> None:
    run = make_run({"byteps": [[1.0], [3.0]], "gloo": [[1.5], [1.5]]}, busy={0: 0.9, 1: 0.95})
    assert run.quiet == []
    assert row(run, "byteps", CASE).p50_s == 2.0


@pytest.mark.parametrize(
    ("kind", "low", "high", "value", "ok"),
    [
        ("ratio", 1.45, None, 1.5, True),
        ("ratio", 1.55, None, 1.5, False),
        ("ratio", 0.95, 1.05, 1.5, False),
        ("of-limit", 0.95, None, 1.0, True),
        ("cpu", None, 3.0, 4 / 3, True),
        ("cpu", None, 1.2, 4 / 3, False),
        # 1 MiB in a second; 0.4 CPU seconds for three times 1 MiB.
        ("speed", 0.001, None, 1.048576e-3, True),
        ("speed", 0.002, None, 1.048576e-3, False),
        ("cpu-seconds", None, 128.0, 0.4 / 3 / 1.048576e-3, True),
        ("cpu-seconds", None, 127.0, 0.4 / 3 / 1.048576e-3, False),
    ],
)
def test_bars(kind: str, low: float | None, high: float | None, value: float, ok: bool) -> None:
    run = make_run({"byteps": [[1.0]], "gloo": [[1.5]]})
    verdict = judge(Gate(kind=kind, case=CASE, low=low, high=high), run)
    assert verdict.value == pytest.approx(value)
    assert verdict.ok == ok


def test_a_bar_on_what_is_not_known_is_missed() -> None:
    run = make_run({"byteps": [[1.0]], "gloo": [[1.5]]}, link_bits=0)
    assert not judge(Gate(kind="of-limit", case=CASE, low=0.1), run).ok


def test_the_share_of_plain_sockets() -> None:
    run = make_run({"byteps": [[1.0]], "sockets": [[0.8]]})
    assert row(run, "byteps", CASE).of_sockets == pytest.approx(0.8)
    assert row(run, "sockets", CASE).of_sockets == 1.0
    assert row(run, "sockets", CASE).servers == 4
    assert row(make_run(), "byteps", CASE).of_sockets is None
