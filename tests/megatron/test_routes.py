"""The backend of a bucket: a pure function of groups, hosts, servers, types and rates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byteps.cost_model import Servers
from byteps.forecast import Kind, Training, forecast
from byteps.torch import routes, wire
from byteps.torch.routes import (
    COLLECTIVE,
    FLAT,
    NODE_FIRST,
    Decision,
    Measured,
    Network,
    Sum,
    decide,
)
from megatron.core.distributed.dpu_reduce.advice import brief, describe, types

M = 1 << 30


def hosts_of(hosts: int, per_host: int = 1) -> tuple[int, ...]:
    return tuple(host for host in range(hosts) for _ in range(per_host))


def network(hosts: int, extra: int, local: int = 0, gbps: float | None = None) -> Network:
    rate = None if gbps is None else gbps * 1e9 / 8
    servers = Servers(hosts=hosts, extra=extra, local=local)
    return Network(servers=servers, host_rate=rate, server_rate=None)


def decided(
    hosts: int,
    per_host: int,
    servers: int,
    *,
    requested: str = "auto",
    half: bool = False,
    **what: int,
) -> Decision:
    reduction = Sum(
        hosts=hosts_of(hosts, per_host),
        gradient_bytes=M,
        wire_bytes=M // 2 if half else M,
        sharded=bool(what.get("instances")),
        instances=what.get("instances", 1),
        by_all_reduce=bool(what.get("over_gloo")),
    )
    return decide(reduction, network(hosts, servers), requested)


def test_measured_rates_are_those_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 Gbit/s, and 40 ms per message: at the rate of 1 MiB, a step would take three times as
    long."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(routes, "time", clock)
    monkeypatch.setattr(routes, "_slowest", lambda seconds, device, group: seconds)
    what = Sum(hosts=hosts_of(2), gradient_bytes=M, wire_bytes=M)
    links = network(2, 2)
    rate = 0.5e9 / 8

    def over(route: str) -> routes.Try:
        def run(scratch: torch.Tensor) -> None:
            part = replace(what, gradient_bytes=scratch.nbytes, wire_bytes=scratch.nbytes)
            load = routes.loads_of(part, links.servers)[route]
            now[0] += 0.04 + max(load.host, load.server) / rate

        return run

    tries = {FLAT: over(FLAT), COLLECTIVE: over(COLLECTIVE)}
    group: Any = None
    network_of = routes.measure(what, links, tries, group, torch.zeros(1))
    assert all(0.85 * rate < measured <= rate for measured in network_of.rates.values())
    assert now[0] < 15, "seconds before training begins"


def test_inside_one_host_nothing_goes_to_servers() -> None:
    assert decided(1, 8, 4).route == COLLECTIVE
    assert decided(1, 8, 4, requested=NODE_FIRST).route == COLLECTIVE
    assert decided(1, 1, 4, requested=NODE_FIRST).route == COLLECTIVE
    assert decided(1, 8, 4, requested=FLAT).route == FLAT, "unless it is asked for"


@pytest.mark.parametrize(
    ("hosts", "per_host", "servers", "options", "route", "host_bytes"),
    [
        # With one rank per host, a ring sends 2(n-1)/n of the bytes, and as many servers send 1.
        (4, 1, 4, {}, FLAT, 1.0),
        (8, 1, 8, {}, FLAT, 1.0),
        # Two workers send the same number of bytes either way, and few servers are the bottleneck.
        (2, 1, 2, {}, COLLECTIVE, 1.0),
        (4, 1, 2, {}, COLLECTIVE, 1.5),
        # Several ranks: the host's NIC carries the tensor once, not once per rank.
        (4, 2, 4, {}, NODE_FIRST, 1.0),
        (4, 8, 4, {}, NODE_FIRST, 1.0),
        (2, 2, 2, {}, COLLECTIVE, 1.0),
        # The fully sharded optimizer: a reduce-scatter needs (n-1)/n, less than a push.
        (4, 1, 4, {"instances": 1}, COLLECTIVE, 0.75),
        (4, 2, 4, {"instances": 1}, COLLECTIVE, 0.875),
        # gloo reduce-scatters by an all-reduce.
        (4, 1, 4, {"instances": 1, "over_gloo": True}, FLAT, 1.0),
        # Gradients are pushed in half as many bytes, which is less than a reduce-scatter needs.
        (4, 1, 4, {"instances": 1, "half": True}, FLAT, 0.5),
        (4, 2, 4, {"instances": 1, "half": True}, NODE_FIRST, 0.5),
        # The optimizer sharded inside each host: 2(h-1)/h by torch.distributed, 1 through servers.
        (4, 2, 4, {"instances": 4}, NODE_FIRST, 1.0),
        (8, 8, 8, {"instances": 8}, NODE_FIRST, 1.0),
        (2, 8, 2, {"instances": 2}, COLLECTIVE, 1.0),
    ],
)
def test_the_fewest_bytes_win(
    hosts: int, per_host: int, servers: int, options: dict, route: str, host_bytes: float
) -> None:
    decision = decided(hosts, per_host, servers, **options)
    assert decision.route == route
    assert decision.loads[route].host == pytest.approx(host_bytes * M)
    slower = [decision.seconds[other] for other in decision.seconds if other != route]
    assert all(decision.seconds[route] <= other for other in slower)


def test_a_setting_forces_the_way() -> None:
    for requested in (FLAT, NODE_FIRST, COLLECTIVE):
        assert decided(4, 2, 4, requested=requested).route == requested
    one_a_host = decided(4, 1, 4, requested=NODE_FIRST)
    assert (one_a_host.route, one_a_host.why) == (FLAT, "asked for, with one rank a host")


def test_uneven_hosts_are_summed_flat_and_the_reason_is_said() -> None:
    uneven = Sum(hosts=(0, 0, 0, 1), gradient_bytes=M, wire_bytes=M)
    decision = decide(uneven, network(2, 2), NODE_FIRST)
    assert decision.route == FLAT and "1 or 3 ranks" in decision.why
    assert NODE_FIRST not in decide(uneven, network(2, 2)).loads


@pytest.mark.parametrize(
    ("hosts", "requested", "route", "why"),
    [
        ((0, 0, 1, 1), "auto", NODE_FIRST, "fewest bytes"),
        ((0, 0, 1, 1), NODE_FIRST, NODE_FIRST, "asked for"),
        ((0, 0, 1, 1), FLAT, FLAT, "asked for"),
        ((0, 0, 0, 1), "auto", FLAT, "hosts have 1 or 3 ranks: not node first"),
        ((0, 0, 0, 1), NODE_FIRST, FLAT, "hosts have 1 or 3 ranks: not node first"),
        ((0, 1, 2), "auto", FLAT, "one rank a host"),
        ((0, 1), NODE_FIRST, FLAT, "asked for, with one rank a host"),
        ((0, 0), NODE_FIRST, FLAT, "all ranks are on one host"),
        ((0,), "auto", FLAT, "a single rank"),
    ],
)
def test_with_the_optimizer_on_the_servers_all_goes_through_them(
    hosts: tuple[int, ...], requested: str, route: str, why: str
) -> None:
    what = Sum(hosts=hosts, gradient_bytes=2 * M, wire_bytes=M, updated=True)
    rates = network(len(set(hosts)), 4, gbps=10)
    decision = decide(what, rates, requested)
    assert (decision.route, decision.why) == (route, why)
    assert COLLECTIVE not in decision.loads
    if NODE_FIRST in decision.loads:
        assert decision.loads[NODE_FIRST].host == M == decision.loads[FLAT].host / 2
    assert "optimizer on the servers" in describe("dense", [(what, decision)], rates)


def test_a_ratio_says_what_it_is_computed_from() -> None:
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    rates = network(4, 4, gbps=10)
    for links, basis in (
        (network(4, 4), "by bytes over the NICs, not measured"),
        (rates, "by bytes and rates of the NICs, not measured"),
        (replace(rates, measured_bytes=M), "by measured rates"),
    ):
        assert decide(what, links).why == f"1.50 x as fast as the collective, {basis}"


def test_slow_servers_are_left_out_where_rates_are_known() -> None:
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    servers = Servers(hosts=4, extra=4)
    for server_gbps, route in ((100, FLAT), (90, FLAT), (50, COLLECTIVE)):
        rates = Network(servers=servers, host_rate=100e9 / 8, server_rate=server_gbps * 1e9 / 8)
        assert decide(what, rates).route == route
    assert decide(what, rates).seconds[FLAT] == pytest.approx(M * 8 / 50e9)


def test_measured_rates_decide() -> None:
    """By the number of bytes, servers are 1.5 times as fast. Measured rates override this."""
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    nominal = network(4, 4, gbps=100)
    for through_servers, route in ((80e8, FLAT), (60e8, COLLECTIVE)):
        seen = Measured(size=1 << 26, rates={FLAT: through_servers, COLLECTIVE: 100e8})
        decision = decide(what, seen.applied(nominal))
        assert decision.route == route
        assert decision.seconds == {FLAT: M / through_servers, COLLECTIVE: 1.5 * M / 100e8}
        text = describe("dense", [(what, decision)], seen.applied(nominal))
        assert "measured with 67.1 MB" in text and "80 by the collective" in text


def test_servers_on_the_workers_hosts_gain_nothing_by_themselves() -> None:
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    decision = decide(what, network(4, extra=0, local=1))
    assert decision.route == COLLECTIVE
    assert decision.loads[FLAT].host == pytest.approx(1.5 * M)


def test_the_table_tells_what_is_kept_for_lost_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = network(4, 4, gbps=10)
    for updated in (False, True):
        what = Sum(hosts=hosts_of(4, 2), gradient_bytes=M, wire_bytes=M, updated=updated)
        sums = [(what, decide(what, rates))] * 3
        monkeypatch.delenv("BYTEPS_REPLACE_SERVERS_S", raising=False)
        assert "keeps" not in describe("dense", sums, rates)
        monkeypatch.setenv("BYTEPS_REPLACE_SERVERS_S", "60")
        last = describe("dense", sums, rates).splitlines()[-1]
        # Node first, each rank pushes half of its host's bytes.
        assert (f"each rank keeps {3 * M / 2 / 1e6:.1f} MB of sums" in last) != updated


def test_the_table_tells_bytes_times_and_the_choice() -> None:
    what = Sum(hosts=hosts_of(4, 2), gradient_bytes=10**9, wire_bytes=10**9)
    rates = network(4, 4, gbps=10)
    text = describe("dense", [(what, decide(what, rates))] * 3, rates)
    assert (
        "8 ranks, 2 on each of 4 hosts; servers: 1 on each of 4 machines" in text
        and "10 Gbit/s per host" in text
    )
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows[0] == ["3", "3000.0", "all-reduce", "4500.0", "-", "3600.0"]
    assert rows[1][:5] == ["BytePS", "flat", "6000.0", "6000.0", "4800.0"]
    assert rows[2][:6] == ["BytePS", "node-first", "3000.0", "3000.0", "2400.0", "yes:"]


def test_three_lines_when_a_job_starts() -> None:
    members = hosts_of(4, 2)
    training = Training(
        kinds=(Kind(name="dense", groups={members: 1}, elements=1e9),),
        gradient_bytes=2,
        sharded=True,
        used=True,
    )
    lines = brief(forecast(training, network(4, 4, gbps=10))).splitlines()
    assert len(lines) == 3 and all(line.startswith("dpu_reduce: ") for line in lines)
    assert "dense gradients 4 hosts wide" in lines[0]
    assert "1.75 GB of gradients and 1.75 GB of parameters; servers: 1 on each of 4" in lines[0]
    instances = "--num-distributed-optimizer-instances 4"
    assert f"over plain Megatron at its best ({instances}): --use-dpu-reduce 0.86 x" in lines[1]
    assert "--dpu-optimizer 1.50 x" in lines[1] and "--dpu-reduce-wire-dtype int8" in lines[1]
    int4 = "--dpu-reduce-wire-dtype int4 --dpu-optimizer 2.95 x (loss -0.25..+0.32 % (8 seeds))"
    assert int4 in lines[1]
    assert lines[1].endswith("FP8 over NCCL 1.97 x (loss not measured)")
    assert f"in 16 bits or more: add {instances} (1.50 x" in lines[2]
    inside = replace(training, kinds=(Kind(name="dense", groups={(0, 0): 1}, elements=1e9),))
    assert brief(forecast(inside, network(1, 1))) == (
        "dpu_reduce: no gradient crosses hosts: nothing to gain"
    )


def test_the_bytes_of_each_type_are_told() -> None:
    def bucket(route: str, numel: int, exact_elements: int, *, updated: bool = False) -> Any:
        small = SimpleNamespace(nbytes=2 * exact_elements, itemsize=2) if exact_elements else None
        op = SimpleNamespace(route=route, wire=wire.int8(), bf16_part=small, updated=updated)
        return SimpleNamespace(dpu_reduce_op=op, grad_data=SimpleNamespace(numel=lambda: numel))

    buckets = [
        bucket(routes.FLAT, 128_000_000, 0),
        bucket(routes.FLAT, 128_000_000, 5_000_000),
        bucket(routes.COLLECTIVE, 1_000, 1_000),
    ]
    text = types(buckets)
    assert "go to servers: 260.00 MB as int8, 10.00 MB in 16 bits" in text
    assert "come back" not in text
    text = types([*buckets, bucket(routes.FLAT, 12_800_000, 0, updated=True)])
    assert text.endswith("; 13.00 MB come back as int8 differences")
