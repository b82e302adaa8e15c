"""Gain of each change of arguments: a pure function of hosts, bytes and links."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byteps import forecast as package
from byteps.cost_model import Servers
from byteps.forecast import (
    DDP,
    FEW_BITS,
    FSDP2,
    Forecast,
    Kind,
    Machines,
    Row,
    Training,
    answer,
    forecast,
    learning,
    table,
)
from byteps.routing import Network
from byteps.torch import wire

ELEMENTS = 1e9
RATE = 10e9 / 8
USE, OPTIMIZER = "--use-dpu-reduce", "--dpu-optimizer"
HALF, INSTANCES = "--grad-reduce-in-bf16", "--num-distributed-optimizer-instances 4"
BF16, INT8, INT4 = (f"--dpu-reduce-wire-dtype {name}" for name in ("bf16", "int8", "int4"))


def network_of(hosts: int, spare: int | None = None, nics: int = 1) -> Network:
    """Make a network with as many spare machines as hosts, or with servers on the hosts only."""
    count = hosts if spare is None else spare
    return Network(
        servers=Servers(hosts=hosts, extra=count, local=0 if count else 1),
        host_rate=RATE,
        server_rate=RATE,
        collective_rate=nics * RATE if nics > 1 else None,
    )


def dense(hosts: int, per_host: int, groups: float = 1) -> Kind:
    members = tuple(host for host in range(hosts) for _ in range(per_host))
    return Kind(name="dense", groups={members: groups}, elements=ELEMENTS)


def row(predicted: Forecast, *flags: str) -> Row:
    return next(row for row in predicted.rows if row.flags == flags and not row.compared)


def test_plain_megatron_is_compared_with_its_own_best_flags() -> None:
    """4 hosts with 2 ranks each, and fp32 gradients. If everything is sharded over all ranks, 7/8
    of 4 bytes and of 2 bytes leave a host.

    With an instance per host and bf16, 3/4 of 2 bytes leave a host twice.
    """
    training = Training(kinds=(dense(4, 2),), sharded=True)
    predicted = forecast(training, network_of(4))
    assert predicted.rows[0].gradients == pytest.approx(3.5 * ELEMENTS)
    assert predicted.rows[0].parameters == pytest.approx(1.75 * ELEMENTS)
    assert predicted.plain.flags == (INSTANCES, HALF)
    assert predicted.plain.gradients == pytest.approx(3 * ELEMENTS) and predicted.plain.gain == 1
    assert predicted.plain.over_now == pytest.approx(5.25 / 3)
    served = row(predicted, USE, BF16, OPTIMIZER)
    assert served.gain == pytest.approx(3 / 2), "over the best plain row, not over this job"
    assert served.over_now == pytest.approx(5.25 / 2)


def test_a_gain_of_plain_flags_is_not_ours() -> None:
    """Servers on the hosts send the same bytes as NCCL with an instance per host."""
    training = Training(kinds=(dense(4, 8),), gradient_bytes=2, sharded=True)
    predicted = forecast(training, network_of(4, spare=0))
    local = row(predicted, USE, INSTANCES)
    assert local.through_servers == () and local.gain == pytest.approx(1)
    assert local.over_now == pytest.approx(2 * 31 / 32 * 2 / 3)
    assert "gain of plain flags" in table(predicted)
    assert f"add {INSTANCES} (1.29 x, by plain Megatron alone" in answer(predicted)
    assert USE not in answer(predicted).split(";")[0]


def test_the_distributed_optimizer_is_a_row_where_the_job_could_use_it() -> None:
    predicted = forecast(Training(kinds=(dense(4, 1),), can_shard=True), network_of(4))
    sharded = row(predicted, "--use-distributed-optimizer")
    assert sharded.over_now == pytest.approx(6 / 4.5)
    assert predicted.plain.flags == (HALF,), "as few bytes, and a shorter change"


def test_fp16_gradients_are_not_reduced_in_bf16() -> None:
    predicted = forecast(Training(kinds=(dense(4, 1),), bf16=False), network_of(4))
    assert not any(HALF in row.flags for row in predicted.rows)


def test_a_script_without_megatron_is_told_variables() -> None:
    """A script without Megatron is advised variables: it has no server optimizer, and torch's hook
    sends bf16."""
    predicted = forecast(Training(kinds=(dense(4, 1),), program=DDP), network_of(4, spare=0))
    assert predicted.plain.flags == (HALF,)
    assert not any(row.optimizer == "servers" for row in predicted.rows)
    said = answer(predicted)
    assert said.startswith("in 16 bits or more: add bf16_compress_hook (2.00 x, by plain DDP alone")
    assert "add BYTEPS_C10D=1 BYTEPS_C10D_WIRE_DTYPE=int8 (1.97 x)" in said
    assert "--" not in said + table(predicted) + package.break_even(predicted)


@pytest.mark.parametrize(
    ("has", "typed"),
    [
        ({}, "add --dpu-preset own-hosts ("),
        ({"used": True}, "add --dpu-preset own-hosts ("),
        ({"used": True, "wire": "int8"}, f"add {OPTIMIZER} ("),
        ({"used": True, "updated": True}, f"add {INT8} ("),
    ],
)
def test_one_word_stands_for_what_the_preset_has(has: dict[str, Any], typed: str) -> None:
    """The preset is advised with servers on the hosts. A job that has some of its flags gets the
    rest."""
    training = Training(kinds=(dense(4, 1),), gradient_bytes=2, sharded=True, **has)
    predicted = forecast(replace(training, accepts="int8"), network_of(4, spare=0))
    assert predicted.best.flags == (USE, INT8, OPTIMIZER)
    assert answer(predicted).startswith(f"in int8 or more: {typed}")
    assert "--dpu-preset" not in answer(forecast(training, network_of(4)))
    four = forecast(replace(training, accepts="int4"), network_of(4, spare=0))
    assert four.best.flags == (USE, INT4, OPTIMIZER)
    rest = f"{INT4} (" if training.updated else f"--dpu-preset own-hosts {INT4} ("
    assert rest in answer(four) or training.wire


@pytest.mark.parametrize("spare", [0, 4])
def test_a_job_with_the_preset_is_advised_in_terms_of_the_preset(spare: int) -> None:
    """Such a job cannot drop a flag for which the preset stands."""
    training = Training(
        kinds=(dense(4, 2),),
        gradient_bytes=2,
        sharded=True,
        used=True,
        updated=True,
        wire="int8",
        preset=True,
    )
    predicted = forecast(training, network_of(4, spare=spare))
    now = row(predicted, USE, INT8, OPTIMIZER)
    assert predicted.name(now) == "--dpu-preset own-hosts" and predicted.changes(now) == ((), ())
    more = row(predicted, USE, INT4, OPTIMIZER)
    assert predicted.changes(more) == ((INT4,), ())
    for other in (row(predicted, USE, INT4, INSTANCES), row(predicted, USE, OPTIMIZER)):
        assert predicted.changes(other) == (other.flags, ("--dpu-preset own-hosts",))
    assert predicted.changes(predicted.plain)[1] == ("--dpu-preset own-hosts",)


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [((), 6.0), ((USE, INT8), 3 * 130 / 128), ((USE, INT4), 2 * 130 / 128 + 66 / 128)],
)
def test_fsdp2_gathers_parameters_twice(flags: tuple[str, ...], nbytes: float) -> None:
    """Bytes per parameter over the NIC of one of 4 hosts: docs/design/how-it-works.md has them,
    without the factor 3/4."""
    training = Training(kinds=(dense(4, 1),), gradient_bytes=2, sharded=True, program=FSDP2)
    predicted = forecast(training, network_of(4, spare=0))
    entry = row(predicted, *flags)
    sent = (entry.gradients + entry.parameters) / ELEMENTS
    assert sent == pytest.approx(3 / 4 * nbytes, rel=1e-3)
    assert entry.gain == pytest.approx(6 / nbytes, rel=1e-3)
    # Half of the gathers precede the forward pass, a third of the computing time.
    assert entry.step_seconds(1e-9) == pytest.approx(entry.seconds)
    assert entry.step_seconds(1.5 * entry.seconds) == pytest.approx(1.5 * entry.seconds)


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"link_gbps": 400, "nics": 8, "transport": "rdma"}, "memory"),
        ({"link_gbps": 400, "nics": 8}, ""),
        ({"link_gbps": 25, "worker_cores": 2}, "cores"),
        ({"link_gbps": 25, "micro_batch_s": 12.0}, ""),
    ],
    ids=["memory", "tcp", "cores", "hidden"],
)
def test_nccl_is_kept_where_a_host_cannot_feed_its_nics_or_has_nothing_to_hide(
    change: dict[str, Any], limit: str
) -> None:
    """The cases: a fast NIC for each of 8 GPUs, too few cores, and a backward pass that hides
    everything."""
    machines = Machines(**{"hosts": 8, "gpus": 8, **change})
    kind = replace(dense(8, 8), elements=7e9)
    training = Training(kinds=(kind,), gradient_bytes=2, can_shard=True)
    predicted = forecast(training, machines)
    assert predicted.best.plain and not predicted.few_bits
    assert row(predicted, USE, INT8).limit == limit
    assert "change nothing" in answer(predicted)
    assert bool(package.limit_text(predicted, machines)) == ("micro_batch_s" not in change)
    one_nic = Machines(hosts=8, gpus=8, link_gbps=25, micro_batch_s=1.0)
    assert len(forecast(training, one_nic).few_bits) == 2


@pytest.mark.parametrize(("hosts", "fp8"), [(2, 1.508), (4, 2.262), (8, 2.639)])
def test_fp8_over_nccl_is_compared_and_never_advised(hosts: int, fp8: float) -> None:
    """FP8 gradients and bf16 parameters over NCCL, with shards, are shown but never advised."""
    training = Training(kinds=(dense(hosts, 1),), gradient_bytes=2, sharded=True)
    predicted = forecast(training, network_of(hosts))
    (compared,) = (row for row in predicted.rows if row.compared)
    assert (compared.gradients + compared.parameters) / ELEMENTS == pytest.approx(fp8, abs=0.001)
    assert compared not in (predicted.best, predicted.plain, *predicted.few_bits)
    assert "for comparison: not in Megatron" in table(predicted)


@pytest.mark.parametrize(
    ("hosts", "int8", "both", "int4"),
    [(2, 1.016, 0.766, 0.516), (4, 1.523, 1.148, 0.773), (8, 1.777, 1.34, 0.902)],
)
def test_servers_on_the_hosts_gain_by_few_bits(
    hosts: int, int8: float, both: float, int4: float
) -> None:
    """Bytes per parameter over a host's NIC: docs/use/when-to-use.md has this table."""
    links = network_of(hosts, spare=0)
    sharded = Training(kinds=(dense(hosts, 1),), gradient_bytes=2, sharded=True)
    predicted = forecast(sharded, links)
    plain = 4 * (hosts - 1) / hosts
    for wire_flag, nbytes in ((INT8, int8), (INT4, both)):
        served = row(predicted, USE, wire_flag, OPTIMIZER)
        assert served.gradients / ELEMENTS == pytest.approx(nbytes, abs=0.001)
        assert served.gain == pytest.approx(plain / nbytes, rel=0.002)
    whole = forecast(replace(sharded, sharded=False), links)
    for wire_flag, nbytes in ((INT8, int8), (INT4, int4)):
        assert row(whole, USE, wire_flag).gradients / ELEMENTS == pytest.approx(nbytes, abs=0.001)
    assert [row.wire for row in whole.few_bits] == ["int8", "int4"]
    said = answer(whole)
    assert said.startswith("in 16 bits or more: change nothing: servers are less than 1.1 x")
    assert f"add --dpu-preset own-hosts ({whole.few_bits[0].gain:.2f} x)" in said
    said = package.break_even(whole)
    most = float(re.findall(r"computes for at most (\S+) s", said)[0])
    least, int8_row = whole.plain.seconds, whole.few_bits[0]
    assert (most + least) / (most + int8_row.seconds) == pytest.approx(1.1, rel=0.01)
    assert f"--dpu-preset own-hosts saves {least - int8_row.seconds:.3g} s of it" in said
    said = package.break_even(replace(whole, micro_batch_s=0.1))
    batches = int(re.findall(r" s: (\d+) micro-batches of 100 ms\.", said)[0])
    assert batches == pytest.approx(most / 0.1, rel=0.01, abs=1)
    said = answer(whole)
    assert "compare your loss curves first" in said and "on each of" in package.servers_text(
        links.servers
    )


