#!/usr/bin/env python3
"""Breaks real jobs on emulated hosts at random, and checks that they end well or with named errors.

A seed determines a job: its sizes, and its faults with their times. Scheduler, servers and workers
(sum_worker, which checks every value of every sum) each run on an emulated host, a network
namespace with a limited link. Checks of each job: no sum is wrong; every process ends within a time
limit, either well or with an error that names a fault; no process, listening socket or file is
left, and the hosts are removed after the last job. Needs root and iproute2.

Seeds above 1000 also choose kept jobs (--keep), in which failed workers are started again and ended
servers are replaced until the job ends well, and encrypted connections.

Seeds above 2000 are jobs that survive the loss of servers, because spare servers take their places.
Half of these jobs have replicas, which are lost too and return. Servers are killed, stopped and
terminated. Another check: all nodes without a long fault end well.

Seeds above 3000 are jobs whose scheduler is killed and restarted while links break; all others must
end well. Seeds above 4000 are jobs that lose servers with optimizer state, of which other servers
have copies. Seeds above 5000 lose servers, replicas and the scheduler.

With --minutes a job trains for that time, and the resources of its processes must not grow
(soak.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ClassVar

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from scripts.children import Late
from scripts.progress import Progress
from tests import native
from tests.chaos.broken_job import LIMIT_S, LINK_BITS, Job, Result, run
from tests.chaos.seeds import KINDS, LONG_S, Fault, Script, make_script
from tests.chaos.soak import Soak
from tests.multiproc.cluster import Nursery

HOSTS = 8
ROOT = Path(__file__).resolve().parents[2]


def play(
    scripts: Sequence[Script],
    programs: Path,
    folder: Path,
    tell: Callable[[Result], None] = lambda result: None,
    jobs: int = 1,
) -> list[Result]:
    """Run the scripts, ``jobs`` at a time; logs go to a subfolder of ``folder`` for each seed."""
    left = deque(scripts)
    folder.mkdir(parents=True, exist_ok=True)
    forks = any(script.forks for script in scripts)

    # Made in this thread: an emulation's name consists of the process id and a number.
    emulations = [_emulation() for _ in range(min(jobs, len(scripts)))]
    with (
        closing(Nursery(folder)) if forks else nullcontext() as nursery,
        ThreadPoolExecutor(len(emulations)) as pool,
    ):

        def play_seeds(emulation: Emulation) -> list[Result]:
            return _play_on(emulation, left, programs, folder, tell, nursery)

        try:
            results = [result for part in pool.map(play_seeds, emulations) for result in part]
        finally:
            left.clear()  # after an interruption no further job begins
    return sorted(results, key=lambda result: result.script.seed)


def _emulation() -> Emulation:
    topology = Topology(
        workers=HOSTS - 1,
        servers=1,
        emulated_hosts=HOSTS,
        link_bits=LINK_BITS,
        fair_queue=False,
        mtu=1500,
    )
    return Emulation(topology)


def _play_on(
    emulation: Emulation,
    scripts: deque[Script],
    programs: Path,
    folder: Path,
    tell: Callable[[Result], None],
    nursery: Nursery | None,
) -> list[Result]:
    results = []
    with emulation:
        switch = _switch_of(emulation)
        names = [switch, *(str(host.namespace) for host in emulation.hosts)]
        while True:
            try:
                script = scripts.popleft()
            except IndexError:
                break
            own = folder / f"seed-{script.seed}"
            own.mkdir(parents=True)
            where = (script, emulation.hosts, switch, programs, own)
            if script.copies:
                job: Job = CopyingJob(*where, nursery)
            elif script.returns:
                kind = LosingJob if script.spares else ReturningJob
                job = kind(*where, nursery)
            else:
                job = LastingJob(*where, nursery) if script.spares else Job(*where)
            results.append(job.run())
            tell(results[-1])
    left = set(names) & set(run("ip", "netns", "list").split())
    if left:
        raise RuntimeError(f"network namespaces were left: {sorted(left)}")
    return results


def soak(seed: int, minutes: float, programs: Path, folder: Path) -> int:
    """Train for some minutes, with logs and samples in ``folder``, which is made anew; get the exit
    status."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        _emulation() as emulation,
        Progress("soak", total=int(minutes * 60), unit="s") as shown,
    ):
        where = (emulation.hosts, _switch_of(emulation), programs, folder)
        job = Soak(seed, minutes, *where, shown)
        try:
            job.run()
        except (RuntimeError, OSError) as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
        finally:
            job.clear()
    return 0 if job.report() else 1


