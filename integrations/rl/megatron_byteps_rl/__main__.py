"""Runs verl's PPO trainer. When it fails, restarts it from its last checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from .metrics_file import keep_metrics
from .store import StoreError, keep_in_store, last_step

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 30.0
_FOLDER = Path("/dev/shm")
_PATTERNS = ("psm_*", "vllm_dist_*", "verl_weights_*")
"""Names of shared memory that Python (for vLLM), vLLM's ranks on a CPU, and verl create."""


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m megatron_byteps_rl", description=__doc__)
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="begin again up to N times without a new checkpoint between them (default: 0); needs "
        "trainer.save_freq and trainer.default_local_dir among the overrides",
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="warm processes that take the places of lost ranks, with the synchronous trainer; the "
        "other processes stay (default: 0)",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="copy each checkpoint to s3://BUCKET/PATH, gs://BUCKET/PATH or msc://PROFILE/PATH, "
        "and begin with the last one there; needs the same overrides as --restarts",
    )
    parser.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="of verl's trainer")
    options, others = parser.parse_known_args(arguments)
    overrides = [*others, *options.overrides]
    for name in ("restarts", "spares"):
        if (number := getattr(options, name)) < 0:
            parser.error(f"--{name} {number} is below 0")
    given = values(overrides)
    if options.spares and (mode := given.get("trainer.v1.trainer_mode", "sync")) != "sync":
        parser.error(f"--spares needs trainer.v1.trainer_mode=sync, not {mode}")
    if options.restarts or options.store:
        flag = "--restarts" if options.restarts else "--store"
        frequency = given.get("trainer.save_freq", "")
        if not frequency.isdigit() or int(frequency) == 0:
            parser.error(f"{flag} needs trainer.save_freq=STEPS: a run goes on from checkpoints")
        if "trainer.default_local_dir" not in given:
            parser.error(f"{flag} needs trainer.default_local_dir=FOLDER, of the checkpoints")
        if (mode := given.get("trainer.resume_mode", "auto")) != "auto":
            parser.error(f"{flag} needs trainer.resume_mode=auto, not {mode}")
    return options, overrides


def values(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values that these overrides set, by name. Of several, the last one counts."""
    pairs = (override.partition("=") for override in overrides if "=" in override)
    return {name.lstrip("+"): value for name, _, value in pairs}


def repeat(run: Callable[[], int], checkpoint: Callable[[], str], restarts: int) -> int:
    """Call `run` until it succeeds, or has failed more than `restarts` times at the same
    checkpoint. `checkpoint` returns the name of the checkpoint. Return the last exit status."""
    failures, last = 0, checkpoint()
    while status := run():
        now = checkpoint()
        failures = failures + 1 if now == last else 1
        last = now
        if failures > restarts:
            break
        where = f"step {now}" if now else "the beginning"
        print(f"the run failed (exit status {status}); again from {where}", flush=True)
    return status


def _run(overrides: Sequence[str], spares: int) -> int:
    """Make one attempt. Return its exit status; -N: signal N has ended it. All its processes have
    then ended."""
    began = time.time()
    given = values(overrides)
    keep_metrics(
        given.get("trainer.project_name", "verl_examples"),
        given.get("trainer.experiment_name", "gsm8k"),
    )
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.attempt", str(spares)]
    command += overrides
    process = subprocess.Popen(command, start_new_session=True)

    def forward(number: int, frame: object) -> None:
        process.send_signal(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(process)
        if left := remove_leftovers(began):
            print(f"shared memory that the run left was removed: {', '.join(left)}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # Ray's local processes are in the attempt's session, and end by themselves after the driver.
    deadline = time.monotonic() + _GRACE_S
    while _session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in _session(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _session(leader: int) -> list[int]:
    """Return the processes of a session, except zombies."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == leader:
            pids.append(int(stat.parent.name))
    return pids


def _mapped() -> Iterator[str]:
    """Yield the files that processes of this machine have mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield from (line.split(None, 5)[-1].rstrip() for line in maps.open(encoding="utf-8"))
        except OSError:  # the process has ended, or belongs to another user
            continue


def remove_leftovers(since: float) -> list[str]:
    """Remove this user's shared memory that was created after `since` and that no process has
    mapped.

    Ray ends vLLM's processes by SIGKILL, so they cannot clean up. Returns the names that were
    removed.
    """
    files = [file for pattern in _PATTERNS for file in _FOLDER.glob(pattern)]
    mapped = set(_mapped()) if files else set()
    removed = []
    for file in files:
        try:
            status = file.stat()
            if status.st_uid != os.getuid() or status.st_ctime < since or str(file) in mapped:
                continue
            file.unlink()
        except FileNotFoundError:
            continue
        removed.append(file.name)
    return sorted(removed)


def main() -> int:
    options, overrides = parse()
    folder = Path(values(overrides).get("trainer.default_local_dir", ""))
    try:
        with keep_in_store(folder, options.store) if options.store else nullcontext():
            return repeat(
                lambda: _run(overrides, options.spares),
                lambda: last_step(folder),
                options.restarts,
            )
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
