"""Which series fits a user's checkout, and where the others do not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .common import PatchError, reason_of, try_git
from .hunks import Hunk, read_hunks
from .lock import Upstream, part_of, read_series

SHOWN = 12
"""Failures of a series that are listed; the others are counted."""


@dataclass(kw_only=True)
class Trial:
    """A series as applied to copies of a checkout's files."""

    upstream: Upstream
    folder: Path
    """The copies, as the patches leave them."""
    patches: list[Path]
    touched: list[str] = field(default_factory=list)
    """Paths of the files that the patches touch, sorted."""
    failures: list[str] = field(default_factory=list)
    """What does not apply: patch, file, hunk, line."""

    def report(self) -> str:
        """The failures as lines for a user."""
        count = len(self.failures)
        listed = self.failures[:SHOWN]
        if count > SHOWN:
            listed.append(f"and {count - SHOWN} more")
        lines = "".join(f"\n    {line}" for line in listed)
        return f"  {self.upstream.label} does not apply:{lines}"


@contextmanager
def fitting_series(
    upstreams: list[Upstream], version: str, checkout: Path, parts: Collection[str]
) -> Iterator[tuple[Trial, list[Trial]]]:
    """The first series whose every hunk `checkout` has word for word, and those that failed first.

    Those that were tried with `version` come before others, and later ones of upstream.lock before
    earlier ones. Raises PatchError, which says of each series what fails, when there is none.
    """
    newest_first = upstreams[::-1]
    order = sorted(newest_first, key=lambda upstream: version not in upstream.tried)
    failed: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="patchset-target-") as temporary:
        for upstream in order:
            trial = _try(upstream, checkout, parts, Path(temporary, upstream.name))
            if not trial.failures:
                yield trial, failed
                return
            failed.append(trial)
    reports = "\n".join(trial.report() for trial in failed)
    raise PatchError(
        f"no series of patches applies to {checkout} (Megatron-LM {version}); nothing was changed"
        f"\n{reports}"
    )


def _try(upstream: Upstream, checkout: Path, parts: Collection[str], folder: Path) -> Trial:
    """Applies the series to copies in `folder`, and goes on after a failure."""
    folder.mkdir()
    named = ((patch, part_of(upstream, patch)) for patch in read_series(upstream).patches)
    patches = [patch for patch, part in named if part is None or part in parts]
    trial = Trial(upstream=upstream, folder=folder, patches=patches)
    for patch in patches:
        listed = try_git(folder, "apply", "--numstat", "-z", str(patch), env=_NOWHERE)
        if listed.returncode != 0:
            raise PatchError(f"{upstream.shown(patch)} is no patch: {reason_of(listed)}")
        entries = listed.stdout.decode().split("\0")
        for path in (entry.split("\t", 2)[2] for entry in entries if entry):
            if path in trial.touched:
                continue
            trial.touched.append(path)
            if (checkout / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / path, folder / path)
        hunks = read_hunks(patch)
        trouble = [text for hunk in hunks if (text := _trouble(hunk, hunks, folder))]
        result = try_git(folder, "apply", "--whitespace=nowarn", str(patch), env=_NOWHERE)
        if result.returncode != 0:
            trouble = trouble or [reason_of(result)]
            # What does apply: later patches may need it, and only their own failures are wanted.
            try_git(folder, "apply", "--whitespace=nowarn", "--reject", str(patch), env=_NOWHERE)
        shown = upstream.shown(patch)
        trial.failures += [f"{shown}: {text}" for text in dict.fromkeys(trouble)]
    trial.touched.sort()
    return trial


def _trouble(hunk: Hunk, hunks: list[Hunk], folder: Path) -> str | None:
    """Why `hunk` cannot be applied, or could be at more than one place; None: neither."""
    if not hunk.before:  # a file that the patch adds
        return None
    file = folder / hunk.path
    if not file.is_file():
        return f"{hunk.path}: there is no such file"
    lines = file.read_bytes().split(b"\n")
    places = hunk.places(lines)
    if len(places) == 1 or hunk.line in places:
        return None
    of = max(other.number for other in hunks if other.path == hunk.path)
    where = f"{hunk.path}: hunk {hunk.number} of {of}, from line {hunk.line}"
    if places:
        return f"{where}, fits at lines {', '.join(map(str, places))}"
    present = set(lines)
    missing = (line for line in hunk.before if line.strip() and line not in present)
    first = next(missing, None)
    if first is None:
        return f"{where}: the file has its lines, but not next to each other"
    return f"{where}: the file has no line {first.decode(errors='replace')!r}"


# git apply outside any repository: paths are relative to the folder it runs in, wherever that is.
_NOWHERE = {"GIT_DIR": os.devnull}
