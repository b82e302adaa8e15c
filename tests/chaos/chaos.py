#!/usr/bin/env python3
"""Breaks real jobs on emulated hosts, at random, and demands that they end well or by name.

A seed is one job: its sizes, and what breaks when. Scheduler, servers and workers (sum_worker,
which checks every value of every sum) run each on a host of its own, a network namespace with a
limited link. Demanded of each job: no sum is wrong; within a limit every process has ended; each
ended well, or with an error that names what broke; no process, listening socket or file is left,
and the hosts go with the last job. Needs root, and iproute2.

Seeds above 1000 also draw whether the job is kept (--keep): then workers that failed are started
again, and a server in the place of one that ended, until the job ends well; and whether its
connections are encrypted.

Seeds above 2000 are of jobs that go on when a server is lost, by others that wait for its place;
half of them are of replicas, which are lost too, and come back. Servers are killed, stopped and
told to end. Demanded in addition: all nodes end well that were not broken for long.

Seeds above 3000 are of jobs whose scheduler is killed and started again, while links break. All
others must end well.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path

from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
from scripts.progress import Progress
from tests import native
from tests.chaos.broken_job import LINK_BITS, Job, Result, run
from tests.chaos.copying_job import CopyingJob
from tests.chaos.lasting_job import LastingJob, ReturningJob
from tests.chaos.seeds import KINDS, Script, make_script
from tests.multiproc.cluster import Nursery

HOSTS = 8


def play(
    scripts: Sequence[Script],
    programs: Path,
    folder: Path,
    tell: Callable[[Result], None] = lambda result: None,
    jobs: int = 1,
) -> list[Result]:
    """Run the scripts, ``jobs`` at a time; logs go to folders of ``folder``, one for each seed."""
    left = deque(scripts)
    folder.mkdir(parents=True, exist_ok=True)
    forks = any(script.forks for script in scripts)

    # Made here: an emulation's name is that of the process and a number.
    emulations = [_emulation() for _ in range(min(jobs, len(scripts)))]
    with (
        closing(Nursery(folder)) if forks else nullcontext() as nursery,
        ThreadPoolExecutor(len(emulations)) as pool,
    ):

        def some(emulation: Emulation) -> list[Result]:
            return _play_on(emulation, left, programs, folder, tell, nursery)

        try:
            results = [result for part in pool.map(some, emulations) for result in part]
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
        switch = str(emulation.hosts[0].namespace).rpartition("-")[0] + "-switch"
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
                job = ReturningJob(*where, nursery)
            else:
                job = LastingJob(*where, nursery) if script.spares else Job(*where)
            results.append(job.run())
            tell(results[-1])
    left = set(names) & set(run("ip", "netns", "list").split())
    if left:
        raise RuntimeError(f"network namespaces were left: {sorted(left)}")
    return results


def find_programs(sanitize: str) -> Path:
    """The folder of byteps-server and sum_worker. Raises BuildError."""
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
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds takes some of {','.join(KINDS)}")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs take positive numbers")
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


if __name__ == "__main__":
    # Terminated or interrupted: hosts, processes and file systems go either way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
