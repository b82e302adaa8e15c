"""The command ``megatron-byteps``. Each subcommand has a module, which is imported when the
subcommand is called.

So the help, and subcommands that need neither torch nor Megatron, start fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import sys
import textwrap
from collections.abc import Sequence

NAME = "megatron-byteps"
COMMANDS = {
    "patch": ("byteps.cli.patch:patch", "patch a Megatron-LM checkout, or megatron-core in place"),
    "unpatch": ("byteps.cli.patch:unpatch", "undo that"),
    "status": ("byteps.cli.patch:status", "say whether a Megatron is patched"),
    "doctor": ("byteps.cli.doctor:main", "check this host, and say what a job would do here"),
    "check": ("byteps.cli.check:main", "say what the flags would do for Megatron's arguments"),
    "sizing": ("byteps.sizing:main", "compute what servers would gain and need"),
    "try": ("byteps.trial.__main__:main", "run a launch line plain and through servers"),
    "bench": ("byteps.cli.bench:main", "time an all-reduce through servers and without"),
    "scheduler": ("byteps.cli.nodes:scheduler", "run the scheduler of a cluster"),
    "server": ("byteps.cli.nodes:server", "run this host's servers of a cluster"),
    "worker": ("byteps.cli.nodes:worker", "run this host's ranks of a cluster, by torchrun"),
    "cluster": ("byteps.cli.nodes:cluster", "'cluster status' shows a running cluster"),
}
"""Function and description of each subcommand. The function takes the arguments and returns the
exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: arguments of the command; None: those of the process.

    Returns:
        The exit status of the subcommand; 2 if there is no such subcommand.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"{NAME} {version()}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean '{NAME} {near[0]}'?" if near else ""
        print(f"{NAME}: there is no command '{words[0]}'{hint} ('{NAME} -h')", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[words[0]][0].partition(":")
    try:
        status: int = getattr(importlib.import_module(module), function)(words[1:])
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        sys.stderr.close()
        return 1
    return status


def version() -> str:
    """Return the version of the distribution that contains this package."""
    for name in (NAME, "byteps"):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # The project's checkout may also be installed, as a distribution of the same name without
        # byteps.
        if any(str(file) == "byteps/__init__.py" for file in distribution.files or ()):
            return distribution.version
    return "of a checkout"


def make_parser(command: str, about: str, more: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand.

    Args:
        about: description of the subcommand, in sentences.
        more: examples and exit status, printed unchanged after the options; {prog} stands for the
            command.
    """
    prog = f"{NAME} {command}"
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.fill(about, 88),
        epilog=more.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {NAME} COMMAND ...",
            "",
            "Data-parallel training with Megatron-LM or PyTorch through parameter servers.",
            "",
            *lines,
            "",
            f"'{NAME} COMMAND -h' explains each of them, with an example.",
        ]
    )
