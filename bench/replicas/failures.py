#!/usr/bin/env python3
"""Measures the cost of replicas that die from time to time and come back.

Trains a small GPT with replicas on this machine, with a minimum time per step, and kills a rank of
one replica after the other. The replica is restarted at once; with --warm its next process is
already waiting. Replicas are spread over this machine's GPUs. For each death it prints the delay of
the others' steps, the time until the replica has joined, and the time that the others waited for
it. It also prints the goodput: trained samples, relative to the same time without deaths.

  bench/replicas/failures.py --pace 1 --kill-every 60 --kills 5

With --kill servers, servers are killed instead of replicas, while a spare server waits. A new spare
follows each killed server.

  bench/replicas/failures.py --kill servers --servers 2 --pace 1 --kill-every 30 --kills 6

With --slow nothing is killed. Instead the last replica's passes take this many times as long, and
the program prints by how much the others' steps become longer.

  bench/replicas/failures.py --slow 2 --every 30 --quorum 3@20 --steps 120

  bench/replicas/failures.py --from-json RESULT

Exit status: 0 success; 1 a process failed without being killed, replicas end with different
parameters, or a value is above its limit; 2 bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kit import gpt
from bench.kit.emulation import LOOPBACK
from bench.kit.plan import Topology
from bench.kit.processes import (
    LaunchError,
    Placement,
    Processes,
    plain_environment,
    start_nodes,
    start_server,
)
from bench.kit.record import metadata
from bench.replicas import run as plain
from scripts import prepare_data
from scripts import train as train_script
from scripts.children import Spawned, end_all, free_ports, last_lines, python_of_ranks
from scripts.progress import aligned
from scripts.trainkit.job import ENTRY, Record, read_record

REPLACED = "has taken the place of the server that was lost"
WAITS = "waiting for the place of a server that is lost"


class Servers:
    """Servers and spare servers of a job on this machine.

    Args:
        count: number of active servers, which the caller has started.
        environment: variables to join the job.
    """

    def __init__(self, processes: Processes, count: int, environment: Mapping[str, str]) -> None:
        self._processes, self._environment = processes, environment
        self._titles = [f"server-{index}" for index in range(count)]
        self._started = count

    def start(self) -> None:
        """Start a spare server. It waits until a server is lost."""
        start_server(self._started, LOOPBACK, self._processes, self._environment)
        self._titles.append(f"server-{self._started}")
        self._started += 1

    def have_spare(self) -> bool:
        texts = map(self._processes.text_of, self._titles)
        return any(WAITS in text and "this is server" not in text for text in texts)

    def kill(self, rank: int) -> None:
        """Kill the server of this rank by SIGKILL."""
        line = f"this is server {rank},"
        (title,) = (title for title in self._titles if line in self._processes.text_of(title))
        self._titles.remove(title)
        self._processes.kill(title)

    def replaced(self) -> int:
        """Return how many servers were replaced so far."""
        return self._processes.text_of("scheduler").count(REPLACED)


class ServerDeaths:
    """Kills one server after the other, at intervals, while a spare server waits."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.all: list[dict[str, Any]] = []
        self._due: float | None = None

    def __call__(self, job: Any, now: float) -> None:
        options, servers = self.options, job.servers
        if self.all and "back_s" not in self.all[-1] and servers.replaced() == len(self.all):
            self.all[-1]["back_s"] = now - self.all[-1]["at"]
        if self._due is None and job.lives and len(job.lives[0].ends) >= options.spare:
            for _ in range(options.spare_servers):
                servers.start()
            self._due = now
        done = len(self.all) == options.kills or (self.all and "back_s" not in self.all[-1])
        if self._due is None or now < self._due or done or not servers.have_spare():
            return
        rank = len(self.all) % options.servers
        servers.kill(rank)
        self.all.append({"killed": f"server {rank}", "at": now})
        servers.start()
        self._due = now + options.kill_every


