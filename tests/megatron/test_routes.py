"""Which way a bucket is summed, and what each flag gains: pure functions of groups, hosts, servers,
types and rates.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from byteps.cost_model import Servers
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
from megatron.core.distributed.dpu_reduce.advice import (
    Advice,
    Kind,
    Training,
    Way,
    advise,
    brief,
    change,
    compared,
    describe,
    types,
    wire_bytes,
)

M = 1 << 30


def hosts_of(hosts: int, per_host: int = 1) -> tuple[int, ...]:
    return tuple(host for host in range(hosts) for _ in range(per_host))


def network(hosts: int, extra: int, local: int = 0, gbps: float | None = None) -> Network:
    rate = None if gbps is None else gbps * 1e9 / 8
    servers = Servers(hosts=hosts, extra=extra, local=local)
    return Network(servers=servers, host_rate=rate, server_rate=None)


def decided(
    hosts: int, per_host: int, servers: int, *, asked: str = "auto", half: bool = False, **what: int
) -> Decision:
    one = Sum(
        hosts=hosts_of(hosts, per_host),
        gradient_bytes=M,
        wire_bytes=M // 2 if half else M,
        sharded=bool(what.get("instances")),
        instances=what.get("instances", 1),
    )
    return decide(one, network(hosts, servers), asked)


def test_inside_one_host_nothing_goes_to_servers() -> None:
    assert decided(1, 8, 4).route == COLLECTIVE
    assert decided(1, 8, 4, asked=NODE_FIRST).route == COLLECTIVE
    assert decided(1, 1, 4, asked=NODE_FIRST).route == COLLECTIVE
    assert decided(1, 8, 4, asked=FLAT).route == FLAT, "unless it is asked for"


@pytest.mark.parametrize(
    ("hosts", "per_host", "servers", "options", "route", "host_bytes"),
    [
        # One rank a host: 2(n-1)/n in a ring, 1 through as many servers.
        (4, 1, 4, {}, FLAT, 1.0),
        (8, 1, 8, {}, FLAT, 1.0),
        # Two workers send as much either way, and a few servers are the bottleneck.
        (2, 1, 2, {}, COLLECTIVE, 1.0),
        (4, 1, 2, {}, COLLECTIVE, 1.5),
        # Several ranks: the host's NIC carries the tensor once, not once a rank.
        (4, 2, 4, {}, NODE_FIRST, 1.0),
        (4, 8, 4, {}, NODE_FIRST, 1.0),
        (2, 2, 2, {}, COLLECTIVE, 1.0),
        # The fully sharded optimizer: a reduce-scatter needs (n-1)/n, less than a push.
        (4, 1, 4, {"instances": 1}, COLLECTIVE, 0.75),
        (4, 2, 4, {"instances": 1}, COLLECTIVE, 0.875),
        # Half the bytes on the wire are less again.
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
    for asked in (FLAT, NODE_FIRST, COLLECTIVE):
        assert decided(4, 2, 4, asked=asked).route == asked
    one_a_host = decided(4, 1, 4, asked=NODE_FIRST)
    assert (one_a_host.route, one_a_host.why) == (FLAT, "asked for, with one rank a host")


def test_uneven_hosts_are_summed_flat_and_the_reason_is_said() -> None:
    uneven = Sum(hosts=(0, 0, 0, 1), gradient_bytes=M, wire_bytes=M)
    decision = decide(uneven, network(2, 2), NODE_FIRST)
    assert decision.route == FLAT and "1 or 3 ranks" in decision.why
    assert NODE_FIRST not in decide(uneven, network(2, 2)).loads


@pytest.mark.parametrize(
    ("hosts", "asked", "route", "why"),
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
    hosts: tuple[int, ...], asked: str, route: str, why: str
) -> None:
    what = Sum(hosts=hosts, gradient_bytes=2 * M, wire_bytes=M, updated=True)
    rates = network(len(set(hosts)), 4, gbps=10)
    decision = decide(what, rates, asked)
    assert (decision.route, decision.why) == (route, why)
    assert COLLECTIVE not in decision.loads
    if NODE_FIRST in decision.loads:
        assert decision.loads[NODE_FIRST].host == M == decision.loads[FLAT].host / 2
    assert "optimizer on the servers" in describe("dense", [(what, decision)], rates)


def test_slow_servers_are_left_out_where_rates_are_known() -> None:
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    servers = Servers(hosts=4, extra=4)
    for server_gbps, route in ((100, FLAT), (90, FLAT), (50, COLLECTIVE)):
        rates = Network(servers=servers, host_rate=100e9 / 8, server_rate=server_gbps * 1e9 / 8)
        assert decide(what, rates).route == route
    assert decide(what, rates).seconds[FLAT] == pytest.approx(M * 8 / 50e9)


def test_measured_rates_decide() -> None:
    """Bytes say 1.5 times as fast; what was measured may say something else."""
    what = Sum(hosts=hosts_of(4), gradient_bytes=M, wire_bytes=M)
    told = network(4, 4, gbps=100)
    for through_servers, route in ((80e8, FLAT), (60e8, COLLECTIVE)):
        seen = Measured(size=1 << 26, rates={FLAT: through_servers, COLLECTIVE: 100e8})
        decision = decide(what, seen.applied(told))
        assert decision.route == route
        assert decision.seconds == {FLAT: M / through_servers, COLLECTIVE: 1.5 * M / 100e8}
        text = describe("dense", [(what, decision)], seen.applied(told))
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
        # Node first, each rank pushes half of what its host does.
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


# What each flag gains: a pure function of groups by host, bytes and links.


ELEMENTS = 1e9
RATE = 10e9 / 8


def network_of(hosts: int, nics: int = 1, servers: int | None = None) -> Network:
    count = hosts if servers is None else servers
    return Network(
        servers=Servers(hosts=hosts, extra=count, local=0 if count else 1),
        host_rate=RATE,
        server_rate=RATE,
        collective_rate=nics * RATE if nics > 1 else None,
    )


def dense(hosts: int, per_host: int, groups: float = 1) -> Kind:
    members = tuple(host for host in range(hosts) for _ in range(per_host))
    return Kind(name="dense", groups={members: groups}, elements=ELEMENTS)


def way(advice: Advice, *flags: str) -> Way:
    return next(one for one in advice.ways if one.flags == flags)


def test_one_rank_a_host_with_fp32_gradients() -> None:
    """4 bytes an element: a ring sends 2 * 3/4 of them, a push all, and half as bf16."""
    advice = advise(Training(kinds=(dense(4, 1),)), network_of(4))
    ring, flag = advice.ways[0], way(advice, "--use-dpu-reduce")
    assert ring.gradients == pytest.approx(6 * ELEMENTS) and ring.parameters == 0
    assert flag.gradients == pytest.approx(4 * ELEMENTS) and flag.server == pytest.approx(
        4 * ELEMENTS
    )
    assert flag.gain == pytest.approx(1.5) and flag.seconds == pytest.approx(4 * ELEMENTS / RATE)
    half = way(advice, "--use-dpu-reduce", "--dpu-reduce-wire-dtype bf16")
    assert half.gain == pytest.approx(3)
    kept = way(advice, "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gain == pytest.approx(1.5), "parameters come down in the place of the sum"
    assert advice.best == half, "of two that are as fast, the shorter change"


def test_the_default_recipe_gains_by_the_optimizer_on_the_servers() -> None:
    """bf16 gradients, distributed optimizer in one instance, 4 hosts x 2: 7/8 of 2 bytes for the
    gradients leave a host, and 7/8 for the parameters; servers take 2 and send 2 at once."""
    training = Training(kinds=(dense(4, 2),), gradient_bytes=2, sharded=True)
    advice = advise(training, network_of(4))
    today = advice.ways[0]
    assert today.gradients == pytest.approx(1.75 * ELEMENTS) == today.parameters
    flag = way(advice, "--use-dpu-reduce")
    assert flag.gain == 1.0 and flag.through_servers == ()
    local = way(advice, "--use-dpu-reduce", "--num-distributed-optimizer-instances 4")
    assert local.gradients == pytest.approx(2 * ELEMENTS) and local.parameters == 0
    kept = way(advice, "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * ELEMENTS) and kept.gain == pytest.approx(1.75)
    assert not any("bf16" in one.name for one in advice.ways), "they are bf16 already"
    few = way(advice, "--use-dpu-reduce", "--dpu-reduce-wire-dtype int8", *local.flags[1:])
    assert few.gain == pytest.approx(3.5 / 1.016, rel=1e-3)
    assert advice.best.gain == pytest.approx(1.75)

    refused = advise(training, network_of(4), "it cannot")
    assert way(refused, "--use-dpu-reduce", "--dpu-optimizer").refused == "it cannot"
    assert refused.best == way(refused, *local.flags)


def test_groups_that_share_a_host_share_its_nic() -> None:
    """Tensor parallelism of 8 on hosts of 8 GPUs: 8 groups of one rank a host."""
    advice = advise(Training(kinds=(dense(4, 1, groups=8),)), network_of(4))
    assert advice.ways[0].gradients == pytest.approx(48 * ELEMENTS)
    flag = way(advice, "--use-dpu-reduce")
    assert flag.gradients == pytest.approx(32 * ELEMENTS) == flag.server
    assert flag.gain == pytest.approx(1.5)


def test_stages_on_hosts_of_their_own_share_the_servers() -> None:
    """Two groups of four hosts each, eight servers: a server takes an eighth of each push."""
    kind = Kind(name="dense", groups={(0, 1, 2, 3): 1, (4, 5, 6, 7): 1}, elements=ELEMENTS)
    flag = way(advise(Training(kinds=(kind,)), network_of(8)), "--use-dpu-reduce")
    assert flag.gradients == pytest.approx(4 * ELEMENTS) == flag.server


def test_experts_inside_a_host_stay_there() -> None:
    expert = Kind(
        name="expert", groups={(0,) * 2: 4, (1,) * 2: 4, (2,) * 2: 4}, elements=9 * ELEMENTS
    )
    training = Training(kinds=(dense(3, 1), expert))
    advice = advise(training, network_of(3))
    assert advice.ways[0].gradients == pytest.approx(4 * ELEMENTS * 4 / 3)
    assert way(advice, "--use-dpu-reduce").through_servers == ("dense",)
    text = brief(training, advice, network_of(3))
    assert "expert gradients stay inside a host" in text


def test_a_nic_for_each_of_eight_gpus_leaves_nothing_to_gain() -> None:
    """NCCL uses all of them, BytePS one."""
    advice = advise(Training(kinds=(dense(4, 8),)), network_of(4, nics=8))
    assert way(advice, "--use-dpu-reduce").through_servers == ()
    assert advice.best.flags == () and "change nothing" in change(advice)


def test_inside_one_host_there_is_nothing_to_say() -> None:
    training = Training(kinds=(dense(1, 8),))
    advice = advise(training, network_of(1))
    assert advice.best.flags == ()
    for text in (
        brief(training, advice, network_of(1)),
        compared(training, advice, network_of(1)),
    ):
        assert "no gradient crosses hosts" in text and "\n" not in text


@pytest.mark.parametrize(
    ("kind", "instances", "asked"),
    [
        (dense(4, 2), 1, 4),
        (dense(4, 2), 4, None),
        # A rank alone would be an instance that shards nothing.
        (dense(4, 1), 1, None),
        # Consecutive members are an instance: these are not on one host.
        (Kind(name="dense", groups={(0, 1, 2, 3) * 2: 1}, elements=ELEMENTS), 1, None),
    ],
)
def test_an_instance_for_each_host(kind: Kind, instances: int, asked: int | None) -> None:
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True, instances=instances)
    names = [one.name for one in advise(training, network_of(4)).ways]
    found = [name for name in names if "instances" in name and "wire" not in name]
    expected = f"--use-dpu-reduce --num-distributed-optimizer-instances {asked}"
    assert found == ([expected] if asked else [])


def test_three_lines_when_a_job_starts() -> None:
    training = Training(kinds=(dense(4, 2),), gradient_bytes=2, sharded=True, used=True)
    links = network_of(4)
    lines = brief(training, advise(training, links), links).splitlines()
    assert len(lines) == 3 and all(line.startswith("dpu_reduce: ") for line in lines)
    assert "dense gradients 4 hosts wide" in lines[0]
    assert "1.75 GB of gradients and 1.75 GB of parameters; 10 Gbit/s per host" in lines[0]
    assert "--use-dpu-reduce 1.00 x" in lines[1] and "--dpu-optimizer 1.75 x" in lines[1]
    best = "add --num-distributed-optimizer-instances 4 (1.75 x)"
    assert lines[2] == f"dpu_reduce: shortest change for the best of these: {best}"


def test_matrices_that_stay_on_the_ranks_go_their_own_way() -> None:
    """With Muon: a tenth of the parameters comes down in the place of a sum. The gradients of the
    others are all-reduced, and then these parameters are gathered."""
    kind = replace(dense(4, 2), left=0.9 * ELEMENTS)
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True)
    kept = way(advise(training, network_of(4)), "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * ELEMENTS)
    assert kept.parameters == pytest.approx(0.9 * 1.75 * ELEMENTS)
    whole = Training(kinds=(kind,), gradient_bytes=2)
    kept = way(advise(whole, network_of(4)), "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * ELEMENTS) and kept.parameters == 0


HALF = "--dpu-reduce-wire-dtype bf16"


@pytest.mark.parametrize(
    ("has", "text"),
    [
        ({}, f"add --use-dpu-reduce {HALF} (3.00 x)"),
        ({"used": True}, f"add {HALF} (3.00 x)"),
        ({"used": True, "wire_bytes": 2}, "what runs is the best of these (3.00 x)"),
        # As fast as the best, which is two changes away.
        ({"used": True, "wire_bytes": 2, "updated": True}, "what runs is the best"),
        ({"used": True, "updated": True}, f"add {HALF} (3.00 x)"),
    ],
)
def test_the_advice_names_what_a_job_does_not_have(has: dict[str, Any], text: str) -> None:
    training = Training(kinds=(dense(4, 1),), **has)
    said = change(advise(training, network_of(4)))
    assert text in said and said.startswith("shortest" if "add" in text else "change nothing")


@pytest.mark.parametrize(("name", "gain"), [("int8", 6 / 1.016), ("int4", 6 / 0.516)])
def test_few_bits_count_as_what_they_are(name: str, gain: float) -> None:
    """A job that has them is told what they gain; another one is not advised to use them."""
    flag = f"--dpu-reduce-wire-dtype {name}"
    has = Training(kinds=(dense(4, 1),), used=True, wire_bytes=wire_bytes(name))
    advice = advise(has, network_of(4))
    assert advice.best.flags == ("--use-dpu-reduce", flag) and not (advice.add or advice.drop)
    assert advice.best.gain == pytest.approx(gain, rel=1e-3)
    others = advise(replace(has, wire_bytes=None), network_of(4))
    assert flag not in (*others.best.flags, *others.add)


def test_few_bits_are_shown_and_not_advised() -> None:
    advice = advise(Training(kinds=(dense(4, 1),), used=True), network_of(4))
    shown = way(advice, "--use-dpu-reduce", "--dpu-reduce-wire-dtype int8")
    assert shown.gain > advice.best.gain
    assert not any("int8" in flag for flag in (*advice.best.flags, *advice.add))


def test_the_bytes_of_each_type_are_told() -> None:
    def bucket(route: str, numel: int, kept: int, *, updated: bool = False) -> Any:
        small = SimpleNamespace(nbytes=2 * kept, itemsize=2) if kept else None
        op = SimpleNamespace(route=route, wire=wire.int8(), kept=small, updated=updated)
        return SimpleNamespace(dpu_reduce_op=op, grad_data=SimpleNamespace(numel=lambda: numel))

    buckets = [
        bucket(routes.FLAT, 128_000_000, 0),
        bucket(routes.FLAT, 128_000_000, 5_000_000),
        bucket(routes.COLLECTIVE, 1_000, 1_000),
    ]
    told = types(buckets)
    assert "go to servers: 260.00 MB as int8, 10.00 MB in 16 bits" in told
    assert "come back" not in told
    told = types([*buckets, bucket(routes.FLAT, 12_800_000, 0, updated=True)])
    assert told.endswith("; 13.00 MB come back as int8 differences")


def test_a_flag_that_loses_is_to_be_dropped() -> None:
    """NCCL uses all NICs of a host, and servers that keep the optimizer one."""
    has = Training(kinds=(dense(4, 8),), gradient_bytes=2, used=True, updated=True)
    advice = advise(has, network_of(4, nics=8))
    assert (advice.add, advice.drop) == ((), ("--dpu-optimizer",))
    assert ": drop --dpu-optimizer (1.00 x)" in change(advice)


def test_a_flag_that_changes_nothing_is_not_named() -> None:
    """Fewer bits on the wire, where gradients have 16 anyway."""
    has = Training(kinds=(dense(4, 1),), gradient_bytes=2, used=True, wire_bytes=2)
    advice = advise(has, network_of(4))
    assert (advice.add, advice.drop) == ((), ()) and advice.best.gain == pytest.approx(1.5)


def test_rates_that_are_not_known_compare_bytes() -> None:
    training = Training(kinds=(dense(4, 1),))
    links = Network(servers=Servers(hosts=4, extra=4), host_rate=None, server_rate=None)
    advice = advise(training, links)
    assert way(advice, "--use-dpu-reduce").gain == pytest.approx(1.5)
    assert "bytes are compared" in brief(training, advice, links)
