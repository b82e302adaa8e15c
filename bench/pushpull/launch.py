"""Launches a plan: starts processes, computes figures, writes the record."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from byteps import cost_model

from bench.kit.emulation import Host, hosts_of
from bench.kit.plan import (
    ONE_NIC,
    Case,
    Plan,
    Topology,
    is_byteps,
    plan_from_json,
    through_servers,
)
from bench.kit.processes import (
    START_S,
    LaunchError,
    Placement,
    Processes,
    plain_environment,
    start_nodes,
    start_workers,
)
from bench.pushpull.backends import SocketsError, build, make
from bench.pushpull.rank import Measured, choose_device, measure_cases
from scripts.progress import Progress

SCHEMA = 1
MAX_BUSY = 0.8
"""Largest busy fraction of this machine's cores. Above it, an emulated link is not the
bottleneck."""


@dataclass(kw_only=True)
class Launch:
    """Result of a launch."""

    backend: str
    index: int
    measured: list[Measured]
    """Results, one per case, in the order of the plan."""
    kept: bool
    """Whether the launch counts, because the machine was not too busy."""

    def as_json(self) -> dict[str, Any]:
        entries = [case.as_json() for case in self.measured]
        return {**self.__dict__, "measured": entries}


def measured_from_json(entry: dict[str, Any]) -> Measured:
    return Measured(**{**entry, "case": Case(**entry["case"])})


def launch(plan: Plan, backend: str, index: int, hosts: Sequence[Host]) -> Launch:
    """Start all processes, wait for their end, and read rank 0's record.

    Raises:
        LaunchError: a process failed or timed out.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(plan.topology, hosts, shares_gpus=plan.shares_gpus())
        pids: list[int] = []
        environment = plain_environment()
        if is_byteps(backend):
            if backend == ONE_NIC:
                environment["BYTEPS_NICS"] = placement.scheduler.interfaces[0]
            pids, job = start_nodes(placement, processes, environment)
            environment = _told_of_links(plan.topology.bits_of(backend)) | environment | job
        spec: dict[str, Any] = {}
        if backend == "sockets":
            pids, spec["sockets"] = start_sockets(plan, placement, processes, environment)
        spec |= {
            "plan": plan.as_json(),
            "backend": backend,
            "node_pids": pids,
            "rendezvous": f"{folder}/ranks",
        }
        result = Path(folder) / "result.json"
        start_workers("bench.pushpull.rank", spec, result, placement, processes, environment)
        processes.wait_all(plan.timeout_s)
        measured = [measured_from_json(entry) for entry in json.loads(result.read_text())]
    busy = max(case.busy for case in measured)
    return Launch(backend=backend, index=index, measured=measured, kept=busy <= plan.max_busy)


def start_sockets(
    plan: Plan, placement: Placement, processes: Processes, environment: dict[str, str]
) -> tuple[list[int], dict[str, Any]]:
    """Start servers of plain sockets. Return their pids, and the arguments with which workers reach
    them."""
    try:
        program = build()
    except SocketsError as error:
        raise LaunchError(str(error)) from error
    connections = str(len(placement.workers) * plan.flows)
    pids, files = [], []
    for index, host in enumerate(placement.servers):
        files.append(processes.folder / f"sockets-{index}.port")
        command = [str(program.server), host.address, str(files[-1]), connections]
        pids.append(processes.start(f"sockets-{index}", command, host, environment))
    servers = [processes.wait_file(file, START_S).strip() for file in files]
    return pids, {"library": str(program.library), "servers": servers, "flows": plan.flows}


def _told_of_links(bits: int) -> dict[str, str]:
    """Return a setting with the rate of emulated links, because virtual NICs report invented
    rates."""
    return {"BYTEPS_LINK_GBPS": f"{bits / 1e9:g}"} if bits else {}


