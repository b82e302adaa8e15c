"""The subcommands ``patch``, ``unpatch`` and ``status``, for a checkout or for megatron-core."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from byteps.cli import NAME, make_parser
from byteps.patching.series import PatchError
from byteps.patching.target import Target

_HOW = """\
Examples:
  {prog} ~/Megatron-LM    a checkout, or a folder with Megatron-LM
  {prog}                  the megatron-core of this Python, in place

Exit status: STATUS; 2 bad use.
"""


def patch(arguments: Sequence[str]) -> int:
    """Patch a Megatron-LM so that it can reduce gradients through servers."""
    options = _parse(
        "patch",
        "Patches Megatron-LM: adds files of BytePS and, in Megatron's, the few lines that call "
        "them. They change nothing without --use-dpu-reduce. Takes the series of patches of which "
        "every hunk fits, and changes nothing if none does.",
        "0 it is patched; 1 it is not, and nothing was changed",
        arguments,
        cpu=True,
    )
    return _run("patch", lambda: Target.of(options.path).apply(["cpu"] if options.cpu else []))


def unpatch(arguments: Sequence[str]) -> int:
    """Restore the original files."""
    options = _parse(
        "unpatch",
        "Undoes 'patch': the files are as they were. Refuses, and changes nothing, if a patched "
        "file was changed since.",
        "0 it is as it was; 1 it is not, and nothing was changed",
        arguments,
    )
    return _run("unpatch", lambda: Target.of(options.path).reverse())


def status(arguments: Sequence[str]) -> int:
    """Print whether a Megatron is patched, judged by its files."""
    options = _parse(
        "status",
        "Says whether Megatron-LM is patched, and which files were changed since, also by git or "
        f"by an upgrade of megatron-core. ('{NAME} cluster status' shows a running cluster.)",
        "0 it is patched; 1 it is not, or not as this version of byteps does",
        arguments,
    )
    return _run("status", lambda: Target.of(options.path).status())


def _parse(
    command: str, about: str, exit_status: str, arguments: Sequence[str], *, cpu: bool = False
) -> argparse.Namespace:
    parser = make_parser(command, about, _HOW.replace("STATUS", exit_status))
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH",
        help="folder that has megatron/core (default: the installed megatron-core)",
    )  # fmt: skip
    if cpu:
        parser.add_argument(
            "--cpu", action="store_true",
            help="also what training on a CPU needs (MEGATRON_CPU=1 then asks for it)",
        )  # fmt: skip
    return parser.parse_args(arguments)


def _run(command: str, do: Callable[[], bool | None]) -> int:
    try:
        return int(do() is False)
    except PatchError as error:
        print(f"{NAME} {command}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{NAME} {command}: {error}; nothing was changed", file=sys.stderr)
    return 1
