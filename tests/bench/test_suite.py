"""The set of experiments: figures from samples, formulas, thresholds, exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from bench import pushpull_bench
from bench.kit.plan import Case, Plan, Topology
from bench.kit.processes import LaunchError
from bench.pushpull import suite
from bench.pushpull.launch import Launch, Run, busiest_link, least_seconds
from bench.pushpull.rank import Measured, iteration_seconds
from bench.pushpull.sets import SETS, choose
from bench.pushpull.suite import described, parts_in
from bench.pushpull.tables import (
    Experiment,
    Gate,
    judge,
)
from bench.pushpull_bench import parse


def experiment(name: str, low: float) -> Experiment:
    plan = make_run().plan
    gates = [Gate(kind="ratio", case=plan.cases[0], low=low)]
    return Experiment(name=name, why="it is made up", plan=plan, gates=gates)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all experiments by two, 1.5 times as fast as gloo; return the names of those that
    ran."""
    names: list[str] = []

    def run_plan(plan: Plan, name: str, deadline: float | None) -> Run:
        names.append(name)
        run = make_run()
        run.name, run.plan = name, plan
        return run

    set_up = [experiment("easy", 1.4), experiment("hard", 1.6)]
    monkeypatch.setitem(SETS, "quick", lambda: set_up)
    monkeypatch.setattr(suite, "run_plan", run_plan)
    return names


@pytest.mark.parametrize(("only", "status"), [(["easy"], 0), (["hard"], 1), (["no"], 2), ([], 1)])
def test_exit_status(measured: list[str], only: list[str], status: int) -> None:
    assert suite.main(["--only", *only] if only else []) == status
    if status != 2:
        assert measured == (only or ["easy", "hard"])


def test_a_failed_launch_does_not_stop_the_rest(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works: Callable[..., Run] = suite.run_plan

    def run_plan(plan: Plan, name: str, deadline: float | None) -> Run:
        if name == "easy":
            raise LaunchError("server-0 fell over")
        return works(plan, name, deadline)

    monkeypatch.setattr(suite, "run_plan", run_plan)
    assert suite.main([]) == 1
    captured = capsys.readouterr()
    assert "easy FAILED: server-0 fell over" in captured.err
    assert "no results of: easy" in captured.err
    assert "## hard" in captured.out


CASE = Case(size=1 << 20, dtype="float32", iters=3, warmup=1)
SAMPLES = {"byteps": [[1.0, 1.1], [1.05, 1.0]], "gloo": [[1.5, 1.6], [1.55, 1.5]]}
QUIET, MAX_BUSY = 0.1, 0.8


def make_run(
    samples: Mapping[str, Sequence[Sequence[float]]] = SAMPLES,
    *,
    busy: Mapping[int, float] | None = None,
    wrong: int = 0,
    link_bits: int = 8 << 20,
) -> Run:
    """Make a run of four workers and four servers; ``busy`` is the machine's load by launch."""
    topology = Topology(workers=4, servers=4, emulated_hosts=8, link_bits=link_bits)
    plan = Plan(
        cases=(CASE,),
        topology=topology,
        backends=tuple(samples),
        device="cuda" if any(name.startswith("nccl") for name in samples) else "cpu",
        max_busy=MAX_BUSY,
    )
    run = Run(plan=plan, name="made-up")
    for backend, launches in samples.items():
        for index, seconds in enumerate(launches):
            measured = Measured(
                case=CASE,
                samples_s=list(seconds),
                wrong=wrong,
                worker_cpu_s=0.3,
                node_cpu_s=0.1 if backend == "byteps" else None,
                busy=(busy or {}).get(index, QUIET),
            )
            is_quiet = measured.busy <= MAX_BUSY
            run.launches.append(
                Launch(backend=backend, index=index, measured=[measured], kept=is_quiet)
            )
    return run


# Figures from samples: medians, spreads, limits, thresholds.


def test_the_slowest_rank_counts() -> None:
    # Rank 1 begins 2 s after rank 0, so that rank 0 waits for it.
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
    """With x = 3/10 on each machine and y = 1/10 on each worker's host: 4 * 3/10 = 1 + 2 * 1/10."""
    both = Topology(workers=4, servers=2, servers_per_machine=3, local_servers=1)
    assert busiest_link("byteps", both) == pytest.approx(1.2)


def test_the_limit_counts_all_nics() -> None:
    one_nic = Topology(workers=2, servers=1, emulated_hosts=3, link_bits=8_000_000)
    two = Topology(**{**one_nic.__dict__, "nics_per_host": 2})
    assert least_seconds("byteps", one_nic, 1_000_000) == pytest.approx(2.0)
    assert least_seconds("byteps", two, 1_000_000) == pytest.approx(1.0)
    assert least_seconds("byteps-one-nic", two, 1_000_000) == pytest.approx(2.0)


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
def test_a_value_meets_its_thresholds(
    kind: str, low: float | None, high: float | None, value: float, ok: bool
) -> None:
    run = make_run({"byteps": [[1.0]], "gloo": [[1.5]]})
    verdict = judge(Gate(kind=kind, case=CASE, low=low, high=high), run)
    assert verdict.value == pytest.approx(value)
    assert verdict.ok == ok


# Outputs of a run: tables, JSON, Markdown, pictures, an exit status.


DOCS = Path(__file__).resolve().parents[2] / "docs"
REDRAW = (
    "bench/pushpull/suite.py --from-markdown docs/results/figures.md "
    "--chart docs/images/speed.png, by build/venv/bin/python"
)


def options_of(*arguments: str) -> argparse.Namespace:
    return parse(arguments, "")


def test_a_wrong_result_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert pushpull_bench.report(make_run(), [], options_of(), []) == 0
    assert pushpull_bench.report(make_run(wrong=1), [], options_of(), []) == 1
    assert capsys.readouterr().out.splitlines()[-4].endswith(" 2")


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_bar_of_a_set_is_about_a_case_of_its_plan(name: str) -> None:
    for experiment in choose(name):
        assert experiment.gates
        for gate in experiment.gates:
            assert gate.case in experiment.plan.cases
            if gate.kind in ("ratio", "cpu"):
                assert gate.base in experiment.plan.backends
            assert gate.base_case is None or gate.base_case in experiment.plan.cases


def test_the_documents_chart_shows_its_tables() -> None:
    experiments = parts_in((DOCS / "results/figures.md").read_text())
    by_label = {experiment.label: experiment.of_limit for experiment in experiments}
    # The time that the links allow, divided by the backend's time: 0.963 * 4459 / 6494 for gloo.
    assert by_label["4+4-500mbit\n256MiB float32"] == pytest.approx(
        {"byteps": 0.963, "gloo": 0.6612}, rel=1e-3
    )
    assert by_label["4 + 4, 10 Gbit/s, GPU\n256 MiB"]["nccl"] == pytest.approx(0.927 / 1.42)
    assert by_label["4 of two GPUs + 4, 10 Gbit/s, GPU\n256 MiB"]["byteps"] == 0.91
    picture = (DOCS / "images/speed.png").read_bytes()
    assert described(experiments).encode() in picture, f"draw it again: {REDRAW}"
