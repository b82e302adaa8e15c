"""Tables of layouts: their rows, the documents that contain them, and the command that runs
cells."""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from scripts.progress import Progress

from .job import PLATFORMS, JobFailed


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training job with Megatron's parallel sizes; the data-parallel size follows."""

    name: str
    ranks: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Get the number of ranks with different samples.

        Groups that sum gradients, except of experts, are ``cp`` times as large.
        """
        return self.ranks // (self.tp * self.cp * self.pp)

    def size_arguments(self) -> list[str]:
        """Get Megatron's arguments for sizes above 1."""
        sizes = {
            "tensor-model": self.tp,
            "context": self.cp,
            "pipeline-model": self.pp,
            "expert-model": self.ep,
        }
        flags: list[str] = []
        for kind, size in sizes.items():
            flags += [f"--{kind}-parallel-size", str(size)] if size > 1 else []
        return flags


class Named(Protocol):
    """Something that has a name."""

    @property
    def name(self) -> str: ...


def named[R: Named](rows: Sequence[R], names: Sequence[str]) -> list[R]:
    """Get the rows with these names in table order, or all rows if there are no names.

    Raises:
        ValueError: No row has one of the names.
    """
    known = dict.fromkeys(row.name for row in rows)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no layout is called {', '.join(unknown)}; there are: {' '.join(known)}")
    return [row for row in rows if not names or row.name in names]


# ----- tables in documents: each line is a row that was run, now or before


END = "<!-- end -->"
_RULES = {"l": "---", "r": "---:"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The place of a table in a document, and the rows that it can have."""

    begin: str
    """Marker line before the table; END follows the table."""
    head: Sequence[str]
    align: str = ""
    """``l`` or ``r`` for each column; all left if empty."""
    keys: Sequence[Hashable]
    """Keys of all rows in their order."""
    key_of: Callable[[Sequence[str]], Hashable] = itemgetter(0)
    """Gets the key of a row from its cells."""

    def lines(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """Format the table with these rows as Markdown lines."""
        rule = [_RULES[letter] for letter in self.align or "l" * len(self.head)]
        return [line(self.head), f"|{'|'.join(rule)}|", *map(line, rows)]

    def put(self, document: Path, rows: Sequence[Sequence[str]], machine: str = "") -> None:
        """Write these rows into a document and keep its other rows.

        Args:
            machine: The machine that ran the rows, written above the table; empty for no such
                line.

        Raises:
            SystemExit: The document has no place for the table.
        """
        before, there, after = self._parts(document)
        known = {self.key_of(cells): cells for cells in [*there, *rows]}
        put_rows = [known[key] for key in self.keys if key in known]
        head = [f"Run on {machine}.", ""] if machine else []
        text = "\n".join(["", *head, *self.lines(put_rows), ""])
        document.write_text(f"{before}{self.begin}\n{text}\n{END}{after}", encoding="utf-8")

    def written(self, document: Path) -> dict[tuple[str, str], str]:
        """Get the cells that a document has, by the names of their column and row."""
        _, (head, *rows), _ = self._parts(document)
        return {
            (column, row[0]): text
            for row in rows
            for column, text in zip(head[1:], row[1:], strict=True)
        }

    def _parts(self, document: Path) -> tuple[str, list[list[str]], str]:
        """Get the text before the table, its cells, and the text after it."""
        before, begin, rest = document.read_text(encoding="utf-8").partition(self.begin)
        there, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"error: {document} has no place for the table ({self.begin})")
        cells = [cells_of(line) for line in there.splitlines() if line.startswith("| ")]
        return before, cells, after


def line(cells: Sequence[str]) -> str:
    """Format a row as Markdown."""
    return f"| {' | '.join(cells)} |"


def cells_of(text: str) -> list[str]:
    """Split a Markdown row into cells."""
    return [cell.strip() for cell in text.split("|")[1:-1]]


# ----- the command of a table


def parser_of(about: str, *, devices: bool = True) -> argparse.ArgumentParser:
    """Create a parser with the options that all tables have.

    Args:
        about: Description of the command.
        devices: Add options for GPUs and for concurrent cells.
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
    """Parse a command line into the chosen rows and the options.

    Exits with status 2 on bad usage.

    Args:
        arguments: None for the process's own arguments.
    """
    options = parser.parse_args(arguments)
    rows = chosen(parser, rows, options)
    refuse_missing_gpus(parser, getattr(options, "device", "cpu"))
    return rows, options


def chosen[R: Named](
    parser: argparse.ArgumentParser, rows: Sequence[R], options: argparse.Namespace
) -> list[R]:
    """Get the rows that the options name. Exits with status 2 on bad usage."""
    if getattr(options, "jobs", 1) < 1:
        parser.error(f"--jobs must be 1 or more, not {options.jobs}")
    try:
        return named(rows, options.layout)
    except ValueError as error:
        parser.error(str(error))


def refuse_missing_gpus(parser: argparse.ArgumentParser, device: str) -> None:
    """Exit with status 2 if ``--device cuda`` is given and there is no GPU."""
    if device != "cuda":
        return
    import torch

    from scripts import children

    if not children.count_gpus():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")


def machine_of(device: str) -> str:
    """Describe the machine that ran the cells."""
    if device != "cuda":
        return f"the CPU of {platform.system()} {platform.machine()}"
    import torch

    gpus = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
    return f"{gpus}, torch {torch.__version__}"


def run_table[C, O](
    name: str,
    cells: Sequence[C],
    options: argparse.Namespace,
    table: Table,
    *,
    run: Callable[[C], O],
    row: Callable[[C, O], list[str]],
    problems: Callable[[C, O], Iterable[str]],
    title: Callable[[C], str],
    failures: tuple[type[Exception], ...] = (JobFailed,),
) -> int:
    """Run the cells of a table, and print and write the row of each.

    Args:
        name: Name of the command.
        options: Options of parser_of.
        run, title, failures: See run_cells.
        row: Makes the cells of a row.
        problems: Lists failed checks.

    Returns:
        An exit status: 0 if all cells ran and passed.
    """
    with Progress(name, total=len(cells), unit="cells") as bar:

        def tell(cell: C, outcome: O) -> Iterable[str]:
            cells = row(cell, outcome)
            bar.say(line(cells), stream=sys.stdout)
            if options.markdown is not None:
                machine = machine_of(getattr(options, "device", "cpu"))
                table.put(options.markdown, [cells], machine)
            return problems(cell, outcome)

        good = run_cells(
            cells, run, tell, title=title, bar=bar, budget=options.budget, failures=failures
        )
    return 0 if good else 1


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
    """Run every cell; a failed cell does not stop the others.

    Args:
        run: Makes the runs of a cell and compares them.
        tell: Called with each outcome in cell order; prints the outcome and returns the failed
            checks.
        title: Makes a title of a cell.
        jobs: Number of concurrent cells. With 1, cells run in the calling thread.
        budget: Seconds after which no further cell starts.
        failures: Exceptions that ``run`` raises if a cell fails.

    Returns:
        Whether all cells ran and passed.
    """
    deadline = math.inf if budget is None else time.monotonic() + budget
    left: list[str] = []
    good = True

    def run_one(cell: C) -> O | None:
        return None if time.monotonic() > deadline else run(cell)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(run_one, cell) for cell in cells] if jobs > 1 else []
        for number, cell in enumerate(cells):
            bar.update(title(cell), done=number)
            try:
                outcome = running[number].result() if running else run_one(cell)
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
