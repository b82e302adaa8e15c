"""What each flag gains: a pure function of groups by host, bytes and links."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from byteps.cost_model import Servers
from byteps.torch import routes, wire
from byteps.torch.routes import Network
from megatron.core.distributed.dpu_reduce import table
from megatron.core.distributed.dpu_reduce.advice import (
    Advice,
    Kind,
    Training,
    Way,
    advise,
    wire_bytes,
)

M = 1e9
RATE = 10e9 / 8


def network(hosts: int, nics: int = 1, servers: int | None = None) -> Network:
    count = hosts if servers is None else servers
    return Network(
        servers=Servers(hosts=hosts, extra=count, local=0 if count else 1),
        host_rate=RATE,
        server_rate=RATE,
        collective_rate=nics * RATE if nics > 1 else None,
    )


def dense(hosts: int, per_host: int, groups: float = 1) -> Kind:
    members = tuple(host for host in range(hosts) for _ in range(per_host))
    return Kind(name="dense", groups={members: groups}, elements=M)


def way(advice: Advice, *flags: str) -> Way:
    return next(one for one in advice.ways if one.flags == flags)


def test_one_rank_a_host_with_fp32_gradients() -> None:
    """4 bytes an element: a ring sends 2 * 3/4 of them, a push all, and half as bf16."""
    advice = advise(Training(kinds=(dense(4, 1),)), network(4))
    ring, flag = advice.ways[0], way(advice, "--use-dpu-reduce")
    assert ring.gradients == pytest.approx(6 * M) and ring.parameters == 0
    assert flag.gradients == pytest.approx(4 * M) and flag.server == pytest.approx(4 * M)
    assert flag.gain == pytest.approx(1.5) and flag.seconds == pytest.approx(4 * M / RATE)
    half = way(advice, "--use-dpu-reduce", "--dpu-reduce-wire-dtype bf16")
    assert half.gain == pytest.approx(3)
    kept = way(advice, "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gain == pytest.approx(1.5), "parameters come down in the place of the sum"
    assert advice.best == half, "of two that are as fast, the shorter change"


def test_the_default_recipe_gains_by_the_optimizer_on_the_servers() -> None:
    """bf16 gradients, distributed optimizer in one instance, 4 hosts x 2: 7/8 of 2 bytes for the
    gradients leave a host, and 7/8 for the parameters; servers take 2 and send 2 at once."""
    training = Training(kinds=(dense(4, 2),), gradient_bytes=2, sharded=True)
    advice = advise(training, network(4))
    today = advice.ways[0]
    assert today.gradients == pytest.approx(1.75 * M) == today.parameters
    flag = way(advice, "--use-dpu-reduce")
    assert flag.gain == 1.0 and flag.through_servers == ()
    local = way(advice, "--use-dpu-reduce", "--num-distributed-optimizer-instances 4")
    assert local.gradients == pytest.approx(2 * M) and local.parameters == 0
    kept = way(advice, "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * M) and kept.gain == pytest.approx(1.75)
    assert not any("bf16" in one.name for one in advice.ways), "they are bf16 already"
    few = way(advice, "--use-dpu-reduce", "--dpu-reduce-wire-dtype int8", *local.flags[1:])
    assert few.gain == pytest.approx(3.5 / 1.016, rel=1e-3)
    assert advice.best.gain == pytest.approx(1.75)

    refused = advise(training, network(4), "it cannot")
    assert way(refused, "--use-dpu-reduce", "--dpu-optimizer").refused == "it cannot"
    assert refused.best == way(refused, *local.flags)


def test_groups_that_share_a_host_share_its_nic() -> None:
    """Tensor parallelism of 8 on hosts of 8 GPUs: 8 groups of one rank a host."""
    advice = advise(Training(kinds=(dense(4, 1, groups=8),)), network(4))
    assert advice.ways[0].gradients == pytest.approx(48 * M)
    flag = way(advice, "--use-dpu-reduce")
    assert flag.gradients == pytest.approx(32 * M) == flag.server
    assert flag.gain == pytest.approx(1.5)


def test_stages_on_hosts_of_their_own_share_the_servers() -> None:
    """Two groups of four hosts each, eight servers: a server takes an eighth of each push."""
    kind = Kind(name="dense", groups={(0, 1, 2, 3): 1, (4, 5, 6, 7): 1}, elements=M)
    flag = way(advise(Training(kinds=(kind,)), network(8)), "--use-dpu-reduce")
    assert flag.gradients == pytest.approx(4 * M) == flag.server


def test_experts_inside_a_host_stay_there() -> None:
    expert = Kind(name="expert", groups={(0,) * 2: 4, (1,) * 2: 4, (2,) * 2: 4}, elements=9 * M)
    training = Training(kinds=(dense(3, 1), expert))
    advice = advise(training, network(3))
    assert advice.ways[0].gradients == pytest.approx(4 * M * 4 / 3)
    assert way(advice, "--use-dpu-reduce").through_servers == ("dense",)
    text = table.brief(training, advice, network(3))
    assert "expert gradients stay inside a host" in text


def test_a_nic_for_each_of_eight_gpus_leaves_nothing_to_gain() -> None:
    """NCCL uses all of them, BytePS one."""
    advice = advise(Training(kinds=(dense(4, 8),)), network(4, nics=8))
    assert way(advice, "--use-dpu-reduce").through_servers == ()
    assert advice.best.flags == () and "change nothing" in table.change(advice)


def test_inside_one_host_there_is_nothing_to_say() -> None:
    training = Training(kinds=(dense(1, 8),))
    advice = advise(training, network(1))
    assert advice.best.flags == ()
    for text in (
        table.brief(training, advice, network(1)),
        table.compared(training, advice, network(1)),
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
        (Kind(name="dense", groups={(0, 1, 2, 3) * 2: 1}, elements=M), 1, None),
    ],
)
def test_an_instance_for_each_host(kind: Kind, instances: int, asked: int | None) -> None:
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True, instances=instances)
    names = [one.name for one in advise(training, network(4)).ways]
    found = [name for name in names if "instances" in name and "wire" not in name]
    expected = f"--use-dpu-reduce --num-distributed-optimizer-instances {asked}"
    assert found == ([expected] if asked else [])


def test_three_lines_when_a_job_starts() -> None:
    training = Training(kinds=(dense(4, 2),), gradient_bytes=2, sharded=True, used=True)
    links = network(4)
    lines = table.brief(training, advise(training, links), links).splitlines()
    assert len(lines) == 3 and all(line.startswith("dpu_reduce: ") for line in lines)
    assert "dense gradients 4 hosts wide" in lines[0]
    assert "1.75 GB of gradients and 1.75 GB of parameters; 10 Gbit/s per host" in lines[0]
    assert "--use-dpu-reduce 1.00 x" in lines[1] and "--dpu-optimizer 1.75 x" in lines[1]
    best = "add --num-distributed-optimizer-instances 4 (1.75 x)"
    assert lines[2] == f"dpu_reduce: shortest change for the best of these: {best}"


def test_matrices_that_stay_on_the_ranks_go_their_own_way() -> None:
    """With Muon: a tenth of the parameters comes down in the place of a sum. The gradients of the
    others are all-reduced, and then these parameters are gathered."""
    kind = replace(dense(4, 2), left=0.9 * M)
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True)
    kept = way(advise(training, network(4)), "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * M)
    assert kept.parameters == pytest.approx(0.9 * 1.75 * M)
    whole = Training(kinds=(kind,), gradient_bytes=2)
    kept = way(advise(whole, network(4)), "--use-dpu-reduce", "--dpu-optimizer")
    assert kept.gradients == pytest.approx(2 * M) and kept.parameters == 0


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
    said = table.change(advise(training, network(4)))
    assert text in said and said.startswith("shortest" if "add" in text else "change nothing")


@pytest.mark.parametrize(("name", "gain"), [("int8", 6 / 1.016), ("int4", 6 / 0.516)])
def test_few_bits_count_as_what_they_are(name: str, gain: float) -> None:
    """A job that has them is told what they gain; another one is not advised to use them."""
    flag = f"--dpu-reduce-wire-dtype {name}"
    has = Training(kinds=(dense(4, 1),), used=True, wire_bytes=wire_bytes(name))
    advice = advise(has, network(4))
    assert advice.best.flags == ("--use-dpu-reduce", flag) and not (advice.add or advice.drop)
    assert advice.best.gain == pytest.approx(gain, rel=1e-3)
    others = advise(replace(has, wire_bytes=None), network(4))
    assert flag not in (*others.best.flags, *others.add)


def test_few_bits_are_shown_and_not_advised() -> None:
    advice = advise(Training(kinds=(dense(4, 1),), used=True), network(4))
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
    told = table.types(buckets)
    assert "go to servers: 260.00 MB as int8, 10.00 MB in 16 bits" in told
    assert "come back" not in told
    told = table.types([*buckets, bucket(routes.FLAT, 12_800_000, 0, updated=True)])
    assert told.endswith("; 13.00 MB come back as int8 differences")


def test_a_flag_that_loses_is_to_be_dropped() -> None:
    """NCCL uses all NICs of a host, and servers that keep the optimizer one."""
    has = Training(kinds=(dense(4, 8),), gradient_bytes=2, used=True, updated=True)
    advice = advise(has, network(4, nics=8))
    assert (advice.add, advice.drop) == ((), ("--dpu-optimizer",))
    assert ": drop --dpu-optimizer (1.00 x)" in table.change(advice)


def test_a_flag_that_changes_nothing_is_not_named() -> None:
    """Fewer bits on the wire, where gradients have 16 anyway."""
    has = Training(kinds=(dense(4, 1),), gradient_bytes=2, used=True, wire_bytes=2)
    advice = advise(has, network(4))
    assert (advice.add, advice.drop) == ((), ()) and advice.best.gain == pytest.approx(1.5)


def test_rates_that_are_not_known_compare_bytes() -> None:
    training = Training(kinds=(dense(4, 1),))
    links = Network(servers=Servers(hosts=4, extra=4), host_rate=None, server_rate=None)
    advice = advise(training, links)
    assert way(advice, "--use-dpu-reduce").gain == pytest.approx(1.5)
    assert "bytes are compared" in table.brief(training, advice, links)