def test_one_rank_a_host_with_fp32_gradients() -> None:
    """An element has 4 bytes. A host sends 2 * 3/4 of them in a ring, all of them in a push, and
    half of them in a push in bf16."""
    predicted = forecast(Training(kinds=(dense(4, 1),)), network_of(4))
    ring, flag = predicted.rows[0], row(predicted, USE)
    assert ring.gradients == pytest.approx(6 * ELEMENTS) and ring.parameters == 0
    assert flag.gradients == pytest.approx(4 * ELEMENTS) == pytest.approx(flag.server)
    assert flag.over_now == pytest.approx(1.5) and flag.seconds == pytest.approx(4e9 / RATE)
    half = row(predicted, USE, BF16)
    assert half.over_now == pytest.approx(3) and half.gain == pytest.approx(1.5)
    served = row(predicted, USE, OPTIMIZER)
    assert served.over_now == pytest.approx(1.5), "parameters come down in the place of the sum"
    assert predicted.best == half, "of two that are as fast, the shorter change"


def test_the_default_recipe_gains_by_the_optimizer_on_the_servers() -> None:
    """bf16 gradients, distributed optimizer in one instance, 4 hosts x 2 ranks.

    Over NCCL, 7/8 of an element's 2 bytes leave a host for the gradients, and 7/8 of 2 bytes for
    the parameters. Servers receive 2 bytes and send 2 bytes at the same time.
    """
    training = Training(kinds=(dense(4, 2),), gradient_bytes=2, sharded=True)
    predicted = forecast(training, network_of(4))
    today = predicted.rows[0]
    assert today.gradients == pytest.approx(1.75 * ELEMENTS) == today.parameters
    flag = row(predicted, USE)
    assert flag.over_now == 1.0 and flag.through_servers == ()
    local = row(predicted, USE, INSTANCES)
    assert local.gradients == pytest.approx(2 * ELEMENTS) and local.parameters == 0
    served = row(predicted, USE, OPTIMIZER)
    assert served.gradients == pytest.approx(2 * ELEMENTS) and served.over_now == pytest.approx(
        1.75
    )
    assert not any("wire-dtype bf16" in predicted.name(row) for row in predicted.rows), (
        "they are bf16 already"
    )
    few = row(predicted, USE, INT8, INSTANCES)
    assert few.gain == pytest.approx(3 / 1.016, rel=1e-3)
    assert predicted.best.gain == pytest.approx(1.5)
    refused = forecast(training, network_of(4), "it cannot")
    assert row(refused, USE, OPTIMIZER).refused == "it cannot"
    assert refused.best == row(refused, *local.flags)