def _switch_of(emulation: Emulation) -> str:
    return str(emulation.hosts[0].namespace).rpartition("-")[0] + "-switch"


def find_programs(sanitize: str) -> Path:
    """Find the folder of byteps-server and sum_worker. Raises BuildError."""
    if sanitize:
        return native.build("byteps-server", "sum_worker", sanitize=sanitize)
    return native.build("byteps-server", "sum_worker")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many jobs (default 20)")
    parser.add_argument("--from", dest="first", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default 1)")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="only these faults (seeds to 2000)"
    )
    parser.add_argument("--sanitize", choices=native.SANITIZED, default="", help="build with this")
    parser.add_argument("--logs", type=Path, help="keep all logs in this folder")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--minutes", type=float, help="train for so long, with the seed of --from")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds takes some of {','.join(KINDS)}")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs take positive numbers")
    if options.minutes is not None:
        if options.minutes <= 0:
            parser.error("--minutes takes a positive number")
        folder = (options.logs or ROOT / "build/soak").resolve()
        return soak(options.first, options.minutes, find_programs(options.sanitize), folder)
    scripts = [make_script(options.first + i, kinds) for i in range(options.seeds)]

    def tell(result: Result) -> None:
        what = "; ".join(
            f"{f.kind} {f.node} at {f.at_s:g} s for {f.seconds:g} s" for f in result.script.faults
        )
        how = "WRONG" if result.wrong else "went on" if result.survived else "ended by name"
        shown.step()
        what += ", kept" * result.script.keep + ", encrypted" * result.script.tls
        what += ", replicas" * result.script.replicas + ", copies" * result.script.copies
        how += f", {result.replaced} replaced" * (result.replaced > 0)
        how += f" in life {result.lives}" if result.lives > 1 and not result.wrong else ""
        seed = f"seed {result.script.seed:5}"
        shown.say(f"{seed}  {how:23}  {result.seconds:6.1f} s  {what}", stream=sys.stdout)
        for line in result.wrong:
            shown.say(f"    {line}", stream=sys.stdout)

    programs = find_programs(options.sanitize)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as scratch,
        Progress("chaos", total=len(scripts), unit="jobs") as shown,
    ):
        results = play(scripts, programs, options.logs or Path(scratch), tell, options.jobs)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    wrong = sum(bool(result.wrong) for result in results)
    went_on = sum(result.survived and not result.wrong for result in results)
    print(
        f"{len(results)} jobs: {went_on} went on, {len(results) - went_on - wrong} ended by name, "
        f"{wrong} wrong"
    )
    return 1 if wrong else 0


# A job that survives the loss of servers and replicas, and its checks.


REPLICA_PACE_S = 0.05


