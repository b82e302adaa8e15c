"""What users write on the command line."""

from __future__ import annotations

import pytest

from bench.kit.plan import Plan
from bench.kit.units import parse_rate, parse_size, show_rate, show_size, sweep
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


def test_rates() -> None:
    assert parse_rate("500mbit") == 500_000_000
    assert parse_rate("2.5gbit") == 2_500_000_000
    with pytest.raises(ValueError, match="500mbit or 1gbit"):
        parse_rate("500MB")


@pytest.mark.parametrize("text", ["4KiB", "1MiB", "3GiB", "1000B"])
def test_shown_sizes_are_read_back(text: str) -> None:
    assert show_size(parse_size(text)) == text


@pytest.mark.parametrize("text", ["500mbit", "1gbit", "2500mbit", "7kbit"])
def test_shown_rates_are_read_back(text: str) -> None:
    assert show_rate(parse_rate(text)) == text


def test_a_sweep_ends_at_the_largest() -> None:
    assert sweep(4, 64, 4) == [4, 16, 64]
    assert sweep(4, 63, 4) == [4, 16]
    with pytest.raises(ValueError, match="factor"):
        sweep(4, 64, 1)


def plan_of(*arguments: str, **environment: str) -> Plan:
    return make_plan(parse(arguments, ""), environment)


def test_every_size_of_every_type_is_a_case() -> None:
    plan = plan_of("--min", "4KiB", "--max", "64KiB", "--dtype", "float32,bfloat16")
    found = [(case.dtype, case.size, case.count) for case in plan.cases]
    assert found == [
        ("float32", 4096, 1024),
        ("float32", 16384, 4096),
        ("float32", 65536, 16384),
        ("bfloat16", 4096, 2048),
        ("bfloat16", 16384, 8192),
        ("bfloat16", 65536, 32768),
    ]


def test_a_size_is_split_into_tensors_without_a_rest() -> None:
    (case,) = plan_of("--sizes", "4KiB", "--tensors", "3").cases
    assert case.lengths() == [342, 341, 341]


def test_emulated_hosts() -> None:
    plan = plan_of("--emulate", "8@500mbit", "--workers", "4", "--servers", "4")
    assert (plan.topology.emulated_hosts, plan.topology.link_bits) == (8, 500_000_000)
    assert plan.max_busy == 0.8
    assert plan_of().max_busy == 1.0


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
        (["--uneven", "4"], "for hosts of several ranks"),
        (["--iters", "0"], "at least 1"),
        (["--workers", "0"], "at least one worker"),
    ],
)
def test_bad_use_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_of(*arguments)


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
        (["--min-ratio", "1", "--backends", "byteps"], "another backend"),
        (["--min-of-limit", "0.9"], "--emulate or --link"),
    ],
)
def test_bars_that_cannot_be_held_are_refused(arguments: list[str], complaint: str) -> None:
    options = parse(arguments, "")
    with pytest.raises(ValueError, match=complaint):
        make_gates(options, make_plan(options, {}))


def test_bars_apply_to_every_case() -> None:
    arguments = ["--sizes", "4KiB,1MiB", "--link", "1gbit", "--min-of-limit", "0.9"]
    options = parse([*arguments, "--min-ratio", "1.4", "--max-cpu-ratio", "3"], "")
    gates = make_gates(options, make_plan(options, {}))
    assert sorted(gate.kind for gate in gates) == sorted(["cpu", "of-limit", "ratio"] * 2)
