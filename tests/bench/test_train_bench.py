"""bench/train_bench.py, from made-up launches to a short training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.kit.emulation import LOOPBACK, Emulation
from bench.kit.plan import Plan, Topology
from bench.kit.processes import LaunchError, Placement, rank_variables
from bench.training import run as train_bench
from bench.training.run import WAYS, Trained, Training, arguments_of, gpus_of, step_seconds
from scripts.trainkit.job import Record, Step

SMALL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]


def record(seconds: list[float]) -> Record:
    steps = [
        Step(iteration=i + 1, loss=5.0, tokens=10, seconds=s, push_pull_mb_per_s=0.0)
        for i, s in enumerate(seconds)
    ]
    return Record(steps=steps, checksum="a")


def test_steps_after_the_warm_up() -> None:
    assert step_seconds(record([9.0, 10.0, 12.0, 15.0]), 2) == [2.0, 3.0]
    assert step_seconds(record([9.0, 10.0]), 0) == [1.0], "the first one's begin is not known"
    with pytest.raises(LaunchError, match="4 of them warm-up: nothing is timed"):
        step_seconds(record([1.0, 2.0, 3.0, 4.0]), 4)


def trained(backend: str, index: int, step_s: list[float], **changes: Any) -> Trained:
    usual: dict[str, Any] = {"tokens": 1000, "losses": [5.0, 4.0], "checksum": "a", "busy": 0.5}
    usual["gpu_bytes"] = 2_500_000_000
    return Trained(backend=backend, index=index, step_s=step_s, **(usual | changes))


LAUNCHES = [
    trained("byteps", 0, [0.1, 0.1, 9.0]),
    trained("all-reduce", 0, [0.2]),
    trained("byteps", 1, [0.2]),
    trained("all-reduce", 1, [0.25]),
]


def test_the_table_and_the_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "launches.json"
    options = train_bench.parse(["--launches", "2", "--json", str(written)])
    assert train_bench.report(LAUNCHES, options, []) == 0
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if line.split()[:1] == ["byteps"])
    # Medians 100 and 200 ms: 150 ms for 1,000 tokens.
    assert ours.split()[3:] == ["150.0", "100.0..200.0", "6,667", "4.0000", "2.50", "2", "50%"]
    assert "byteps over all-reduce: 1.500 (1.250..2.000) times as fast" in lines
    content = json.loads(written.read_text())
    assert content["ratios"] == {"all-reduce": pytest.approx(1.5)} and len(content["launches"]) == 4


def test_a_bar() -> None:
    assert train_bench.report(LAUNCHES, train_bench.parse(["--min-ratio", "1.4"]), []) == 0
    assert train_bench.report(LAUNCHES, train_bench.parse(["--min-ratio", "1.6"]), []) == 1


def test_launches_that_learnt_something_else() -> None:
    first = LAUNCHES[0]
    other = trained("all-reduce", 0, [0.2], checksum="b")
    apart = trained("all-reduce", 0, [0.2], losses=[5.0, 4.1], checksum="b")
    broken = trained("all-reduce", 0, [0.2], losses=[5.0, float("nan")], checksum="b")
    assert "with two workers they may not" in str(train_bench.complaint([first, other], 2))
    assert train_bench.complaint([first, other], 4) is None
    assert "the loss of step 2 differs by 2.5e-02" in str(train_bench.complaint([first, apart], 4))
    assert "the loss of step 2 differs by nan" in str(train_bench.complaint([first, broken], 4))
    options = train_bench.parse([])
    assert train_bench.report([first, apart], options, []) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "5"], "leaves none after --warmup 5"),
        (["--emulate", "8"], "write it like 8@500mbit"),
        (["--emulate", "2@1gbit"], "need 3 hosts"),
        (["--nics-per-host", "2"], "for the hosts of --emulate"),
        (["--workers", "4", "--ranks-per-host", "2", "--emulate", "2@1gbit"], "need 3 hosts"),
        (["--ways", "byteps,ring"], "name each once, of all-reduce, byteps"),
        (["--ways", "byteps,byteps"], "name each once"),
    ],
)
def test_bad_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_bench.parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def words(folder: Path) -> list[str]:
    source = folder / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    usual = ["--data", str(source), "--data-cache", str(folder / "data"), "--timeout", "240"]
    return [*usual, "--steps", "4", "--warmup", "1", "--launches", "1"]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_a_short_training(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: str,
) -> None:
    monkeypatch.setenv("MEGATRON_CPU", "1")
    code = train_bench.main([*words(run_dir), "--workers", workers, "--", *SMALL])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "byteps over all-reduce: " in said.out and "times as fast" in said.out


@pytest.mark.parametrize(
    ("way", "route"),
    [("servers-bf16", "node-first"), ("servers-bf16-flat", "flat"), ("sharded", None)],
)
def test_a_way_that_names_its_route_keeps_it(way: str, route: str | None) -> None:
    what = Training(tree=Path("tree"), arguments=("--bf16",), warmup=1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--dpu-reduce-route")
    known, _ = parser.parse_known_args(arguments_of(what, WAYS[way], 4, "node-first"))
    assert known.dpu_reduce_route == route


def test_hosts_that_outnumber_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert [gpus_of(rank, 2) for rank in range(6)] == ["4,5", "4,5", "6,4", "6,4", "5,6", "5,6"]
    assert [gpus_of(rank, 1) for rank in range(5)] == ["4", "5", "6", "4", "5"]
    with pytest.raises(LaunchError, match="4 ranks per host need as many GPUs, not 3"):
        gpus_of(0, 4)


@pytest.mark.parametrize(
    ("device", "workers", "machines"),
    [("cuda", 2, {None}), ("cuda", 4, {"bench-host-0", "bench-host-1"}), ("cpu", 4, {None})],
)
def test_hosts_are_machines_to_nccl_where_they_share_gpus(
    device: str, workers: int, machines: set[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    topology = Topology(workers=workers, servers=1, ranks_per_host=2)
    plan = Plan(cases=(), topology=topology, backends=("byteps",), device=device)
    placement = Placement(topology, [LOOPBACK], shares_gpus=plan.shares_gpus())
    variables = [rank_variables(rank, placement) for rank in range(workers)]
    assert {one.get("NCCL_HOSTID") for one in variables} == machines


@pytest.mark.thorough
def test_two_ranks_a_host(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_CPU", "1")
    nodes = ["--workers", "4", "--ranks-per-host", "2", "--ways", "byteps-by-host,by-host"]
    code = train_bench.main([*words(run_dir), *nodes, "--", *SMALL])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "byteps-by-host over by-host: " in said.out


@pytest.mark.thorough
@pytest.mark.requires("root")
@pytest.mark.parametrize("way", ["byteps", "all-reduce"])
def test_hosts_of_two_nics(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    """BytePS and gloo send over both."""
    sent: list[list[int]] = []
    down = Emulation.down

    def count_and_down(self: Emulation) -> None:
        sent.extend(self.sent_bytes(index) for index in range(2))
        down(self)

    monkeypatch.setattr(Emulation, "down", count_and_down)
    monkeypatch.setenv("MEGATRON_CPU", "1")
    nics = ["--emulate", "3@200mbit", "--nics-per-host", "2", "--ways", way]
    # Several megabytes, and several buckets: gloo sends each over the next NIC.
    model = ["--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "2"]
    model += ["--overlap-grad-reduce", "--ddp-bucket-size", "400000"]
    code = train_bench.main([*words(run_dir), *nics, "--", *model])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "on 2 switches, one per NIC, 2 NICs of 200" in said.out
    for one, two in sent:
        assert 0.5 < one / two < 2, f"sent by each NIC of the workers' hosts: {sent}"


@pytest.mark.thorough
def test_a_rank_that_fails_is_shown(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_CPU", "1")
    bad = ["--workers", "1", "--", *SMALL, "--num-attention-heads", "3"]
    assert train_bench.main([*words(run_dir), *bad]) == 1
    assert "args.hidden_size % args.num_attention_heads" in capsys.readouterr().err