class LastingJob(Job):
    """Starts another server for each lost server, and restarts killed replicas.

    Args:
        nursery: Forks the workers, if they are Python programs.
    """

    # These limits matter only for peers that fall silent, because all other losses are detected at
    # once.
    settings: ClassVar[Mapping[str, str]] = {
        "BYTEPS_REPLACE_SERVERS_S": "60",
        "BYTEPS_OP_TIMEOUT_S": "90",
        "BYTEPS_START_TIMEOUT_S": "20",
    }

    def __init__(
        self,
        script: Script,
        hosts: Sequence[Host],
        switch: str,
        programs: Path,
        folder: Path,
        nursery: Nursery | None,
    ) -> None:
        super().__init__(script, hosts, switch, programs, folder)
        self._nursery = nursery
        self._gone: deque[str] = deque()
        """Nodes that have to be started again."""

    # ----- processes

    def _start_workers(self, life: int) -> None:
        for index in range(self.script.servers):
            self._await_text(f"server {index}", "has taken this server")
        for index in range(self.script.spares):
            self._start_server(f"spare {index}")
        if not self.script.forks:
            return super()._start_workers(life)
        for rank in range(self.script.workers):
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        number = {"BYTEPS_REPLICA": f"{rank}/{self.script.workers}"}
        self._fork(rank, "train", {**ranks, **number}, REPLICA_PACE_S)

    def _fork(self, rank: int, program: str, env: Mapping[str, str], pace: float) -> None:
        """Start a program of lost_servers.py on the worker's host."""
        node, folder = f"worker {rank}", self.folder / "workers"
        folder.mkdir(exist_ok=True)
        args = {
            "namespace": self._hosts[node].namespace,
            "steps": self.script.rounds,
            "pace": pace,
        }
        assert self._nursery is not None
        title = self._title_of_next(node)
        self._processes[node] = self._nursery.start(
            title, f"lost_servers:{program}_on_host", {**self._env, **env}, folder, args
        )

    def _title_of_next(self, node: str) -> str:
        """Get the title of the node's next process."""
        if node not in self._processes:
            return node
        self._earlier.append((node, self._processes[node]))
        return f"{node} again {sum(life_of == node for life_of, _ in self._earlier)}"

    def _start_gone(self) -> None:
        while self._gone:
            node = self._gone.popleft()
            if node == "scheduler":
                life = 1 + sum(process_of == node for process_of, _ in self._earlier)
                command = [str(self._programs / "byteps-server"), "--role", node]
                self._spawn(node, command, self._env, life)
                continue
            if node.startswith("worker"):
                self._start_worker(int(node.split()[1]))
                continue
            self._start_server(node, 1 + sum(process_of == node for process_of, _ in self._earlier))

    # ----- the run

    def _await_begin(self) -> None:
        """Wait until all nodes have joined, because none may be missing at the start."""
        self._await_text("scheduler", "the job is complete")

    def _await_text(self, node: str, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self._processes[node].text:
            if not self._processes[node].running or time.monotonic() > deadline:
                said = self._processes[node].text[-2000:]
                return self._wrong.append(f"{node} does not say '{text}': {said}")
            time.sleep(0.01)

    def _break(self, fault: Fault) -> None:
        was_there = self._processes[fault.node].running
        super()._break(fault)
        if not fault.loses or not was_there:
            return
        lasts = fault.kind in ("stop", "cut")
        # A stopped process of a replica still exists. It must notice by itself that the job has
        # removed it.
        if not lasts or not fault.node.startswith("worker"):
            again = partial(self._gone.append, fault.node)
            away = lasts or fault.node == "scheduler"
            self._later(fault.seconds if away else 0.0, again)

    def _await_end(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(worker.running for worker in self._workers()) and time.monotonic() < deadline:
            # Start them in this thread, not in a timer's: children end with the thread that started
            # them.
            self._start_gone()
            time.sleep(0.02)
        self._mend()
        for node, process in [*self._processes.items(), *self._earlier]:
            try:
                process.wait(deadline - time.monotonic())
            except Late:
                self._wrong.append(f"{process.title} of {node} still ran after {LIMIT_S:g} s")

    def _mend(self) -> None:
        super()._mend()
        for _, process in self._earlier:
            process.send(signal.SIGCONT)

    def _judge(self, ended: dict[str, int]) -> None:
        super()._judge(ended)
        for node, process in [*self._processes.items(), *self._earlier]:
            if "AssertionError" in process.text:
                self._wrong.append(f"{node} has seen what is wrong: {process.text[-2000:]}")
        may_fail = {fault.node for fault in self.script.faults if fault.loses}
        for node, status in ended.items():
            if status != 0 and node not in may_fail:
                said = self._processes[node].text.strip()
                self._wrong.append(f"{node} did not go on, and ended with {status}: {said[-600:]}")


class ReturningJob(LastingJob):
    """Restarts the scheduler each time it is killed."""

    settings: ClassVar[Mapping[str, str]] = {
        "BYTEPS_SCHEDULER_RETURN_S": "60",
        "BYTEPS_OP_TIMEOUT_S": "120",
        "BYTEPS_START_TIMEOUT_S": "20",
    }

    def _await_begin(self) -> None:
        super()._await_begin()
        for node in self.script.server_nodes[: self.script.servers]:
            self._await_text(node, "the job is complete")

    def _await_end(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        others = [process for node, process in self._processes.items() if node != "scheduler"]
        while any(process.running for process in others) and time.monotonic() < deadline:
            self._start_gone()
            time.sleep(0.02)
        # A scheduler that starts after the job's end would wait for another job.
        with contextlib.suppress(Late):
            self._processes["scheduler"].wait(LONG_S)
        self._processes["scheduler"].send(signal.SIGKILL)
        super()._await_end()


class LosingJob(ReturningJob):
    """Replaces lost servers and restarts killed replicas, too."""

    # A spare server that waits at the job's end waits for the scheduler until its return timeout. A
    # replica that joins may have to wait until the scheduler has given up lost nodes.
    settings: ClassVar[Mapping[str, str]] = {
        **LastingJob.settings,
        **ReturningJob.settings,
        "BYTEPS_SCHEDULER_RETURN_S": "20",
        "BYTEPS_START_TIMEOUT_S": "60",
    }


# A job whose servers keep optimizer state and copies of it; some servers are lost.


PACE_S = 0.03
FOUND_S = 8.0
"""Seconds within which the scheduler detects a lost server."""
COPIED = "has a copy of this server's state"


class CopyingJob(LastingJob):
    """Loses a server only while each server's state is copied: then no loss ends the job."""

    settings: ClassVar[Mapping[str, str]] = {**LastingJob.settings, "BYTEPS_BACKUP_STATE": "1"}

    def _start_worker(self, rank: int) -> None:
        size = str(self.script.workers)
        ranks = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._fork(rank, "with_copies", ranks, PACE_S)

    def _await_begin(self) -> None:
        self._one_loss = threading.Lock()
        super()._await_begin()
        for node in self.script.server_nodes[: self.script.servers]:
            self._await_text(node, COPIED)

    # ----- losses in sequence

    def _break(self, fault: Fault) -> None:
        if not fault.loses:
            return super()._break(fault)
        with self._one_loss:
            if not self._await(self._all_copied, LIMIT_S):
                return
            lost = self._lost()
            super()._break(fault)
            # If the killed server was a waiting spare, no server is lost.
            self._await(lambda: self._lost() > lost, fault.seconds + FOUND_S)

    def _await(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds. Return False if it does not hold in time, or if the
        scheduler ends."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or not self._processes["scheduler"].running:
                return False
            time.sleep(0.05)
        return True

    def _lost(self) -> int:
        return self._processes["scheduler"].text.count("another server has")

    def _all_copied(self) -> bool:
        replaced = self._processes["scheduler"].text.count("has taken the place of")
        everyone = [*self._processes.values(), *(process for _, process in self._earlier)]
        copied = sum(process.text.count(COPIED) for process in everyone)
        # For each new server two servers report copies: the new server itself, and the server whose
        # state it copies.
        return self._lost() == replaced and copied >= self.script.servers + 2 * replaced


if __name__ == "__main__":
    # Clean-up of hosts, processes and file systems works for SIGTERM as for an interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