SCHEMA = 2
HEAD = ("killed", "after step", "step took longer, s", "back after, s", "others waited, s")
SERVERS_HEAD = (*HEAD[:3], "replaced after, s")
_POLL_S = 0.02
_JOINED = re.compile(r"replica \d+ has joined after iteration (\d+); the others waited ([\d.]+) s")
_LEFT_OUT = re.compile(r"left out iterations (\d+) to (\d+)")
_BACK = re.compile(r"has joined after iteration (\d+): it waited")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = train_script.positive
    add = parser.add_argument
    add("--replicas", type=positive, default=4, help="default: 4")
    add("--ranks", type=positive, default=1, help="of each replica (default: 1)")
    add(
        "--every", type=positive, default=1, help="steps from one exchange to the next (default: 1)"
    )
    add("--servers", type=positive, default=1, help="default: 1")
    add("--batch", type=positive, default=1, help="sequences per replica and step (default: 1)")
    gpt.add_model(add)
    add("--seed", type=positive, default=1234, help="default: 1234")
    add("--model-ranks", type=positive, default=1, help="that share one copy of the model")
    add("--pace", type=float, default=1.0, help="seconds that the passes of a step take at least")
    add("--kill-every", type=float, default=60.0, metavar="S", help="seconds (default: 60)")
    add("--kill", choices=("replicas", "servers"), default="replicas", help="default: replicas")
    add("--spare-servers", type=positive, default=1, help="that wait for places (default: 1)")
    add("--kills", type=int, default=5, help="deaths (default: 5)")
    add("--slow", type=float, default=1.0, metavar="FACTOR", help="see above")
    add("--quorum", metavar="REPLICAS@S", help="see --dpu-quorum")
    add("--most-cost", type=float, default=0.05, help="of a slow one (default: 0.05)")
    add("--warm", type=float, default=0.0, metavar="S", help="start it so long before the kill")
    add("--spare", type=positive, default=20, help="steps without deaths at either end")
    add("--most-pause", type=float, metavar="S", help="fail where a step took longer by more")
    add("--least-goodput", type=float, default=0.0, help="fail where it is below this")
    add("--timeout", type=float, default=3600.0, help="seconds that the run may take")
    gpt.add_files(add, "replicas")
    options = parser.parse_args(arguments)
    options.steps_file = False
    options.tree = options.tree.resolve()
    options.delay = 0
    options.lr, options.momentum, options.fragments = 0.7, 0.9, 1
    return options


@dataclass
class Life:
    """Lifetime of a replica's processes, from a start to their end."""

    replica: int
    record_file: Path
    ranks: list[Spawned]
    started: float
    killed: bool = False
    ends: list[float] = field(default_factory=list)
    """End time of each step."""
    record: Record = field(default_factory=Record)
    text: str = ""
    """Output of rank 0."""

    def look(self, now: float) -> None:
        self.record = read_record(self.record_file)
        self.ends += [now] * (len(self.record.steps) - len(self.ends))
        self.text = self.ranks[0].text


class Job:
    """Replicas on this machine, which are killed and restarted."""

    def __init__(self, options: argparse.Namespace, prefix: Path, processes: Processes) -> None:
        self.options, self.folder = options, processes.folder
        topology = Topology(
            workers=options.replicas * options.ranks, servers=1, ranks_per_host=options.ranks
        )
        placement = Placement(topology, [LOOPBACK])
        placement.servers *= options.servers
        placement.scheduler = placement.servers[0]
        self.environment = {**plain_environment(), "PYTHONWARNINGS": "ignore"}
        if not train_script.on_gpu():
            self.environment["MEGATRON_CPU"] = "1"
        self.environment |= {
            "PYTHONPATH": plain.import_path(options.tree),
        }
        if options.kill == "servers":
            self.environment.setdefault("BYTEPS_REPLACE_SERVERS_S", "60")
            if "--dpu-optimizer" in options.megatron:
                self.environment.setdefault("BYTEPS_BACKUP_STATE", "1")
        self.environment |= start_nodes(placement, processes, self.environment)[1]
        self.servers = Servers(processes, options.servers, self.environment)
        if options.steps_file:
            self.allow(0)
            self.environment["STEPS_FILE"] = str(self.folder / "steps")
        self.arguments = plain.megatron_arguments(options, prefix, options.seed)
        self.arguments += plain.outer_arguments(options, (options.every, 0))
        if options.quorum:
            self.arguments += ["--dpu-quorum", options.quorum]
        self.lives: list[Life] = []

    def allow(self, steps: int) -> None:
        """Allow this number of steps. Needs `steps_file`."""
        part = self.folder / "steps.part"
        part.write_text(str(steps))
        part.rename(self.folder / "steps")

    def start(self, replica: int) -> Life:
        options, number = self.options, len(self.lives)
        entry = [str(plain.PACED)] if options.pace or options.steps_file else []
        entry.append(str(options.tree / ENTRY))
        record_file, port = self.folder / f"steps-{number}.jsonl", free_ports()
        is_slow = replica == options.replicas - 1
        pace = options.pace * (options.slow if is_slow else 1)
        ranks = []
        for rank in range(options.ranks):
            variables = {
                "PACE_S": str(pace),
                "RANK": str(rank),
                "WORLD_SIZE": str(options.ranks),
                **plain.gpus_of(replica, rank, options.ranks),
                "MASTER_ADDR": LOOPBACK.address,
                "MASTER_PORT": str(port),
                "BYTEPS_REPLICA": f"{replica}/{options.replicas}",
                # A replica may start before its previous processes have ended. It then waits for
                # their ranks.
                "BYTEPS_START_TIMEOUT_S": "600",
            }
            command = [python_of_ranks(), *entry, *self.arguments]
            command += ["--record-steps", str(record_file)]
            title = f"replica-{replica}-life-{number}-rank-{rank}"
            environment = {**self.environment, **variables}
            ranks.append(Spawned(title, command, environment, self.folder))
        life = Life(replica, record_file, ranks, time.monotonic())
        self.lives.append(life)
        return life

    def kill(self, life: Life) -> None:
        """Kill the last rank of a replica by SIGKILL. The other ranks end by themselves."""
        life.killed = True
        life.ranks[-1].send(signal.SIGKILL)

    def running(self) -> list[Life]:
        """Return the lives of replicas that still run. Raises LaunchError if a process failed
        without being killed."""
        for life in self.lives:
            bad = [rank for rank in life.ranks if rank.status not in (None, 0)]
            if bad and not life.killed:
                raise LaunchError(f"{bad[0].title} failed\n{last_lines(bad[0].log, 30)}")
        return [life for life in self.lives if any(rank.running for rank in life.ranks)]


