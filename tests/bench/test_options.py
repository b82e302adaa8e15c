"""What users write on the command line."""

from __future__ import annotations

import pytest

from bench.kit.plan import Plan
from bench.kit.units import parse_size
from bench.pushpull.options import make_gates, make_plan, parse


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("1.5MiB", 3 << 19),
        ("1GB", 10**9),
        ("2 gib", 2 << 30),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-4KiB", "1.3B", "0", "12 parsecs", "1e6"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"understood|whole"):
        parse_size(text)


def plan_of(*arguments: str, **environment: str) -> Plan:
    return make_plan(parse(arguments, ""), environment)


def test_a_launcher_says_how_many_workers_there_are() -> None:
    plan = plan_of(RANK="3", WORLD_SIZE="6", DMLC_NUM_SERVER="2")
    assert (plan.topology.workers, plan.topology.servers) == (6, 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backends", "byteps,mpi"], "backend 'mpi' is none of"),
        (["--backends", "gloo,gloo"], "each backend once"),
        (["--backends", "nccl"], "--device cuda"),
        (["--backends", "sockets", "--flows", "0"], "at least one flow"),
        (["--dtype", "float8"], "dtype 'float8' is none of"),
        (["--sizes", "6B"], "no whole number of float32"),
        (["--sizes", "8B", "--tensors", "3"], "cannot be split"),
        (["--min", "4KiB"], "--min and --max together"),
        (["--emulate", "500mbit"], "like 8@500mbit"),
        (["--emulate", "4@1gbit", "--workers", "4", "--servers", "4"], "need 8 hosts"),
        (["--nics-per-host", "2"], "for the hosts of --emulate"),
        (["--nics-per-host", "0"], "a number of NICs"),
        (["--uneven", "4"], "for hosts of several ranks"),
        (["--iters", "0"], "at least 1"),
        (["--workers", "0"], "at least one worker"),
    ],
)
def test_bad_use_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_of(*arguments)


def test_nics_have_the_rate_of_a_link_each() -> None:
    topology = plan_of("--emulate", "3@200mbit", "--nics-per-host", "2").topology
    assert (topology.link_bits, topology.host_bits) == (200_000_000, 400_000_000)


def test_plain_sockets_are_not_for_a_rank() -> None:
    with pytest.raises(ValueError, match="without a launcher"):
        plan_of("--backends", "sockets", RANK="0", WORLD_SIZE="2")


def test_emulation_is_not_for_a_rank() -> None:
    with pytest.raises(ValueError, match="unset RANK"):
        plan_of("--emulate", "3@1gbit", RANK="0", WORLD_SIZE="2")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--min-ratio", "1", "--backends", "gloo"], "does not name"),
        (["--min-ratio", "1", "--backends", "byteps"], "a backend to compare"),
        (["--min-of-limit", "0.9"], "--emulate or --link"),
    ],
)
def test_bars_that_cannot_be_held_are_refused(arguments: list[str], complaint: str) -> None:
    options = parse(arguments, "")
    with pytest.raises(ValueError, match=complaint):
        make_gates(options, make_plan(options, {}))
