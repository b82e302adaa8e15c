"""Subcommands that start scheduler, servers or workers, or show a cluster. Each runs a script.

The scripts are in bash, because a server machine needs no Python. These subcommands make them use
the `byteps-server` of this Python's environment.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence

from byteps.cli import NAME
from byteps.patching import home


def scheduler(arguments: Sequence[str]) -> int:
    """Replace this process by the scheduler."""
    return _become("scheduler", "scheduler.sh", arguments)


def server(arguments: Sequence[str]) -> int:
    """Replace this process by the script that runs this host's servers."""
    return _become("server", "server.sh", arguments)


def worker(arguments: Sequence[str]) -> int:
    """Replace this process by torchrun, which starts this host's ranks."""
    return _become("worker", "worker.sh", arguments)


def cluster(arguments: Sequence[str]) -> int:
    """Show a running cluster."""
    if arguments[:1] == ["status"]:
        return _become("cluster status", "status.sh", arguments[1:])
    wants_help = arguments[:1] in (["-h"], ["--help"])
    print(
        f"usage: {NAME} cluster status [HOST:PORT] [options]\n\n"
        "Shows a running cluster, as its scheduler tells it. Example:\n\n"
        f"  {NAME} cluster status 127.0.0.1:9001\n\n"
        f"'{NAME} cluster status -h' explains the options.",
        file=sys.stdout if wants_help else sys.stderr,
    )
    return 0 if wants_help else 2


def _become(command: str, script: str, arguments: Sequence[str]) -> int:
    """Replace this process by a script. The script then gets the signals and decides the exit
    status."""
    path = home() / "scripts" / script
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    variables = {
        **os.environ,
        "PATH": os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]),
        "MEGATRON_BYTEPS_COMMAND": f"{NAME} {command}",
    }
    try:
        os.execvpe("bash", ["bash", str(path), *arguments], variables)
    except FileNotFoundError:
        print(f"{NAME} {command}: there is no bash on PATH, which runs {path}", file=sys.stderr)
    return 1