def busiest_link(backend: str, topology: Topology) -> float:
    """Return the bytes over the busiest link, per direction and per byte that a worker sums.

    With n workers on h hosts, k servers, M bytes and links of B bytes per second per direction:

    - a ring sends 2 (n - 1) / n M over each host's link, each way; in two levels 2 (h - 1) / h M;
    - through servers on hosts of their own, a host's link carries M each way, and a server's h/k M;
    - a server next to workers sends its share, M/k, to the h - 1 other hosts, while the workers
      send the values that are not summed next to them. The host with the most servers, s, carries
      (k + s (h - 2)) M/k. For k = h this is as much as in a ring.

    Workers that share a host are assumed to sum inside it first.
    """
    n, hosts, k = topology.workers, topology.worker_hosts, topology.servers
    if backend == "gloo":
        return 2 * (n - 1) / n
    if not through_servers(backend):  # NCCL reaches this with trees, or with rings inside hosts
        return 2 * (hosts - 1) / hosts
    if topology.colocate:
        most = -(-k // hosts)
        return max(0.0, (k + most * (hosts - 2)) / k)
    servers = cost_model.Servers(
        hosts=hosts,
        extra=k,
        local=topology.local_servers,
        per_machine=topology.servers_per_machine,
    )
    load = cost_model.push_pull(servers, 1.0, 1.0)
    return max(load.host, load.server)


def least_seconds(backend: str, topology: Topology, size: int) -> float | None:
    """Return the time that the links need for ``size`` bytes without headers. None if it is
    unknown."""
    share, bits = busiest_link(backend, topology), topology.bits_of(backend)
    if not bits or not share:
        return None
    return share * size * 8 / bits


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that is not exceeded by at least ``percent`` % of all samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(kw_only=True)
class Run:
    """A plan, and all launches made for it."""

    plan: Plan
    name: str = ""
    """Name of the experiment in a set."""
    launches: list[Launch] = field(default_factory=list)

    @property
    def quiet(self) -> list[Launch]:
        """Return the launches of rounds in which the machine was never too busy."""
        spoilt = {launch.index for launch in self.launches if not launch.kept}
        return [launch for launch in self.launches if launch.index not in spoilt]

    @property
    def counted(self) -> list[Launch]:
        """Return the quiet launches. If none was quiet, return all."""
        return self.quiet or self.launches

    def of(self, backend: str, case: Case) -> list[Measured]:
        """Return the results of a case, one per counted launch, in order."""
        position = self.plan.cases.index(case)
        ordered = sorted(self.counted, key=lambda launch: launch.index)
        return [launch.measured[position] for launch in ordered if launch.backend == backend]

    @property
    def wrong(self) -> int:
        """Return the number of wrong elements in all launches, counted or not."""
        return sum(case.wrong for launch in self.launches for case in launch.measured)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a case with a backend, over all counted launches."""

    backend: str
    case: Case
    workers: int
    servers: int | None
    p50_s: float
    """Median over launches of each launch's median."""
    p99_s: float
    """99th percentile of all iterations of all launches."""
    algbw: float
    """Bytes that a worker sums, per second."""
    busbw: float | None
    """Bytes per second of each link in each direction. For an all-reduce, computed as in
    nccl-tests."""
    of_limit: float | None
    """Least time that the links allow, divided by p50."""
    of_sockets: float | None
    """Time of plain sockets in the same run, divided by p50; None if they were not measured."""
    cpu_s_per_gb: float | None
    """CPU seconds of the whole job per 1e9 bytes that a worker sums."""
    wrong: int

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "case": self.case.__dict__}


def cpu_s_per_gb(outcomes: Sequence[Measured], backend: str) -> float | None:
    """Return the median over launches; None if CPU time of a part of the job is unknown."""
    if through_servers(backend) and any(outcome.node_cpu_s is None for outcome in outcomes):
        return None
    return statistics.median(
        (outcome.worker_cpu_s + (outcome.node_cpu_s or 0.0))
        * 1e9
        / (outcome.case.size * outcome.case.iters)
        for outcome in outcomes
    )


def p50_s(outcomes: Sequence[Measured]) -> float:
    """Return the median of the launches' medians."""
    return statistics.median(percentile(outcome.samples_s, 50) for outcome in outcomes)


def row(run: Run, backend: str, case: Case) -> Row:
    outcomes = run.of(backend, case)
    topology, middle = run.plan.topology, p50_s(outcomes)
    sent = case.sent_bytes(backend)
    limit = least_seconds(backend, topology, sent)
    to_servers = through_servers(backend)
    sockets = run.of("sockets", case) if "sockets" in run.plan.backends else []
    return Row(
        backend=backend,
        case=case,
        workers=topology.workers,
        servers=topology.servers if to_servers else None,
        p50_s=middle,
        p99_s=percentile([sample for outcome in outcomes for sample in outcome.samples_s], 99),
        algbw=case.size / middle,
        busbw=None if to_servers else busiest_link(backend, topology) * sent / middle,
        of_limit=None if limit is None else limit / middle,
        of_sockets=p50_s(sockets) / middle if sockets else None,
        cpu_s_per_gb=cpu_s_per_gb(outcomes, backend),
        wrong=sum(outcome.wrong for outcome in outcomes),
    )


