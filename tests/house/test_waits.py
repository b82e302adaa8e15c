"""A comment at each wait names its end and its deadline (docs/design/reliability.md, rule 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = REPOSITORY / "byteps/byteps"
OVERLAY = REPOSITORY / "Megatron-LM"
WAIT_IN_CPP = re.compile(
    r"\b\w*(cond|written|sent|ended|began|failed_job|empty)_\.Wait(For|Until)?\("
    r"|\b(poll|epoll_wait|ppoll)\(\w"
    r"|thread\w*(\.|->)join\(\)"
    r"|\bsleep_(for|until)\("
)
"""Conditions, sockets, threads and pauses."""
WAIT_IN_PYTHON = re.compile(
    r"\b_?(process|started|ended|endings|thread|scheduler|store|condition|queue)\.(wait|join)\("
    r"|queue\.get\("
)
"""Words of waits for processes, threads, stores and queues. The engine is not searched: it waits
for sums by rules of its own."""
SAYS = re.compile(r"\b[Ee]nded by .+; deadline: \w")
LINES_ABOVE = 4
"""Number of lines above a wait in which its comment may end. A call may take several lines."""


def unexplained(source: str, wait: re.Pattern[str]) -> Iterator[int]:
    """Get the numbers of lines that wait without such a comment."""
    lines = source.splitlines()
    for index, line in enumerate(lines):
        if not wait.search(line) or re.match(r"\s*(//|#|\")", line):
            continue
        near = lines[max(0, index - LINES_ABOVE) : index + 1]
        if not SAYS.search(" ".join(re.sub(r"^\s*(//|#)", "", text) for text in near)):
            yield index + 1


def sources() -> list[tuple[Path, re.Pattern[str]]]:
    searched = [
        (path, WAIT_IN_CPP)
        for path in sorted(CODE.rglob("*"))
        # Files that define what waits are made of, and the tests' fake GPU.
        if path.suffix in (".h", ".cc") and path.name not in ("mutex.h", "fake.cc")
    ]
    for folder in (CODE, OVERLAY):
        searched += [(path, WAIT_IN_PYTHON) for path in sorted(folder.rglob("*.py"))]
    return searched


def test_each_wait_says_what_ends_it_and_when() -> None:
    silent = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path, wait in sources()
        for line in unexplained(path.read_text(encoding="utf-8"), wait)
    ]
    assert not silent, "no `Ended by ...; deadline: ...` at\n" + "\n".join(silent)
