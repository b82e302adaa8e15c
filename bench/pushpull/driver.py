"""Makes the launches of a plan: interleaved, and again where the machine was too busy."""

from __future__ import annotations

import sys
import time

from bench.kit.hosts import hosts_of
from bench.kit.plan import Plan
from bench.pushpull.launch import Launch, launch
from bench.pushpull.summary import Run, percentile
from scripts.progress import Progress


def run_plan(plan: Plan, name: str = "", deadline: float | None = None) -> Run:
    """Launch all backends ``plan.launches`` times, interleaved.

    A round in which the machine was too busy is repeated, ``plan.retries`` times in all. After
    ``deadline``, of the monotonic clock, no other round begins.

    Raises:
        LaunchError: a process failed.
        EmulationError: the hosts could not be made.
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
            for one in done:
                medians = (1e3 * percentile(case.samples_s, 50) for case in one.measured)
                busiest = max(case.busy for case in one.measured)
                note = "" if one.kept else ": too busy, not counted"
                text = (
                    f"{name} launch {index} {one.backend}: p50 ms "
                    f"{' '.join(f'{value:.2f}' for value in medians)}; "
                    f"machine {busiest:.0%} busy{note}"
                )
                shown.say(text.strip())
            quiet += all(one.kept for one in done)
            if quiet == plan.launches:
                break
            if deadline is not None and time.monotonic() > deadline:
                shown.say(f"{name}: no more launches, since the time is used up")
                break
    return run


def progress(text: str) -> None:
    """To stderr: stdout is for what was measured."""
    print(text.strip(), file=sys.stderr, flush=True)
