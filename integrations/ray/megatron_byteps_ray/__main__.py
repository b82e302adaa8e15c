"""Trains with Megatron-LM and BytePS: on this machine under torchrun, or on a Ray cluster.

    python -m megatron_byteps_ray --ranks 2 --spares 1 pretrain_dpu_gpt.py -- --use-dpu-reduce ...
    python -m megatron_byteps_ray --mode local --ranks 2 pretrain_dpu_gpt.py -- --use-dpu-reduce ...

On Ray the job goes on when a rank, a server or a machine is lost. Exit status: 0 training has
finished; 1 it has failed, and the last line has the reason; 2 bad usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .profiling import Profile
from .settings import Limits, Settings, preload_for


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_byteps_ray",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("entry", help="the script: a path, or module:function")
    add("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the script, after --")
    add("--mode", choices=("ray", "local"), default="ray", help="local: torchrun (default: ray)")
    add("--ranks", type=int, default=Settings.ranks, help=f"default: {Settings.ranks}")
    add(
        "--replicas",
        type=int,
        default=Settings.replicas,
        help="of these ranks, jobs that meet only at servers; each restarts alone (default: 1)",
    )
    add("--spares", type=int, default=Settings.spares, help="warm actors beyond them (default: 0)")
    add("--servers", type=int, default=Settings.servers, help="BytePS servers (default: 1)")
    add("--min-ranks", type=int, help="go on with so few, where no spare is left (default: wait)")
    add("--rank-multiple", type=int, help="default: what Megatron's arguments say")
    add("--cpus-per-rank", type=float, default=Settings.cpus_per_rank, help="default: 1")
    add(
        "--gpus-per-rank",
        type=float,
        default=Settings.gpus_per_rank,
        help="1, a fraction, or 0 (default)",
    )
    add("--server-cpus", type=float, default=Settings.server_cpus, help="default: 1")
    add("--server-resource", help="Ray resource of the machines for scheduler and servers")
    add("--folder", type=Path, default=Settings.folder, help="state, logs (default: build/ray)")
    add("--python-path", action="append", default=[], help="import from here first; repeatable")
    add(
        "--environment",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME=VALUE",
        help="set it in all ranks and servers; repeatable",
    )
    add("--preload", action="append", help="import beforehand, instead of what Megatron needs")
    add("--max-restarts", type=int, default=Settings.max_restarts, help="default: 20")
    add("--max-fruitless", type=int, default=Settings.max_fruitless, help="default: 3")
    add(
        "--memory-save-interval",
        type=int,
        metavar="N",
        help="keep training state in memory, on two machines, every N steps (default: do not)",
    )
    add("--resume", action="store_true", help="keep the counts of a driver that was lost")
    add("--profile-folder", type=Path, help="profile some steps, for ui.perfetto.dev, to here")
    add("--profile-ranks", type=_numbers, metavar="N,N", help="default: all")
    for end in ("first", "last"):
        default = getattr(Profile, end)
        add(f"--profile-{end}", type=int, metavar="STEP", help=f"default: {default}")
    add("--address", help="of a Ray cluster, or auto (default: start one here for this job)")
    add("--dashboard", action="store_true", help="with the cluster that is started here")
    add("--metrics-port", type=int, help="of Ray's metrics, with the cluster started here")
    add("--temp-dir", help="for Ray's own files, with the cluster started here")
    for limit in fields(Limits):
        add(
            f"--limit-{limit.name}",
            type=float,
            metavar="S",
            default=limit.default,
            help=f"default: {limit.default:g}",
        )
    options = parser.parse_args(arguments)
    try:
        options.settings = _settings(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _settings(options: argparse.Namespace) -> Settings:
    limits = Limits(**{f.name: getattr(options, f"limit_{f.name}") for f in fields(Limits)})
    same = (
        *(
            "entry",
            "ranks",
            "replicas",
            "spares",
            "servers",
            "min_ranks",
            "rank_multiple",
            "cpus_per_rank",
        ),
        *("gpus_per_rank", "server_cpus", "server_resource", "folder", "max_restarts"),
        *("max_fruitless", "resume", "memory_save_interval"),
    )
    preload = tuple(options.preload or ()) or preload_for(options.arguments)
    chosen = {name: getattr(options, f"profile_{name}") for name in ("ranks", "first", "last")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if chosen and options.profile_folder is None:
        raise ValueError(f"--profile-{next(iter(chosen))} needs --profile-folder")
    profile = Profile(folder=options.profile_folder, **chosen) if options.profile_folder else None
    return Settings(
        **{name: getattr(options, name) for name in same},
        arguments=tuple(options.arguments),
        python_path=tuple(options.python_path),
        preload=preload,
        environment=dict(options.environment),
        profile=profile,
        limits=limits,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not ranks with commas between them")
    return tuple(int(part) for part in text.split(","))


def run_local(settings: Settings) -> int:
    """Run the script under torchrun, in embedded mode and without recovery. Without a profile this
    process becomes torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(settings.ranks)]
    if not settings.entry.endswith(".py") or settings.profile is not None:
        command += ["-m", "megatron_byteps_ray.rank_program"]
    folders = [*settings.python_path, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    os.environ.update(settings.environment)
    if settings.servers:
        os.environ.setdefault("BYTEPS_EMBEDDED_SERVERS", str(settings.servers))
    command += [settings.entry, *settings.arguments]
    if settings.profile is None:
        os.execv(sys.executable, command)
    settings.profile.clear()
    status = subprocess.run(command, env={**os.environ, **settings.profile.of_ranks()}).returncode
    if status == 0:
        merge_profile(settings.profile)
    return status


def _console_of(replica: int) -> Callable[[dict[str, Any]], None]:
    """Return a listener whose lines begin with the replica's number."""
    from .job import Console

    return Console(lambda text: print(f"replica {replica}: {text}", flush=True))


def merge_profile(profile: Profile) -> None:
    """Merge the processes' traces into a file. Print its path, or the reason of a failure."""
    try:
        print(f"profile: {profile.merge()} (drop it on ui.perfetto.dev)", flush=True)
    except ValueError as error:
        print(f"warning: {error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    settings: Settings = options.settings
    if options.mode == "local" and settings.replicas > 1:
        print("error: --replicas needs --mode ray", file=sys.stderr)
        return 2
    if options.mode == "local":
        return run_local(settings)
    # The import is here, so that bad flags are reported without waiting for Ray.
    from .cluster import JobError, cluster
    from .job import Console, Job, Replicas

    try:
        job = Replicas(settings, _console_of) if settings.replicas > 1 else Job(settings, Console())
        with cluster(
            settings,
            address=options.address,
            temp_dir=options.temp_dir,
            dashboard=options.dashboard,
            metrics_port=options.metrics_port,
        ):
            job.run()
        if settings.profile is not None:
            merge_profile(settings.profile)
    except (JobError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the ranks were ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # SIGTERM ends a driver and its ranks as Ctrl-C does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
