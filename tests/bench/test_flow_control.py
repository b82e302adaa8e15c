"""Limits on what a worker has in flight, in all or for each server, and switches in between."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from bench.simulator import run as simulate
from bench.simulator.incast import Incast, push
from bench.simulator.scenario import Scenario, Workers, engine_window, uniform
from bench.simulator.simulation import push_pull

MIB = 1 << 20
RATE = 1e9
SIZE = 64 * MIB
PARTITION = SIZE // 256


def scenario(hosts: int, **changes: Any) -> Scenario:
    usual: dict[str, Any] = {"partition": PARTITION, "credit": 0, "socket_buffer": 0}
    return replace(uniform(hosts, hosts, SIZE, RATE), **(usual | changes))


def seconds(hosts: int, **changes: Any) -> float:
    return push_pull(scenario(hosts, **changes)).seconds


# ---------------------------------------------------------------------- windows


def test_a_window_for_each_server_keeps_all_of_them_busy_where_credits_do_not() -> None:
    assert seconds(16, credit=4) > 3.5 * SIZE / RATE
    assert seconds(16, window=PARTITION) == pytest.approx(seconds(16), rel=0.01)


def test_one_partition_always_goes_however_small_the_window() -> None:
    assert seconds(8, window=1) == seconds(8, window=PARTITION)


def test_a_window_of_one_partition_waits_for_its_report_and_two_do_not() -> None:
    # One worker, one server: each partition takes t, and the report of it d more.
    partitions, delay = 256, 1e-4
    t = PARTITION / RATE
    one = seconds(1, window=PARTITION, credit_delay=delay)
    # The last has no next one; its answer takes another t.
    assert one == pytest.approx(partitions * t + (partitions - 1) * delay + t)
    assert seconds(1, window=2 * PARTITION, credit_delay=delay) == pytest.approx(seconds(1))


@pytest.mark.parametrize("limit", [{"credit": 3}, {"window": 2 * PARTITION}])
def test_every_byte_goes_once_each_way_under_any_limit(limit: dict[str, int]) -> None:
    kinds = (Workers(count=2, rate=RATE), Workers(count=1, rate=RATE / 3, start=0.01))
    one = scenario(4, **limit, credit_delay=1e-4, urgent_size=MIB, urgent_start=0.02)
    run = push_pull(replace(one, workers=kinds, slow_servers=1, slow_server_rate=RATE / 2))
    assert run.worker_sent == pytest.approx([SIZE + MIB] * 2)
    assert run.worker_received == pytest.approx([SIZE + MIB] * 2)
    assert max(run.server_seconds) == run.seconds


def test_a_slow_server_takes_nobody_elses_share_of_a_window() -> None:
    slow = {"slow_servers": 1, "slow_server_rate": RATE / 4}
    by_count = push_pull(scenario(4, credit=8, **slow))
    by_server = push_pull(scenario(4, window=2 * PARTITION, **slow))
    # The slow one ends when it must; the others at four thirds of their rate at most.
    for run in (by_count, by_server):
        assert run.server_seconds[0] == pytest.approx(4 * SIZE / RATE, rel=0.03)
    assert max(by_server.server_seconds[1:]) == pytest.approx(SIZE / RATE, rel=0.03)
    assert max(by_count.server_seconds[1:]) > 2.5 * SIZE / RATE


def test_what_is_urgent_waits_for_what_is_under_way_and_no_more() -> None:
    urgent = {"urgent_size": 4096, "urgent_start": 0.01}
    # Servers and link share: 8 windows in flight, or all that is left of the tensor.
    some = push_pull(scenario(8, window=2 * PARTITION, **urgent)).urgent_seconds
    everything = push_pull(scenario(8, **urgent)).urgent_seconds
    assert some <= (8 * 2 * PARTITION + 8 * PARTITION) / RATE
    assert everything == pytest.approx(SIZE / RATE - 0.01, rel=0.05)


def test_an_urgent_tensor_before_all_others_is_alone() -> None:
    first = push_pull(scenario(4, window=PARTITION, urgent_size=MIB, urgent_start=0.0))
    assert first.urgent_seconds < 0.1 * first.seconds
    assert push_pull(scenario(4)).urgent_seconds == 0.0


@pytest.mark.parametrize(
    ("partition", "servers", "rate", "window"),
    [
        (4_096_000, 1, 12.5e9, 16 * MIB),
        (4_096_000, 4, 12.5e9, 8_192_000),
        (MIB, 4, 12.5e9, 4 * MIB),
        (131_072, 8, 12.5e9, 2 * MIB),
        (131_072, 8, 1.25e9, 781_250),
        (131_072, 8, 0.125e9, 262_144),
    ],
)
def test_the_engines_window(partition: int, servers: int, rate: float, window: int) -> None:
    assert engine_window(partition, servers, rate) == window


# ----------------------------------------------------------------------- incast

BURST = 64 << 10


def incast(hosts: int, **changes: Any) -> Incast:
    usual: dict[str, Any] = {
        "workers": hosts,
        "servers": hosts,
        "size": 16 * MIB,
        "rate": RATE,
        "burst": BURST,
        "port_bytes": MIB,
        "lossless": True,
        "delay": 1e-4,
        "partition": 128 << 10,
    }
    return Incast(**(usual | changes))


def test_workers_that_take_turns_need_no_memory_of_the_switch() -> None:
    for lossless in (True, False):
        found = push(incast(16, order="turned", lossless=lossless, port_bytes=BURST))
        assert found.seconds == pytest.approx(16 * MIB / RATE, rel=0.001)
        assert (found.lost, found.held, found.longest_queue) == (0.0, 0.0, BURST)


def test_workers_in_step_fill_a_port() -> None:
    roomy = push(incast(16, port_bytes=16 * BURST))
    assert roomy.longest_queue == 16 * BURST and roomy.held == 0.0
    tight = push(incast(16, port_bytes=4 * BURST))
    assert tight.longest_queue == 4 * BURST and tight.held > 0.0 and tight.lost == 0.0
    dropping = push(incast(16, port_bytes=4 * BURST, lossless=False))
    assert dropping.lost > 0.0 and dropping.held == 0.0


def test_a_lost_last_burst_waits_for_the_timeout() -> None:
    # Two workers send one burst to one server, whose port holds one.
    both = incast(2, servers=1, size=BURST, port_bytes=BURST, lossless=False, timeout=0.2)
    assert push(both).lost == 0.5
    assert push(both).seconds == pytest.approx(0.2, rel=0.01)
    early = push(incast(2, servers=1, size=BURST, port_bytes=2 * BURST, lossless=False))
    assert early.seconds == pytest.approx(2 * BURST / RATE)


@pytest.mark.parametrize("bound", [{"credit": 3}, {"window": 2 * BURST}, {}])
@pytest.mark.parametrize("order", ["same", "turned", "random"])
@pytest.mark.parametrize("lossless", [True, False])
def test_every_burst_passes_and_none_before_its_time(
    bound: dict[str, int], order: str, lossless: bool
) -> None:
    one = incast(6, servers=4, order=order, lossless=lossless, port_bytes=3 * BURST, **bound)
    found = push(one)
    # Six workers, four servers: a server's port lets six quarters of the tensor through.
    assert found.seconds >= 1.5 * 16 * MIB / RATE * (1 - 1e-9)
    assert math.isfinite(found.seconds) and 0 <= found.held < 1


def test_a_window_below_rate_times_delay_slows_a_pair_down() -> None:
    pair = {"size": 4 * MIB, "delay": 10 * BURST / RATE}
    wide = push(incast(1, window=16 * BURST, **pair)).seconds
    narrow = push(incast(1, window=2 * BURST, **pair)).seconds
    assert wide == pytest.approx(4 * MIB / RATE, rel=0.01)
    assert narrow > 4 * wide


# ------------------------------------------------------------------- command line


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines if not line.startswith("#")][1:]


LINKS = ["--workers", "16", "--size", "64MiB", "--link", "8gbit", "--partition", "256KiB"]


def test_rules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*LINKS, "--compare-rules", "--credit-delay-us", "10"]) == 0
    found = rows(capsys)
    assert found[0][1:6] == ["16", "partitions", "in", "all,", "written"]
    over = {" ".join(line[1:-4]): float(line[-3]) for line in found}
    assert all(1.0 <= value < 1.2 for value in over.values())
    others = {" ".join(line[1:-4]): float(line[-1]) for line in found}
    assert others["16 partitions in all, written"] > 1.5
    assert others["a window a server, written"] < 1.2


def test_incast_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*LINKS, "--incast", "--port", "4MiB"]) == 0
    found = rows(capsys)
    assert {(line[1], line[2]) for line in found} == {
        (switch, order) for switch in ("pauses", "drops") for order in ("same", "random", "turned")
    }