Step = Callable[[Job, float], None]


def train(options: argparse.Namespace, prefix: Path, watch: Step) -> Job:
    """Train to the end. `watch` is called repeatedly; it kills and starts replicas.

    Raises:
        LaunchError: a process failed without being killed, or the run timed out.
    """
    with (
        tempfile.TemporaryDirectory(prefix="failures-") as folder,
        Processes(Path(folder)) as processes,
    ):
        job = Job(options, prefix, processes)
        try:
            for replica in range(options.replicas):
                job.start(replica)
            deadline = time.monotonic() + options.timeout
            while job.running():
                now = time.monotonic()
                if now > deadline:
                    logs = "\n".join(last_lines(life.ranks[0].log, 8) for life in job.running())
                    raise LaunchError(f"the job still ran after {options.timeout:g} s\n{logs}")
                for life in job.lives:
                    life.look(now)
                watch(job, now)
                time.sleep(_POLL_S)
            processes.wait_all(60)
            for life in job.lives:
                life.look(time.monotonic())
        finally:
            end_all([rank for life in job.lives for rank in life.ranks], 5.0)
    return job


class Deaths:
    """Kills one replica after the other. Each must have joined again before the next is killed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.all: list[dict[str, Any]] = []
        self._due: float | None = None
        self._next: Life | None = None

    def __call__(self, job: Job, now: float) -> None:
        options = self.options
        for death in self.all:
            life: Life = death["life"]
            if "back_s" not in death and _BACK.search(life.text):
                death["back_s"] = now - death["at"]
        started = [life for life in job.lives if life.ends]
        if self._due is None and started and len(started[0].ends) >= options.spare:
            self._due = now
        if self._due is None or len(self.all) == options.kills:
            return
        if self.all and "back_s" not in self.all[-1]:
            return
        number = len(self.all) % options.replicas
        if options.warm and self._next is None and now >= self._due - options.warm:
            self._due = max(self._due, now + options.warm)
            self._next = job.start(number)
        if now < self._due:
            return
        (life,) = (
            life for life in job.running() if life.replica == number and life is not self._next
        )
        job.kill(life)
        life = self._next or job.start(number)
        self.all.append({"killed": f"replica {number}", "at": now, "life": life})
        self._due, self._next = now + options.kill_every, None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with deaths. Raises LaunchError."""
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    deaths = ServerDeaths(options) if options.kill == "servers" else Deaths(options)
    job = train(options, dataset.prefix, deaths)
    if len(deaths.all) < options.kills:
        raise LaunchError(f"only {len(deaths.all)} of {options.kills} were killed: take more steps")
    return {"meta": metadata(sys.argv[1:]), "schema": SCHEMA, **summary(options, job, deaths.all)}


