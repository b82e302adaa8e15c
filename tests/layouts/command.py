"""The command of a table: its options, and how its cells are run."""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.progress import Progress

from .job import JobFailed
from .platforms import PLATFORMS
from .rows import Named, named


def parser_of(about: str, *, devices: bool = True) -> argparse.ArgumentParser:
    """The options that all tables have, for a command with this description.

    Args:
        devices: whether ranks may have GPUs, and several cells may run at once.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layout", nargs="+", default=[], metavar="NAME", help="only these (default: all)")
    add("--markdown", type=Path, metavar="FILE", help="write the rows into this document")
    add("--budget", type=float, metavar="S", help="begin nothing new after so many seconds")
    if devices:
        text = "of the ranks (default: %(default)s); GPUs are shared where there are too few"
        add("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
        add("--device", choices=PLATFORMS, default="cpu", help=text)
    return parser


def parse[R: Named](
    parser: argparse.ArgumentParser, rows: Sequence[R], arguments: Sequence[str] | None
) -> tuple[list[R], argparse.Namespace]:
    """The rows that a command line names, and its options. Exits with status 2 for bad usage.

    Args:
        arguments: None for the process's own.
    """
    options = parser.parse_args(arguments)
    if getattr(options, "jobs", 1) < 1:
        parser.error(f"--jobs must be 1 or more, not {options.jobs}")
    try:
        chosen = named(rows, options.layout)
    except ValueError as error:
        parser.error(str(error))
    refuse_missing_gpus(parser, getattr(options, "device", "cpu"))
    return chosen, options


def refuse_missing_gpus(parser: argparse.ArgumentParser, device: str) -> None:
    """Exit with status 2 where there is no GPU for ``--device cuda``."""
    if device != "cuda":
        return
    import torch

    from scripts import gpus

    if not gpus.count_gpus():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")


def machine_of(device: str) -> str:
    """What ran the cells, in words."""
    if device != "cuda":
        return f"the CPU of {platform.system()} {platform.machine()}"
    import torch

    gpus = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
    return f"{gpus}, torch {torch.__version__}"


def run_cells[C, O](
    cells: Sequence[C],
    run: Callable[[C], O],
    tell: Callable[[C, O], Iterable[str]],
    *,
    title: Callable[[C], str],
    bar: Progress,
    jobs: int = 1,
    budget: float | None = None,
    failures: tuple[type[Exception], ...] = (JobFailed,),
) -> bool:
    """Run every cell; one that fails does not stop the others.

    Args:
        run: makes the runs of a cell and compares them.
        tell: called for each outcome, in the order of the cells: shows it, and returns what is not
            as it must be.
        title: of a cell, for people.
        jobs: cells at once. One alone runs in the calling thread.
        budget: seconds after which no other cell is begun.
        failures: what ``run`` raises where a cell fails.

    Returns:
        whether all cells were run and all is as it must be.
    """
    deadline = math.inf if budget is None else time.monotonic() + budget
    left: list[str] = []
    good = True

    def one(cell: C) -> O | None:
        return None if time.monotonic() > deadline else run(cell)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(one, cell) for cell in cells] if jobs > 1 else []
        for number, cell in enumerate(cells):
            bar.update(title(cell), done=number)
            try:
                outcome = running[number].result() if running else one(cell)
            except failures as error:
                bar.say(f"{title(cell)}: {error}")
                good = False
                continue
            if outcome is None:
                left.append(title(cell))
                continue
            for problem in tell(cell, outcome):
                bar.say(f"{title(cell)}: {problem}")
                good = False
    if left:
        bar.say(f"not run, since --budget is used up: {'; '.join(left)}")
    return good and not left
