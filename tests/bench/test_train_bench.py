"""bench/train_bench.py, from made-up launches to a short training; what bench/timeline reads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kit.emulation import LOOPBACK, Emulation
from bench.kit.plan import Plan, Topology
from bench.kit.processes import LaunchError, Placement, rank_variables
from bench.timeline import picture as timeline
from bench.timeline import report as timeline_report
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


# bench/timeline/report.py: what it reads out of a timeline, and what it says.


REPORT = Path(timeline_report.__file__)
MB = 1_000_000


def partition(
    number: int, begin: float, *stages: tuple[str, float], pid: int = 1, nbytes: int = MB
) -> list[dict[str, Any]]:
    """Events of a partition that passed these stages one after the other, of so many ms each."""

    def event(ph: str, name: str, at: float, **more: Any) -> dict[str, Any]:
        row = {"pid": pid, "tid": 0, "ts": at * 1e3, "id2": {"local": str(number)}}
        return {"ph": ph, "name": name, "cat": "partition", **row, **more}

    whole = {"tensor": "grads", "round": 0, "bytes": nbytes}
    events = [event("b", "grads", begin, args=whole)]
    for name, ms in stages:
        events += [event("b", name, begin), event("e", name, begin + ms)]
        begin += ms
    return [*events, event("e", "grads", begin)]


def trace_of(*events: list[dict[str, Any]]) -> dict[str, Any]:
    names = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((1, "worker 0"), (1000001, "server 0"))
    ]
    return {"traceEvents": names + [event for part in events for event in part]}


WORKER = trace_of(
    # Nothing goes up from 0 to 3, from 7 to 8, and from 12 to 20.
    partition(0, 0, ("compute", 2), ("copy from GPU", 1), ("push", 4), ("server", 8)),
    partition(1, 0, ("compute", 2), ("queue", 6), ("push", 4), ("server", 8)),
)


def test_stages_that_are_empty_are_seen() -> None:
    ways = timeline_report.ways_of(WORKER)
    assert [(way.begin, way.end, way.nbytes) for way in ways] == [(0, 15, MB), (0, 20, MB)]
    found = timeline_report.occupancies(ways)
    assert list(found) == ["compute", "copy from GPU", "push", "server", "queue"]
    assert (found["push"].partition_ms, found["push"].empty_ms) == (8, 20 - 8)
    assert (found["server"].partition_ms, found["server"].empty_ms) == (16, 7)
    assert (found["compute"].partition_ms, found["compute"].empty_ms) == (4, 18)


def test_when_the_first_and_the_last_partition_leave_a_stage() -> None:
    assert timeline_report.departures(timeline_report.ways_of(WORKER)) == {
        "compute": [(2, 2)],
        "copy from GPU": [(3, 3)],
        "queue": [(8, 8)],
        "push": [(7, 12)],
        "server": [(15, 20)],
    }
    table = timeline_report.stage_table(timeline_report.ways_of(WORKER), 20)
    assert table[3] == ("push", "4.000", "4.000", "0.4", "60%", "7.000", "12.000")


def test_the_reason_is_what_is_next_to_the_push() -> None:
    assert timeline_report.standstills(timeline_report.ways_of(WORKER)) == {
        "the GPU was computing what is sent": 2,
        "partitions were being copied from the GPU": 1,
        "partitions waited for room in a server's window, or for a push loop": 1,
        "there was nothing to send": 8,
    }


def test_a_partition_that_failed_ends_where_it_was() -> None:
    trace = trace_of(partition(0, 5, ("queue", 1), ("push", 2)))
    trace["traceEvents"][2]["args"]["failed"] = True
    (way,) = timeline_report.ways_of(trace)
    assert (way.failed, way.end) == (True, 8)
    assert "; 1 failed" in timeline_report.report("worker 0", [way])


def test_the_report_of_workers_and_servers(tmp_path: Path) -> None:
    both = trace_of(
        WORKER["traceEvents"][2:],
        partition(0, 4, ("receive queue", 1), ("add", 2), ("answer", 1), pid=1000001),
    )
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps(both))
    command = [sys.executable, str(REPORT), str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    worker, server = said[said.index("worker 0") :], said[: said.index("worker 0")]
    assert "worker 0: 2 partitions of 1 tensors, 2.0 MB in 20.0 ms" in worker
    assert "up: from 3.0 to 12.0 ms, 1.778 Gbit/s" in worker
    assert "down: the first sum at 15.0 ms, the last at 20.0 ms, 3.200 Gbit/s" in worker
    assert worker.index("8.0 ms: there was nothing to send") < worker.index("2.0 ms: the GPU was")
    assert "receive queue" in server and "up:" not in server
    none = subprocess.run([*command, "--tensor", "x"], capture_output=True, text=True)
    assert (none.returncode, none.stderr) == (1, "error: no partition was recorded\n")


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "b", "cat": "partition"}]}'])
def test_other_files_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    ended = subprocess.run(
        [sys.executable, str(REPORT), str(tmp_path / "x.json")], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "x.json" in ended.stderr and "no timeline of BytePS" in ended.stderr


# bench/timeline/picture.py: what it reads out of timelines and profiles, and the picture.


PICTURE = Path(timeline.__file__)

TIMELINE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "worker 0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "push loop 0"}},
        {"ph": "b", "name": "server", "pid": 1, "tid": 0, "ts": 5000, "id2": {"local": "3"}},
        {"ph": "X", "name": "push", "pid": 1, "tid": 1, "ts": 2000, "dur": 1500},
        {"ph": "e", "name": "server", "pid": 1, "tid": 0, "ts": 9000, "id2": {"local": "3"}},
    ]
}
PROFILE = {
    "baseTimeNanoseconds": 1_000_000,
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "ts": 500, "dur": 250, "args": {"device": 0, "stream": 7}},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1, "args": {}},
    ],
}


def test_slices_and_waiting_are_read() -> None:
    push, server = timeline.read_timeline(TIMELINE)
    assert (push.track, push.kind) == ("worker 0: push loop 0", "push")
    assert (push.begin, push.end) == (2.0, 3.5)
    assert (server.kind, server.begin, server.end) == ("server", 5.0, 9.0)
    assert timeline.within([push, server], 2.0, None) == [server]
    assert timeline.within([push, server], None, 1.0) == [push]


def test_kernels_are_read_by_the_same_clock() -> None:
    (kernel,) = timeline.read_profile(PROFILE)
    assert kernel.track == "GPU 0, stream 7: kernels"
    assert (kernel.begin, kernel.end) == (1.5, 1.75)


def test_without_kernels_the_outermost_operators_are_read() -> None:
    def operator(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid}

    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [operator("aten::mm", 12, 3), operator(node, 10, 10), operator("aten::add", 20, 1)]
    events.append(operator("aten::mul", 12, 2, tid=2))
    read = timeline.read_profile({"traceEvents": events})
    assert [(s.track, round(s.begin * 1e3)) for s in read] == [
        ("CPU: backward", 10),
        ("CPU: other computation", 12),
        ("CPU: other computation", 20),
    ]


@pytest.mark.parametrize("trace", [{}, {"traceEvents": [{"ph": "X"}]}])
def test_other_traces_are_errors(trace: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no timeline"):
        timeline.read_timeline(trace)


def test_picture(tmp_path: Path) -> None:
    worker, profile, picture = tmp_path / "w.json", tmp_path / "p.json", tmp_path / "x.png"
    worker.write_text(json.dumps(TIMELINE))
    profile.write_text(json.dumps(PROFILE))
    command = [sys.executable, str(PICTURE), str(worker), "--profile", str(profile)]
    subprocess.run([*command, "-o", str(picture)], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    late = subprocess.run(
        [*command, "-o", str(picture), "--begin-ms", "100"], capture_output=True, text=True
    )
    assert late.returncode == 1
    assert "nothing happened" in late.stderr