def test_groups_that_share_a_host_share_its_nic() -> None:
    """Tensor parallelism of 8 on hosts of 8 GPUs makes 8 groups, each with a rank per host."""
    predicted = forecast(Training(kinds=(dense(4, 1, groups=8),)), network_of(4))
    assert predicted.rows[0].gradients == pytest.approx(48 * ELEMENTS)
    flag = row(predicted, USE)
    assert flag.gradients == pytest.approx(32 * ELEMENTS) == flag.server
    assert flag.over_now == pytest.approx(1.5)


def test_stages_on_hosts_of_their_own_share_the_servers() -> None:
    """Two groups of four hosts each share eight servers, so a server takes an eighth of each
    push."""
    kind = Kind(name="dense", groups={(0, 1, 2, 3): 1, (4, 5, 6, 7): 1}, elements=ELEMENTS)
    flag = row(forecast(Training(kinds=(kind,)), network_of(8)), USE)
    assert flag.gradients == pytest.approx(4 * ELEMENTS) == flag.server


def test_experts_inside_a_host_stay_there() -> None:
    expert = Kind(
        name="expert", groups={(0,) * 2: 4, (1,) * 2: 4, (2,) * 2: 4}, elements=9 * ELEMENTS
    )
    predicted = forecast(Training(kinds=(dense(3, 1), expert)), network_of(3))
    assert predicted.rows[0].gradients == pytest.approx(4 * ELEMENTS * 4 / 3)
    assert row(predicted, USE).through_servers == ("dense",)
    assert [kind.name for kind in predicted.training.crossing] == ["dense"]


