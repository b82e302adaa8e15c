"""A table in a document, of which each line is a cell that was run, now or before."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

END = "<!-- end -->"


def parser_of(about: str) -> argparse.ArgumentParser:
    """One with ``--layout`` and ``--markdown``, for a script with this description."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layout", nargs="+", default=[], metavar="NAME", help="only these (default: all)")
    add("--markdown", type=Path, metavar="FILE", help="write the table into this document")
    return parser


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """``--device``, ``--jobs`` and ``--budget``, of a script whose ranks may have GPUs."""
    from layouts.platforms import PLATFORMS

    add = parser.add_argument
    add("--device", choices=PLATFORMS, default="cpu", help="of the ranks (default: %(default)s)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    add("--budget", type=float, metavar="S", help="begin nothing new after so many seconds")


def parse_device_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The options of a command line, None for the process's own; exits with status 2 for a bad
    ``--jobs``, or where there is no GPU for ``--device cuda``."""
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be 1 or more, not {options.jobs}")
    refuse_missing_gpus(parser, options.device)
    return options


def refuse_missing_gpus(parser: argparse.ArgumentParser, device: str) -> None:
    """Exit with status 2 where there is no GPU for ``--device cuda``."""
    if device != "cuda":
        return
    import torch

    from gpus import count_gpus

    if not count_gpus():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")


def machine_of(device: str) -> str:
    """What ran the cells, for ``put_cells``; empty for this machine's CPU."""
    if device != "cuda":
        return ""
    import torch

    gpus = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
    return f"{gpus}, torch {torch.__version__}"


def parse[T](
    about: str, by_name: Callable[[Sequence[str]], T], arguments: Sequence[str] | None
) -> tuple[T, Path | None]:
    """The layouts that a command line names, as ``by_name`` has them, and the document to write.

    Args:
        about: the script's description.
        by_name: the layouts of these names, all without names; raises ValueError.
        arguments: None for the process's own.
    """
    parser = parser_of(about)
    options = parser.parse_args(arguments)
    try:
        return by_name(options.layout), options.markdown
    except ValueError as error:
        parser.error(str(error))


def put_cells(
    markdown: Path,
    lines: Sequence[str],
    *,
    begin: str,
    head: Sequence[str],
    known: Sequence[Hashable],
    key_of: Callable[[list[str]], Hashable],
    machine: str = "",
) -> None:
    """Write these lines of the table between its two marks, and keep the other cells' lines.

    Args:
        begin: the mark before the table; after it stands END.
        head: the table's first two lines.
        known: the keys of all cells, in their order.
        key_of: which cell a line is of, from its columns.
        machine: what it was run on; without it, this machine's CPU.

    Raises:
        SystemExit: the document has no place for it.
    """
    before, found, rest = markdown.read_text(encoding="utf-8").partition(begin)
    table, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"error: {markdown} has no place for the table ({begin})")
    rows = {
        key_of([column.strip() for column in line.split("|")][1:-1]): line
        for line in [*table.splitlines(), *lines]
        if line.startswith("| ")
    }
    machine = machine or f"the CPU of {platform.system()} {platform.machine()}"
    text = "\n".join(
        ["", f"Run on {machine}.", "", *head, *(rows[key] for key in known if key in rows), ""]
    )
    markdown.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
