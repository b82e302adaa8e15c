"""The hunks of a patch: what they expect to find, and where a file has it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(rb"diff --git a/(?P<old>.*) b/(?P<new>.*)\n?")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk of a file."""

    path: str
    number: int
    """Among the hunks of its file, from 1."""
    line: int
    """Where it begins in the file that the patch was made for, from 1."""
    counts: tuple[int, int]
    """Lines before and after, as its header says."""
    body: tuple[bytes, ...]
    """Its lines, each with its mark: a blank, + or -."""

    @property
    def before(self) -> list[bytes]:
        """The lines that it expects to find."""
        return [line[1:] for line in self.body if line[:1] in b" -"]

    def places(self, lines: list[bytes]) -> list[int]:
        """Where `lines` has the lines that this hunk expects: numbers of lines, from 1.

        As for git, a hunk of the first line fits nowhere else, and one without a line after its
        last change only at the end.
        """
        before = self.before
        found = [
            first + 1
            for first in range(len(lines) - len(before) + 1)
            if lines[first] == before[0] and lines[first : first + len(before)] == before
        ]
        if self.line <= 1:
            found = [place for place in found if place == 1]
        if self.body[-1][:1] != b" ":
            end = len(lines) - (lines[-1] == b"")
            found = [place for place in found if place - 1 + len(before) == end]
        return found


def read_hunks(patch: Path) -> list[Hunk]:
    """The hunks of a patch in git's format, in its order; of binary files there are none."""
    found: list[Hunk] = []
    path, number = "", 0
    lines = patch.read_bytes().split(b"\n")
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if match := _FILE.fullmatch(line):
            path, number = match["new"].decode(errors="replace"), 0
        elif path and (match := _HUNK.match(line)):
            old, new = (int(count) if count else 1 for count in match.group(2, 4))
            body: list[bytes] = []
            seen = [0, 0]
            while position < len(lines) and seen != [old, new]:
                mark = lines[position][:1]
                if mark not in (b" ", b"+", b"-", b"\\"):
                    break
                seen[0] += mark in (b" ", b"-")
                seen[1] += mark in (b" ", b"+")
                if mark != b"\\":  # of a last line without an end
                    body.append(lines[position])
                position += 1
            number += 1
            found.append(
                Hunk(
                    path=path,
                    number=number,
                    line=int(match[1]),
                    counts=(old, new),
                    body=tuple(body),
                )
            )
    return found