def test_a_nic_for_each_of_eight_gpus_leaves_nothing_to_gain() -> None:
    """NCCL uses all NICs, BytePS only one."""
    training = Training(kinds=(dense(4, 8),), gradient_bytes=2)
    predicted = forecast(training, network_of(4, nics=8))
    assert row(predicted, USE).through_servers == ()
    assert predicted.best.flags == () and answer(predicted).endswith(
        "less than 1.1 x as fast as plain Megatron"
    )
    has = forecast(replace(training, used=True, updated=True), network_of(4, nics=8))
    assert has.changes(has.best) == ((), (OPTIMIZER,))
    assert f"drop {OPTIMIZER}: plain Megatron is as fast" in answer(has)


def test_inside_one_host_there_is_nothing_to_say() -> None:
    predicted = forecast(Training(kinds=(dense(1, 8),)), network_of(1))
    assert predicted.best.flags == () and predicted.few_bits == ()
    assert answer(predicted) == table(predicted) == "no gradient crosses hosts: nothing to gain"


@pytest.mark.parametrize(
    ("kind", "instances", "own_instances"),
    [
        (dense(4, 2), 1, 4),
        (dense(4, 2), 4, None),
        # A single rank would be an instance that shards nothing.
        (dense(4, 1), 1, None),
        # An instance has consecutive members. Here these are on different hosts.
        (Kind(name="dense", groups={(0, 1, 2, 3) * 2: 1}, elements=ELEMENTS), 1, None),
    ],
)
def test_an_instance_for_each_host(kind: Kind, instances: int, own_instances: int | None) -> None:
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True, instances=instances)
    asked_of = forecast(training, network_of(4))
    names = [asked_of.name(row) for row in asked_of.rows if not row.plain]
    names_shown = [name for name in names if "instances" in name and "wire" not in name]
    assert names_shown == (
        [f"{USE} --num-distributed-optimizer-instances {own_instances}"] if own_instances else []
    )


