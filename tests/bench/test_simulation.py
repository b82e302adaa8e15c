"""The simulation and the cost model against closed forms, conservation of bytes and what was
measured; and the command bench/simulator/run.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byteps import cost_model as costmodel

from bench.simulator import run as simulate
from bench.simulator.scenario import Scenario, Workers, engine_partition, payload_fraction, uniform
from bench.simulator.simulation import Hop, max_min, push_pull, ring

MIB = 1 << 20
RATE = 1e9
SIZE = 256 * MIB


def scenario(workers: int, servers: int, **changes: Any) -> Scenario:
    """Small partitions and no limit on credits, so that the closed forms nearly hold."""
    usual = {"partition": SIZE // 1024, "credit": 0}
    return replace(uniform(workers, servers, SIZE, RATE), **(usual | changes))


def seconds(workers: int, servers: int, **changes: Any) -> float:
    return push_pull(scenario(workers, servers, **changes)).seconds


# ------------------------------------------------------------------ fair shares


def hop(links: list[int], weights: list[float] | None = None) -> Hop:
    weight = np.ones(len(links)) if weights is None else np.array(weights)
    return Hop(link=np.array(links), weight=weight)


def test_flows_share_as_a_textbook_says() -> None:
    # Flows 0 and 1 share link 0, of 10; flow 2 has link 1, of 20, with flow 1.
    rates = max_min(
        np.array([10.0, 20.0, 99.0]), [hop([0, 0, 2]), hop([2, 1, 1])], np.full(3, True)
    )
    assert rates.tolist() == [5.0, 5.0, 15.0]


def test_no_link_carries_more_than_it_can_and_each_flow_has_a_full_one() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        capacity = random.uniform(1, 9, 6)
        hops = [hop(list(random.integers(0, 3, 12))), hop(list(random.integers(3, 6, 12)))]
        rates = max_min(capacity, hops, np.full(12, True))
        load = sum(np.bincount(one.link, one.weight * rates, 6) for one in hops)
        assert (load <= capacity * (1 + 1e-9)).all()
        full = load >= capacity * (1 - 1e-9)
        assert all(full[hops[0].link[flow]] or full[hops[1].link[flow]] for flow in range(12))


# ----------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("workers", "servers"), [(2, 2), (4, 4), (8, 8), (8, 4), (8, 1), (4, 8), (3, 5), (7, 3)]
)
def test_servers_of_their_own(workers: int, servers: int) -> None:
    closed_form = costmodel.own_machines(workers, servers, SIZE, RATE)
    assert seconds(workers, servers) == pytest.approx(closed_form, rel=0.011)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_colocated_servers(workers: int) -> None:
    closed_form = costmodel.colocated(workers, SIZE, RATE)
    assert seconds(workers, workers, colocated=True) == pytest.approx(closed_form, rel=0.011)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 1024])
def test_ring(workers: int) -> None:
    closed_form = costmodel.ring(workers, SIZE, RATE)
    assert ring(scenario(workers, 1)) == pytest.approx(closed_form)


@pytest.mark.parametrize(
    ("workers", "servers", "partitions"),
    [(4, 4, 4), (4, 4, 16), (8, 8, 64), (8, 4, 16), (4, 8, 16)],
)
def test_the_fill_of_the_partitions(workers: int, servers: int, partitions: int) -> None:
    partition = SIZE // partitions
    whole = costmodel.own_machines(workers, servers, SIZE, RATE)
    fill = costmodel.partitions_fill(workers, servers, partition, RATE)
    found = seconds(workers, servers, partition=partition)
    assert found == pytest.approx(whole + fill)


# ------------------------------------------------------------------ conservation


@pytest.mark.parametrize(
    "changes", [{}, {"credit": 3, "socket_buffer": 1000}, {"staggered": True}, {"core_rate": RATE}]
)
def test_every_byte_goes_once_each_way(changes: dict[str, Any]) -> None:
    kinds = (
        Workers(count=2, rate=RATE),
        Workers(count=1, rate=RATE / 3),
        Workers(count=1, rate=RATE, start=0.1),
    )
    size = SIZE - 12345
    one = replace(scenario(4, 3), workers=kinds, size=size, partition=size // 50, **changes)
    run = push_pull(one)
    assert run.worker_sent == pytest.approx([size] * len(run.worker_sent))
    assert run.worker_received == pytest.approx([size] * len(run.worker_sent))
    assert sum(run.server_sent) == pytest.approx(4 * size)
    assert run.server_received == pytest.approx(run.server_sent)
    assert max(run.worker_seconds) == run.seconds


def test_what_a_host_asks_of_itself_does_not_pass_its_link() -> None:
    run = push_pull(scenario(4, 4, colocated=True))
    assert run.worker_sent == pytest.approx([0.75 * SIZE] * 4)
    assert sum(run.server_received) == pytest.approx(3 * SIZE)


def test_workers_that_are_alike_are_as_many_alone() -> None:
    together = scenario(6, 4, partition=SIZE // 40, credit=5, latency=1e-4, add_rate=9e9)
    assert push_pull(together.one_by_one()).seconds == pytest.approx(push_pull(together).seconds)


# ------------------------------------------------------------------ monotonicity


def rising(values: list[float]) -> bool:
    return all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))


def test_more_of_anything_bad_is_never_faster() -> None:
    parts = [SIZE // n for n in (1024, 256, 64, 16)]
    assert rising([seconds(4, 4, partition=p) for p in parts])
    assert rising([seconds(8, k) for k in (8, 4, 2, 1)])
    assert rising([seconds(4, 4, latency=x) for x in (0, 1e-5, 1e-3)])
    assert rising([seconds(4, 4, add_rate=x) for x in (math.inf, 4e9, 1e9, 2e8)])
    assert rising([seconds(4, 4, core_rate=x) for x in (math.inf, 8 * RATE, 4 * RATE, RATE)])
    assert rising([seconds(8, 8, credit=x, socket_buffer=0) for x in (0, 8, 4, 1)])
    assert rising([seconds(8, 8, credit=1, socket_buffer=x) for x in (1 << 20, 1 << 16, 0)])
    assert rising([ring(scenario(8, 8, latency=x)) for x in (0, 1e-5, 1e-3)])
    assert rising([ring(scenario(8, 8, core_rate=x)) for x in (math.inf, 4 * RATE, RATE)])


# -------------------------------------------------------- known by other reasons


def test_a_straggler_delays_all_by_no_more_than_it_is_late() -> None:
    kinds = (Workers(count=7, rate=RATE), Workers(count=1, rate=RATE, start=0.2))
    late = replace(scenario(8, 8), workers=kinds)
    assert seconds(8, 8) < push_pull(late).seconds <= seconds(8, 8) + 0.2 + 1e-9
    assert ring(late) <= ring(scenario(8, 8)) + 0.2 + 1e-9


def test_a_slow_link_is_what_all_wait_for() -> None:
    kinds = (Workers(count=3, rate=RATE), Workers(count=1, rate=RATE / 4))
    mixed = replace(scenario(4, 4), workers=kinds)
    assert push_pull(mixed).seconds == pytest.approx(4 * SIZE / RATE, rel=0.02)
    assert ring(mixed) == pytest.approx(4 * costmodel.ring(4, SIZE, RATE), rel=0.2)


def test_an_oversubscribed_switch_carries_what_it_can() -> None:
    # 4 workers push and pull M each: 8 M through the switch.
    narrow = seconds(4, 4, core_rate=2 * RATE)
    assert narrow == pytest.approx(8 * SIZE / (2 * RATE), rel=0.02)


def test_additions_limit_a_server() -> None:
    # One server with one thread adds the 4 M that reach it.
    found = seconds(4, 1, engine_threads=1, add_rate=RATE / 2)
    assert found == pytest.approx(4 * SIZE / (RATE / 2), rel=0.02)


def test_latency_is_paid_once_each_way_while_partitions_follow_each_other() -> None:
    assert seconds(4, 4, latency=0.01) == pytest.approx(seconds(4, 4) + 0.02)
    assert ring(scenario(4, 4, latency=0.01)) == pytest.approx(ring(scenario(4, 4)) + 6 * 0.01)


def test_fewer_credits_than_servers_leave_servers_idle_unless_workers_are_staggered() -> None:
    few = {"credit": 4, "socket_buffer": 0}
    assert seconds(16, 16, **few) == pytest.approx(4 * SIZE / RATE, rel=0.02)
    assert seconds(16, 16, **few, staggered=True) == pytest.approx(SIZE / RATE, rel=0.05)


def test_a_buffer_that_takes_whole_partitions_makes_up_for_few_credits() -> None:
    assert seconds(16, 16, credit=1, socket_buffer=SIZE) == seconds(16, 16)
    partition = SIZE // 1024
    some = seconds(16, 16, credit=4, socket_buffer=partition // 2)
    assert seconds(16, 16) < some < seconds(16, 16, credit=4, socket_buffer=0)


# ------------------------------------------------------------------- measurements


@pytest.mark.parametrize(
    ("workers", "mbit", "measured"),
    [(4, 500, 1.621), (8, 500, 1.897), (4, 1000, 0.812), (8, 1000, 0.949)],
)
def test_a_ring_of_gloo_as_measured_on_emulated_links(
    workers: int, mbit: int, measured: float
) -> None:
    rate = mbit * 1e6 / 8 * payload_fraction(9000)
    assert ring(uniform(workers, 1, 64 * MIB, rate)) == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize(
    ("hosts", "size", "over_m_b"),
    [(4, 16, 1.034), (4, 64, 1.015), (4, 256, 1.011), (8, 64, 1.036), (8, 256, 1.017)],
)
def test_plain_sockets_as_measured_on_emulated_links(
    hosts: int, size: int, over_m_b: float
) -> None:
    rate = 500e6 / 8
    one = uniform(hosts, hosts, size * MIB, rate * payload_fraction(9000))
    found = push_pull(replace(one, partition=128 << 10)).seconds
    assert found / (size * MIB / rate) == pytest.approx(over_m_b, rel=0.015)


@pytest.mark.parametrize(
    ("size", "servers", "limits", "partition"),
    [
        (64 * MIB, 4, {}, 256 << 10),
        (1 * MIB, 4, {}, 128 << 10),
        (1 << 40, 4, {}, 4_096_000),
        (64 * MIB + 256, 4, {}, 266_240),
        (64 * MIB, 4, {"smallest": MIB, "largest": 1000}, 4096),
        # 8 MiB per server, of which a link of 100 Gbit/s carries 25,000 bytes in 2 us.
        (16 * MIB, 2, {"link": 12.5e9}, 458_752),
        (16 * MIB, 2, {"link": 12.5e9, "largest": 200_000}, 200_704),
        (64 * MIB, 4, {"link": 1.25e9}, 256 << 10),
        (1 * MIB, 4, {"link": 12.5e6}, 32 << 10),
        (1 * MIB, 4, {"link": 12.5e6, "smallest": 65536}, 65536),
    ],
    ids=[
        "64-a-server",
        "smallest",
        "largest",
        "whole-pages",
        "the-largest-wins",
        "a-fast-link",
        "a-fast-link-the-largest-wins",
        "a-link-that-is-not-fast",
        "a-slow-link",
        "a-slow-link-the-given-wins",
    ],
)
def test_tensors_are_cut_as_the_engine_does(
    size: int, servers: int, limits: dict[str, Any], partition: int
) -> None:
    assert engine_partition(size, servers, **limits) == partition


# ----------------------------------------------------------------------- usage


# ------------------------------------------------------------------ the cost model


M, B = 64e6, 8e6
M_OVER_B = 8.0


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.0), (2, 8.0), (4, 12.0), (8, 14.0)])
def test_closed_form_of_a_ring(workers: int, seconds: float) -> None:
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


# ---------------------------------------------------------- bench/simulator/run.py


def measurement(path: Path, *, factor: float = 1.0, link_bits: int = 800_000_000) -> Path:
    """A file of the benchmark's form, its figures ``factor`` times what was simulated."""
    topology = {"workers": 4, "servers": 4, "colocate": False}
    topology |= {"emulated_hosts": 8, "link_bits": link_bits, "mtu": 9000}
    rate = 100e6 * payload_fraction(9000)
    case = {"size": 64 * MIB, "dtype": "float32", "tensors": 1}
    # 4 of 64 partitions fill the pipeline; a ring sends 2 * 3/4 of the size.
    seconds = {"byteps": 64 * MIB / rate * (1 + 4 / 64), "gloo": 1.5 * 64 * MIB / rate}
    rows = [{"backend": b, "case": case, "p50_s": factor * s} for b, s in seconds.items()]
    content = {
        "schema": 1,
        "meta": {"settings": f"BYTEPS_MIN_PARTITION_BYTES={MIB} BYTEPS_PARTITION_BYTES={MIB}"},
        "runs": [{"name": "", "plan": {"topology": topology}, "rows": rows}],
    }
    path.write_text(json.dumps(content))
    return path


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "4,8", "--servers", "4,8", "--size", "64MiB", "--link", "800mbit"]
    words += ["--stragglers", "1:0.5", "--slow", "1@400mbit", "--partition", "1MiB"]
    assert simulate.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# 64MiB at 800mbit, partitions: 1MiB")
    assert [line.split()[:2] for line in lines[2:]] == [
        [workers, servers] for workers in ("4", "8") for servers in ("4", "8")
    ]
    # The slow worker's link is what all wait for.
    assert all(float(line.split()[3]) > 2 for line in lines[2:])


def test_a_measurement_that_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measurement(tmp_path / "m.json")
    assert simulate.main(["--check", str(path), "--tolerance", "0.001"]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_a_measurement_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measurement(tmp_path / "m.json", factor=1.1)
    assert simulate.main(["--check", str(path)]) == 1
    assert "largest difference 10.0%" in capsys.readouterr().out