def measure_slow(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with a slow replica. Raises LaunchError."""
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    alone = argparse.Namespace(**{**vars(options), "slow": 1.0})
    jobs = [train(setting, dataset.prefix, lambda job, now: None) for setting in (alone, options)]
    usual, slowed = (_step_s(job, options.every) for job in jobs)
    ranges = [
        (int(match.group(1)), int(match.group(2)))
        for match in _LEFT_OUT.finditer(jobs[1].lives[-1].text)
    ]
    return {
        "meta": metadata(sys.argv[1:]),
        "schema": SCHEMA,
        "step_s": usual,
        "slowed_step_s": slowed,
        "cost": slowed / usual - 1,
        "steps": options.steps,
        "left_out": sum(last - first + 1 for first, last in ranges),
        "checksums": sorted({life.record.checksum for life in jobs[1].lives}),
    }


def _step_s(job: Job, every: int) -> float:
    """Return the mean seconds per step, from the first exchange to the last."""
    ends = step_ends(job)
    first, last = every - 1, len(ends) // every * every - 1
    return (ends[last] - ends[first]) / (last - first)


def summary(
    options: argparse.Namespace, job: Job, deaths: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    ends = step_ends(job)
    usual = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
    rows = []
    for death in deaths:
        after = [end for end in ends if end > death["at"]]
        before = [end for end in ends if end <= death["at"]]
        steps = [*before[-1:], *after[:3]]
        longest = max(b - a for a, b in itertools.pairwise(steps))
        back = _BACK.search(death["life"].text) if "life" in death else None
        waits = [
            float(match.group(2))
            for life in job.lives
            for match in _JOINED.finditer(life.text)
            if back and match.group(1) == back.group(1)
        ]
        rows.append(
            {
                "killed": death["killed"],
                "after_step": len(before),
                "pause_s": longest - usual,
                "back_s": death.get("back_s"),
                "others_waited_s": max(waits, default=None),
            }
        )
    checksums = sorted({life.record.checksum for life in job.lives if not life.killed})
    trained = sum(len(life.ends) for life in job.lives)
    elapsed = ends[-1] - ends[2]
    skipped = sum(1 for life in job.lives for end in life.ends if end <= ends[2])
    return {
        "kill": options.kill,
        "step_s": usual,
        "steps": len(ends),
        "seconds": elapsed,
        "deaths": rows,
        "trained": trained / options.replicas / len(ends),
        "goodput": (trained - skipped) / options.replicas * usual / elapsed,
        "checksums": checksums,
    }


def step_ends(job: Job) -> list[float]:
    """Return the time at which any replica first finished each step."""
    first: dict[int, float] = {}
    for life in job.lives:
        for step, end in zip(life.record.steps, life.ends, strict=True):
            first[step.iteration] = min(end, first.get(step.iteration, end))
    return [first[iteration] for iteration in sorted(first)]


def table(result: dict[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    of_servers = result["kill"] == "servers"
    rows: list[Sequence[str]] = [SERVERS_HEAD if of_servers else HEAD]
    for death in result["deaths"]:
        times = [cell(death[name]) for name in ("pause_s", "back_s", "others_waited_s")]
        row = [death["killed"], str(death["after_step"]), *times]
        rows.append(row[: len(rows[0])])
    return aligned(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    slow = options.slow != 1
    try:
        result = gpt.result_of(options, measure_slow if slow else measure, "failures.json")
    except LaunchError as error:
        print(f"bench/replicas/failures.py: {error}", file=sys.stderr)
        return 1
    if "cost" in result:
        return _report_slow(result, options.most_cost)
    print(table(result))
    print(
        f"# {result['steps']} steps of {result['step_s']:.3f} s in {result['seconds']:.0f} s, "
        f"{result['trained']:.1%} of the samples trained on, goodput {result['goodput']:.3f}"
    )
    if len(result["checksums"]) != 1:
        print("replicas end with different parameters")
        return 1
    longest = max(death["pause_s"] for death in result["deaths"])
    if options.most_pause is not None and longest > options.most_pause:
        print(f"a step took {longest:.2f} s longer, which is more than {options.most_pause:g} s")
        return 1
    if result["goodput"] < options.least_goodput:
        print(f"goodput is below {options.least_goodput}")
        return 1
    return 0


def _report_slow(result: dict[str, Any], most: float) -> int:
    print(
        f"# steps of {result['step_s']:.3f} s, and of {result['slowed_step_s']:.3f} s next to a "
        f"slow replica, which left out {result['left_out']} of its {result['steps']}: it costs the "
        f"others {result['cost']:.1%}"
    )
    if len(result["checksums"]) != 1:
        print("replicas end with different parameters")
        return 1
    if result["cost"] > most:
        print(f"that is more than {most:.1%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
