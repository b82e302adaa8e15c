"""The timeline has every partition once, with every stage once and in order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cluster import (
    END_S,
    REPOSITORY,
    Cluster,
    stop,
    wait_all,
    wait_for_file,
)
from tests.multiproc.programs.lifecycle import ROUNDS

WORKER_STAGES = ["queue", "push", "server", "pull queue", "pull"]
SERVER_STAGES = ["receive queue", "add", "other workers", "answer"]
PARTITIONS = {("large", 0), ("large", 1), ("large", 2), ("small", 0)}
WORKERS = 2
# Allowed difference, in microseconds, of the clocks that two processes of a host read at their
# start.
CLOCKS_US = 2000.0

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A partition in a timeline."""

    args: dict[str, Any]
    """Properties of the partition."""
    begin: float
    """Microseconds since the epoch."""
    end: float
    """Microseconds since the epoch."""
    stages: list[str]
    """Stages in order."""

    @property
    def identity(self) -> tuple[str, int, int, int]:
        a = self.args
        return a["tensor"], a["partition"], a["round"], a["worker"]


class Timeline:
    """A file of BYTEPS_TRACE_DIR, checked for form."""

    def __init__(self, path: Path) -> None:
        text = json.loads(path.read_text(encoding="utf-8"))
        self.events: list[Event] = text["traceEvents"]
        self.dropped: int = text["otherData"]["dropped_partitions"]
        assert len({event["pid"] for event in self.events}) == 1
        self.slices = [event for event in self.events if event["ph"] == "X"]
        by_row: dict[str, list[Event]] = {}
        for event in self.events:
            if event["ph"] in "be":
                by_row.setdefault(event["id2"]["local"], []).append(event)
        self.rows = [self._row(events) for events in by_row.values()]

    @staticmethod
    def _row(events: list[Event]) -> Row:
        """Parse a row; check that begins and ends nest, and that stages leave no gap."""
        first, *inner, last = events
        assert (first["ph"], last["ph"]) == ("b", "e")
        assert first["name"] == last["name"] == first["args"]["tensor"]
        at = first["ts"]
        stages = []
        for begin, end in zip(inner[::2], inner[1::2], strict=True):
            assert (begin["ph"], end["ph"]) == ("b", "e")
            assert begin["name"] == end["name"]
            assert begin["ts"] == at
            assert end["ts"] >= at, f"{begin['name']} ends before it begins"
            at = end["ts"]
            stages.append(begin["name"])
        assert last["ts"] == at
        return Row(args=first["args"], begin=first["ts"], end=at, stages=stages)

    def arrows(self, phase: str) -> list[str]:
        """Return the numbers of arrows; check that each is in a slice of its thread."""
        ids = []
        for event in self.events:
            if event["ph"] == phase:
                assert any(
                    s["tid"] == event["tid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                    for s in self.slices
                )
                ids.append(event["id"])
        return sorted(ids)


def run(cluster: Cluster, program: str, **args: Any) -> None:
    """Run a whole job, whose workers do not wait."""
    cluster.go("end")
    cluster.run(program, **args)


def settings(run_dir: Path, **more: str) -> dict[str, str]:
    return {
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_DIR": str(run_dir / "timelines" / "new"),
        "BYTEPS_PARTITION_BYTES": "4096",
        **more,
    }


def timelines(run_dir: Path, role: str) -> list[Timeline]:
    folder = run_dir / "timelines" / "new"
    assert not list(folder.glob("*.part"))
    return [Timeline(path) for path in sorted(folder.glob(f"byteps-{role}-*.json"))]


@pytest.mark.parametrize("deterministic", ["0", "1"])
def test_every_partition_and_stage_once(
    make_cluster: Callable[..., Cluster], run_dir: Path, deterministic: str
) -> None:
    env = settings(run_dir, BYTEPS_DETERMINISTIC=deterministic)
    begin = time.time() * 1e6
    run(make_cluster(workers=WORKERS, servers=2, env=env), "lifecycle:known")
    end = time.time() * 1e6
    workers, servers = timelines(run_dir, "worker"), timelines(run_dir, "server")
    assert (len(workers), len(servers)) == (WORKERS, 2)

    wanted = {(*partition, round_) for partition in PARTITIONS for round_ in range(ROUNDS)}
    served = Counter(row.identity for server in servers for row in server.rows)
    assert served == Counter((*w, rank) for w in wanted for rank in range(WORKERS))
    for rank, worker in enumerate(workers):
        assert Counter(row.identity for row in worker.rows) == Counter((*w, rank) for w in wanted)
        assert all(row.stages == WORKER_STAGES for row in worker.rows)
    at_server = {row.identity: row for server in servers for row in server.rows}
    assert all(row.stages == SERVER_STAGES for row in at_server.values())
    for worker in workers:
        for row in worker.rows:
            there = at_server[row.identity]
            assert begin <= row.begin <= row.end <= end
            # A server's row ends when it has sent the sum to all, which may be later.
            assert row.begin - CLOCKS_US <= there.begin <= row.end + CLOCKS_US
            assert row.args["bytes"] == there.args["bytes"]
            assert "failed" not in row.args

    begun = sorted(number for worker in workers for number in worker.arrows("s"))
    assert len(set(begun)) == len(begun) == WORKERS * len(wanted)
    assert sorted(number for server in servers for number in server.arrows("t")) == begun
    assert sorted(number for worker in workers for number in worker.arrows("f")) == begun


UPSTREAMS = {"BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": "1"}


@pytest.mark.parametrize(
    "steps",
    [{"BYTEPS_TRACE_STEPS": "1-1"}, pytest.param(UPSTREAMS, marks=pytest.mark.thorough)],
    ids=["one name", "upstream's names"],
)
def test_steps_and_limit(
    make_cluster: Callable[..., Cluster], run_dir: Path, steps: dict[str, str]
) -> None:
    """The timeline has only the requested rounds, and no more partitions than fit."""
    more = {**steps, "BYTEPS_TRACE_LIMIT": "3"}
    run(make_cluster(workers=WORKERS, env=settings(run_dir, **more)), "lifecycle:known")
    for worker in timelines(run_dir, "worker"):
        assert len(worker.rows) == len(worker.slices) == 3
        assert {row.args["round"] for row in worker.rows} == {1}
        assert worker.dropped == 1
    (server,) = timelines(run_dir, "server")
    assert (len(server.rows), server.dropped) == (3, WORKERS * len(PARTITIONS) - 3)


def test_a_timeline_is_written_after_the_last_round(
    make_cluster: Callable[..., Cluster], run_dir: Path
) -> None:
    """Processes that are killed later, like actors of Ray, lose nothing of the timeline."""
    env = settings(run_dir, BYTEPS_TRACE_STEPS="0-1")
    cluster = make_cluster(workers=WORKERS, env=env)
    cluster.start("lifecycle:known")
    folder = run_dir / "timelines" / "new"
    for name in ("worker-0", "worker-1", "server-0"):
        wait_for_file(folder / f"byteps-{name}.json", END_S, cluster.everyone())
    for process in cluster.workers.values():
        process.kill()
    wanted = Counter((*partition, round_) for partition in PARTITIONS for round_ in (0, 1))
    for rank, worker in enumerate(timelines(run_dir, "worker")):
        assert Counter(row.identity[:3] for row in worker.rows) == wanted, rank
        assert all(row.stages == WORKER_STAGES for row in worker.rows)
    (server,) = timelines(run_dir, "server")
    assert len(server.rows) == WORKERS * len(PARTITIONS) * 2


def test_names_are_escaped(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    names = ['quoted "name"', "back\\slash", "two\nlines\x01", "Gewicht größer 0 \U0001f600"]
    run(make_cluster(workers=1, env=settings(run_dir)), "lifecycle:odd_names", names=names)
    for role in ("worker", "server"):
        (timeline,) = timelines(run_dir, role)
        assert sorted(row.args["tensor"] for row in timeline.rows) == sorted(names)


def test_failures_are_in_the_timeline(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    """If a worker is lost, the others' timelines have complete stages and those that waited
    for it."""
    # The worker is silent but connected, so the server has all pushes before a node gives up.
    cluster = make_cluster(
        workers=WORKERS, servers=1, env=settings(run_dir, BYTEPS_PEER_TIMEOUT_S="3")
    )
    cluster.start("lifecycle:waiting")
    cluster.wait_mark("pushed", [0])
    lost = cluster.workers["worker 1"]
    stop(lost)
    wait_all([process for process in cluster.everyone() if process is not lost], END_S)
    (worker,) = timelines(run_dir, "worker")
    (server,) = timelines(run_dir, "server")
    large = {("large", partition, 0, 0) for partition in range(3)}
    small = {("small", 0, 0, rank) for rank in range(WORKERS)}
    for timeline, wanted, last in (
        (worker, large | {("small", 0, 0, 0)}, {"push", "server"}),
        (server, large | small, {"other workers"}),
    ):
        assert Counter(row.identity for row in timeline.rows) == Counter(wanted)
        unfinished = [row for row in timeline.rows if row.args.get("failed")]
        assert {row.identity for row in unfinished} == large
        assert {row.stages[-1] for row in unfinished} <= last


def test_a_file_for_each_life(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    """Each job that a process joins has another file, so timelines from before a suspend
    are kept."""
    run(make_cluster(workers=1, env=settings(run_dir)), "lifecycle:two_lives")
    for role in ("worker", "server"):
        names = [{row.args["tensor"] for row in t.rows} for t in timelines(run_dir, role)]
        assert names == [{"after"}, {"before"}]  # byteps-worker-0.2.json, byteps-worker-0.json


def test_nothing_is_written_unasked(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    env = {**settings(run_dir), "BYTEPS_TRACE_ON": "0"}
    run(make_cluster(workers=1, env=env), "lifecycle:known")
    assert not (run_dir / "timelines").exists()
    assert not list(run_dir.rglob("byteps-*.json"))


def test_merging(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    """scripts/merge_traces.py loses nothing and keeps processes apart."""
    run(make_cluster(workers=WORKERS, env=settings(run_dir)), "lifecycle:known")
    files = sorted((run_dir / "timelines" / "new").iterdir())
    script = str(REPOSITORY / "scripts" / "merge_traces.py")
    target = run_dir / "all.json"
    subprocess.run([sys.executable, script, *map(str, files), "-o", str(target)], check=True)
    merged = json.loads(target.read_text())["traceEvents"]
    single = [json.loads(file.read_text())["traceEvents"] for file in files]
    assert len(merged) == sum(map(len, single))
    assert len({event["pid"] for event in merged}) == len(files) == WORKERS + 1
    titles = {e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert titles == {"worker 0", "worker 1", "server 0"}
    bad = subprocess.run(
        [sys.executable, script, script, "-o", str(target)], capture_output=True, text=True
    )
    assert bad.returncode == 1
    assert "merge_traces.py is no timeline" in bad.stderr