def rows(run: Run) -> list[Row]:
    """Return a row for every case and backend."""
    return [row(run, backend, case) for case in run.plan.cases for backend in run.plan.backends]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Speed of one backend relative to another one."""

    value: float
    """Ratio of the medians of medians: the other backend's time divided by this one's."""
    low: float
    high: float
    """Smallest and largest ratio of two launches in the same round."""
    launches: int


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> Ratio:
    """Return the time of ``theirs`` divided by the time of ``ours``. Above 1, ours is faster. Both
    are in the order of rounds."""
    each = [
        percentile(b.samples_s, 50) / percentile(a.samples_s, 50)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return Ratio(
        value=p50_s(theirs) / p50_s(ours), low=min(each), high=max(each), launches=len(each)
    )


def as_json(runs: Sequence[Run], meta: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "meta": meta,
        "runs": [
            {
                "name": run.name,
                "plan": run.plan.as_json(),
                "launches": [launch.as_json() for launch in run.launches],
                "rows": [row.as_json() for row in rows(run)],
            }
            for run in runs
        ],
    }


def write(runs: Sequence[Run], meta: dict[str, str], path: Path) -> None:
    """Write metadata, raw samples and figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(runs, meta), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[list[Run], dict[str, str]]:
    """Read a file that `write` has written. Raises ValueError for another schema."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')!r}; this reads {SCHEMA}")
    runs = []
    for entry in content["runs"]:
        launches = [
            Launch(**{**launch, "measured": [measured_from_json(m) for m in launch["measured"]]})
            for launch in entry["launches"]
        ]
        plan = plan_from_json(entry["plan"])
        runs.append(Run(plan=plan, name=entry["name"], launches=launches))
    return runs, content["meta"]


def run_plan(plan: Plan, name: str = "", deadline: float | None = None) -> Run:
    """Launch all backends ``plan.launches`` times, interleaved.

    A round in which the machine was too busy is repeated, at most ``plan.retries`` times in total.
    No round begins after ``deadline`` (monotonic clock).

    Raises:
        LaunchError: a process failed.
        EmulationError: the emulated hosts could not be created.
    """
    run = Run(plan=plan, name=name)
    quiet = 0
    total = plan.launches * len(plan.backends)
    with hosts_of(plan) as hosts, Progress(name or "bench", total=total, unit="launches") as shown:
        for index in range(plan.launches + plan.retries):
            done: list[Launch] = []
            for backend in plan.backends:
                shown.update(f"launch {index} {backend}", done=len(run.launches) + len(done))
                done.append(launch(plan, backend, index, hosts))
            run.launches += done
            for finished in done:
                medians = (1e3 * percentile(case.samples_s, 50) for case in finished.measured)
                busiest = max(case.busy for case in finished.measured)
                note = "" if finished.kept else ": too busy, not counted"
                text = (
                    f"{name} launch {index} {finished.backend}: p50 ms "
                    f"{' '.join(f'{value:.2f}' for value in medians)}; "
                    f"machine {busiest:.0%} busy{note}"
                )
                shown.say(text.strip())
            quiet += all(launch.kept for launch in done)
            if quiet == plan.launches:
                break
            if deadline is not None and time.monotonic() > deadline:
                shown.say(f"{name}: no more launches, since the time is used up")
                break
    return run


def progress(text: str) -> None:
    """Print to stderr, because stdout is for results."""
    print(text.strip(), file=sys.stderr, flush=True)


def run_in_cluster(plan: Plan) -> Run | None:
    """Measure as a rank of an existing job. Every rank calls this. Return the run on rank 0, None
    elsewhere.

    A BytePS cluster ends when its workers leave it. So each backend connects only once, and a
    "launch" is a round of measurements.
    """
    size = os.environ["WORLD_SIZE"]
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == size
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout_s))
    choose_device(plan)
    made = {name: make(name, plan.device) for name in plan.backends}
    run = Run(plan=plan)
    for index in range(plan.launches):
        for name, backend in made.items():
            first_round = index * max(case.warmup + case.iters for case in plan.cases)
            measured = measure_cases(plan, backend, one_clock=one_host, first_round=first_round)
            if measured:
                run.launches.append(Launch(backend=name, index=index, measured=measured, kept=True))
                progress(f"launch {index} {name}: done")
    for backend in made.values():
        backend.close()
    rank = dist.get_rank()
    dist.destroy_process_group()
    return run if rank == 0 else None
