"""Reads patches in git's format, and applies them in memory. Contexts must match byte for byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from byteps.patching.series import PatchError, Upstream, listed

_FILE = re.compile(rb"diff --git a/.* b/(.*)\n")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """A hunk of a patch. Lines include their line ends."""

    line: int
    """Number of the first line in the file for which the patch was made, from 1."""
    line_after: int
    """Number of the first line in the patched file."""
    before: list[bytes]
    after: list[bytes]

    def places(self, lines: list[bytes]) -> list[int]:
        """Return the numbers of lines, from 1, at which a file has the lines that this hunk
        expects. If the expected place is one of them, return only that."""
        size = len(self.before)
        firsts = range(len(lines) - size + 1)
        places = [first + 1 for first in firsts if lines[first : first + size] == self.before]
        return [self.line] if self.line in places else places

    def backwards(self) -> Hunk:
        """Return the hunk that undoes this one."""
        return Hunk(
            line=self.line_after, line_after=self.line, before=self.after, after=self.before
        )

    def why_not(self, lines: list[bytes], places: list[int]) -> str:
        """Return the reason why the hunk does not fit at exactly one place of a file."""
        if places:
            return f", fits at lines {', '.join(map(str, places))}"
        for line in self.before:
            if line.strip() and line not in lines:
                return f": the file has no line {line.decode(errors='replace').rstrip()!r}"
        return ": the file has its lines, but not next to each other"


def lines_of(content: bytes) -> list[bytes]:
    """Return the lines of a file, with their line ends."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def read_patch(patch: Path) -> dict[str, list[Hunk]]:
    """Return the hunks of a patch in git's format, by file. Raises PatchError if a hunk is
    malformed."""
    files: dict[str, list[Hunk]] = {}
    path, lines = "", lines_of(patch.read_bytes())
    while lines:
        line = lines.pop(0)
        if match := _FILE.fullmatch(line):
            path = match[1].decode(errors="replace")
            files[path] = []
        elif path and (match := _HUNK.match(line)):
            before: list[bytes] = []
            after: list[bytes] = []
            sides = {b" ": [before, after], b"-": [before], b"+": [after]}
            wanted = [int(match[2] or 1), int(match[4] or 1)]
            last: list[list[bytes]] = []
            while lines:
                mark = lines[0][:1]
                if mark == b"\\":  # the previous line has no line end
                    for side in last:
                        side[-1] = side[-1].removesuffix(b"\n")
                elif mark in sides and [len(before), len(after)] != wanted:
                    last = sides[mark]
                    for side in last:
                        side.append(lines[0][1:])
                else:
                    break
                lines.pop(0)
            first, first_after = int(match[1]), int(match[3])
            files[path].append(Hunk(line=first, line_after=first_after, before=before, after=after))
            if [len(before), len(after)] != wanted:
                raise PatchError(
                    f"{patch}: hunk {len(files[path])} of {path} has more or fewer lines than its "
                    "header says"
                )
    return files


@dataclass(kw_only=True)
class Trial:
    """Applies a series of patches in memory, and continues after failures."""

    upstream: Upstream
    base: Callable[[str], Path]
    """Function that returns, for a path, the file with its content before the series."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of the files that the patches touch, after the patches."""
    count: int = 0
    failures: list[str] = field(default_factory=list)
    """Descriptions of the hunks that do not apply: patch, file, hunk, line."""

    def report(self) -> str:
        """Return a text with the hunks that do not apply."""
        failures = listed(self.failures, "\n    ")
        return f"  {self.upstream.label} does not apply:\n    {failures}"

    def run(self, patches: Iterable[Path], *, backwards: bool = False) -> Trial:
        """Apply these patches, or undo them, in the given order; return this object."""
        for patch in patches:
            self.count += 1
            for path, hunks in read_patch(patch).items():
                where = f"{self.upstream.shown(patch)}: {path}"
                self._change(path, [h.backwards() for h in hunks] if backwards else hunks, where)
        return self

    def _change(self, path: str, hunks: list[Hunk], where: str) -> None:
        if path not in self.files and not self.base(path).is_file():
            self.failures.append(f"{where}: there is no such file")
            return
        lines = lines_of(self.files.get(path) or self.base(path).read_bytes())
        fitting = []
        for number, hunk in enumerate(hunks, start=1):
            places = hunk.places(lines)
            if len(places) == 1:
                fitting.append((places[0] - 1, hunk))
                continue
            self.failures.append(
                f"{where}: hunk {number} of {len(hunks)}, from line {hunk.line}"
                f"{hunk.why_not(lines, places)}"
            )
        for first, hunk in sorted(fitting, key=lambda pair: -pair[0]):
            lines[first : first + len(hunk.before)] = hunk.after
        self.files[path] = b"".join(lines)