def test_matrices_that_stay_on_the_ranks_go_their_own_way() -> None:
    """With Muon, only a tenth of the parameters is updated on servers.

    The gradients of the other parameters, the matrices, are all-reduced, and then their parameters
    are gathered.
    """
    kind = replace(dense(4, 2), left=0.9 * ELEMENTS)
    training = Training(kinds=(kind,), gradient_bytes=2, sharded=True)
    served = row(forecast(training, network_of(4)), USE, OPTIMIZER)
    assert served.gradients == pytest.approx(2 * ELEMENTS)
    assert served.parameters == pytest.approx(0.9 * 1.75 * ELEMENTS)
    served = row(forecast(replace(training, sharded=False), network_of(4)), USE, OPTIMIZER)
    assert served.gradients == pytest.approx(2 * ELEMENTS) and served.parameters == 0


@pytest.mark.parametrize(
    ("has", "text"),
    [
        ({}, f"add {USE} {BF16} (1.50 x as fast as plain"),
        ({"used": True}, f"add {BF16} (1.50 x"),
        ({"used": True, "wire": "bf16"}, "change nothing: what runs is 1.50 x"),
        # This job is as fast as the best one, which would need two changes.
        ({"used": True, "wire": "bf16", "updated": True}, "change nothing: what runs is 1.50 x"),
        ({"used": True, "updated": True}, f"add {BF16} (1.50 x"),
    ],
)
def test_the_answer_names_what_a_job_does_not_have(has: dict[str, Any], text: str) -> None:
    said = answer(forecast(Training(kinds=(dense(4, 1),), **has), network_of(4)))
    assert said.startswith(f"in 16 bits or more: {text}")


