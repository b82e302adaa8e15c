#!/usr/bin/env python3
"""Trains the arguments of Megatron's functional tests through BytePS and through all-reduce.

Each test runs in a small form on this machine's CPU, for a few steps, with a process per rank. The
losses, gradient norms, reduced gradients and final parameters of both runs must be equal to the
last bit on every rank. docs/results/recipes.md explains the changes to the tests, and has the
tables that --markdown writes.

Without --megatron, the rows of tests/layouts/functional/rows.py run. With it, all tests of a
checkout run that a CPU can run, and the rows are compared with them.

Exit status: 0 success; 1 a difference, or a failed rank, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.layouts.functional.arguments import Case

# This is the only import of the project here, because every rank imports this file.
from tests.layouts.functional.rows import CASES


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.layouts.functional.arguments import (
        cases_of,
        check,
        listing,
        put,
        put_others,
        strange,
    )
    from tests.layouts.gpt.layout import Report
    from tests.layouts.gpt.runs import PROGRAM, run_reports
    from tests.layouts.job import start_fork_server
    from tests.layouts.table import named, parser_of

    parser = parser_of(__doc__, devices=False)
    parser.add_argument("--megatron", type=Path, metavar="CHECKOUT", help="of Megatron-LM")
    parser.add_argument("--list", action="store_true", help="show what there is to run and stop")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    options = parser.parse_args(arguments)
    cases: Sequence[Case] = CASES
    cannot: dict[str, str] = {}
    beyond: list[str] = []
    if options.markdown is not None and options.megatron is None:
        parser.error("--markdown needs --megatron: the table is of all tests of a checkout")
    try:
        if options.megatron is not None:
            cases, cannot = cases_of(options.megatron)
            beyond = strange(CASES, cases)
        chosen = named(cases, options.layout)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print(listing(chosen, cannot))
        return 0

    for problem in beyond:
        print(f"functional: {problem}", file=sys.stderr)
    if options.markdown is not None:
        put_others(options.markdown, cannot)

    def put_row(case: Case, report: Report) -> None:
        if options.markdown is not None:
            put(options.markdown, report, case, cases)

    start_fork_server(["tests.layouts.warm", PROGRAM.partition(":")[0]])
    with tempfile.TemporaryDirectory(prefix="functional-") as scratch:
        folder = options.keep or Path(scratch)
        good, _ = run_reports("functional", chosen, folder, options, check, put_row)
    return 0 if good and not beyond else 1


if __name__ == "__main__":
    sys.exit(main())