@pytest.mark.parametrize(("name", "nbytes"), [("int8", 1.016), ("int4", 0.516)])
@pytest.mark.parametrize("how", ["wire", "accepts"])
def test_few_bits_that_the_user_agrees_with_are_advised(name: str, nbytes: float, how: str) -> None:
    """A job that sends few bits, or whose user accepts them, is shown their gain.

    For other jobs they are recommended only with a note on the loss.
    """
    flag = f"--dpu-reduce-wire-dtype {name}"
    job = Training(kinds=(dense(4, 1),), used=True)
    training = replace(job, wire=name) if how == "wire" else replace(job, accepts=name)
    predicted = forecast(training, network_of(4))
    assert predicted.best.flags == (USE, flag) and predicted.best.gain == pytest.approx(
        3 / nbytes, rel=0.001
    )
    assert predicted.changes(predicted.best) == (((), ()) if how == "wire" else ((flag,), ()))
    assert answer(predicted).startswith(f"in {name} or more: ")
    others = forecast(Training(kinds=(dense(4, 1),), used=True), network_of(4))
    assert flag not in others.best.flags
    assert flag in answer(others).split("with fewer bits")[1]


def test_few_servers_on_spare_machines_are_not_worth_it() -> None:
    training = Training(kinds=(dense(8, 1),), gradient_bytes=2)
    machines = Machines(hosts=8, gpus=1, link_gbps=10, spare=1)
    predicted = forecast(training, machines)
    assert row(predicted, USE).gain == pytest.approx(1.09, abs=0.01) and predicted.best.plain


def test_megatrons_flags_that_hide_time_are_named() -> None:
    training = Training(kinds=(dense(4, 1),), missing_overlaps=("--overlap-grad-reduce",))
    assert answer(forecast(training, network_of(4))).endswith(
        "; --overlap-grad-reduce would hide time in each of these"
    )


def test_types_are_those_that_travel() -> None:
    for name, nbytes in package.WIRE_BYTES.items():
        if name in wire.NAMES:
            assert nbytes == wire.NAMES[name].element_bytes / wire.NAMES[name].values


@pytest.mark.parametrize(
    ("extra", "local", "said"),
    [
        (0, 1, "servers: 1 on each of 4 hosts"),
        (4, 0, "servers: 1 on each of 4 machines of their own"),
        (1, 1, "servers: 1 on each of 1 machine of their own, 1 on each of 4 hosts"),
    ],
)
def test_where_servers_are(extra: int, local: int, said: str) -> None:
    assert package.servers_text(Servers(hosts=4, extra=extra, local=local)) == said


def test_every_row_of_few_bits_has_a_measured_loss() -> None:
    """The rows have the loss or say that there is none. The page of few bits has the
    measurements."""
    predicted = forecast(Training(kinds=(dense(4, 1),), gradient_bytes=2), network_of(4))
    for entry in predicted.rows:
        assert bool(entry.loss) == (entry.compared or entry.wire in FEW_BITS)
        if entry.loss:
            assert f"loss {entry.loss}" in package.table(predicted)
    assert row(predicted, USE, INT4, OPTIMIZER).loss == learning.MEASURED["int4", "servers"]
    page = (Path(__file__).parents[2] / "docs/design/few-bits.md").read_text(encoding="utf-8")
    for text in learning.MEASURED.values():
        numbers = re.findall(r"[-+±]\d+\.\d+", text)
        assert numbers and all(number in page for number in numbers), text
