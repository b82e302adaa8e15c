"""The Megatron overlay, and the series that fits, on a user's own checkout, and their removal."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .lock import (
    NOWHERE,
    PatchError,
    Upstream,
    fingerprint,
    is_junk,
    overlay_files,
    part_of,
    paths_of,
    read_series,
    reason_of,
    say,
    sha256_file,
    try_git,
    warn,
)

SHOWN = 12
"""Failures of a series that are listed; the others are counted."""


_FILE = re.compile(rb"diff --git a/(?P<old>.*) b/(?P<new>.*)\n?")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk of a file."""

    path: str
    number: int
    """Among the hunks of its file, from 1."""
    line: int
    """Its first line in the file that the patch was made for, from 1."""
    body: tuple[bytes, ...]
    """Its lines, each with its mark: a blank, + or -."""

    @property
    def before(self) -> list[bytes]:
        """The lines that it expects to find."""
        return [line[1:] for line in self.body if line[:1] in b" -"]

    def places(self, lines: list[bytes]) -> list[int]:
        """Finds the lines that this hunk expects in `lines`: numbers of lines, from 1.

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
            hunk = Hunk(path=path, number=number, line=int(match[1]), body=tuple(body))
            found.append(hunk)
    return found


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
        for path in paths_of(upstream, patch):
            if path in trial.touched:
                continue
            trial.touched.append(path)
            if (checkout / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / path, folder / path)
        hunks = read_hunks(patch)
        trouble = [text for hunk in hunks if (text := _trouble(hunk, hunks, folder))]
        result = try_git(folder, "apply", "--whitespace=nowarn", str(patch), env=NOWHERE)
        if result.returncode != 0:
            trouble = trouble or [reason_of(result)]
            # What does apply: later patches may need it, and only their own failures are wanted.
            try_git(folder, "apply", "--whitespace=nowarn", "--reject", str(patch), env=NOWHERE)
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


RECORD = ".megatron-byteps"
"""Folder in the checkout: what was done, and the originals of the patched files."""


def read_version(upstream: Upstream, checkout: Path) -> str:
    """The version a checkout states, such as 0.19.2 or 0.20.0rc1; PatchError if it has none."""
    file = checkout / upstream.version_file
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError(f"{checkout} is no Megatron-LM checkout: no {file}") from error
    fields = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?(\w*)", text, re.M))
    if not {"MAJOR", "MINOR", "PATCH"} <= set(fields):
        raise PatchError(f"{file} states no version")
    return "{MAJOR}.{MINOR}.{PATCH}".format(**fields) + fields.get("PRE_RELEASE", "")


def apply(upstreams: list[Upstream], checkout: Path, parts: Collection[str] = ()) -> None:
    """Applies overlay and series of the upstream that fits to the working tree of `checkout`, all
    or nothing.

    Of what belongs to a part, only that of `parts`. Git's index and history are left alone. Raises
    PatchError, changing nothing, where no series applies, or for a file in an overlay file's place.
    """
    record = _load(checkout)
    if record:
        known = {fingerprint(upstream) for upstream in upstreams}
        if record["fingerprint"] not in known or record.get("parts", []) != sorted(parts):
            raise PatchError(
                f"{checkout} carries another state of the series, or other parts of it: undo it "
                "first with --reverse"
            )
        _demand_patches(checkout, record)
        changed = _changed(checkout, record["files"])
        note = f"; changed since: {', '.join(changed)}" if changed else ""
        say(f"{checkout}: applied already{note}")
        return
    version = read_version(upstreams[0], checkout)
    with fitting_series(upstreams, version, checkout, parts) as (trial, failed):
        count = _write(trial, checkout, parts)
    upstream = trial.upstream
    if version not in upstream.tried:
        reports = "".join(f"\n{other.report()}" for other in failed)
        warn(
            f"the series for {upstream.label} applies, and was never tried with Megatron-LM "
            f"{version}{reports}"
        )
    say(
        f"{checkout}: Megatron-LM {version}, series for {upstream.label}: added {count} files, "
        f"patched {len(trial.touched)} ({len(trial.patches)} patches); undo with --reverse"
    )


def _demand_patches(checkout: Path, record: dict) -> None:
    """Raises PatchError where patched or added files are as they were before, or gone: as after
    `git checkout`, `git stash` or `git clean`. What else was changed is the user's."""
    lost = []
    for path, hashes in record["files"].items():
        file = checkout / path
        actual = sha256_file(file) if file.is_file() else None
        if actual == hashes["before"] != hashes["after"]:
            lost.append(path)
    if not lost:
        return
    shown = ", ".join(lost[:SHOWN]) + (f" and {len(lost) - SHOWN} more" if lost[SHOWN:] else "")
    raise PatchError(
        f"{checkout} was patched, and {len(lost)} of {len(record['files'])} files are as they were "
        f"before (git checkout, stash or clean?): {shown}. Undo the rest with --reverse, then "
        "apply again"
    )


def _write(trial: Trial, checkout: Path, parts: Collection[str]) -> int:
    """Writes overlay and patched files into `checkout`; returns how many files were added."""
    upstream, aside, touched = trial.upstream, trial.folder, trial.touched
    left_out = {
        path for part, paths in upstream.parts.items() if part not in parts for path in paths
    }
    overlay = {p: s for p, s in overlay_files(upstream).items() if p not in left_out}
    for relative, source in overlay.items():
        if os.path.lexists(checkout / relative):
            raise PatchError(
                f"overlay file {upstream.shown(source)} would overwrite {checkout / relative}"
            )
    folders = _missing_folders(checkout, [*overlay, *touched])
    contents = {path: aside / path for path in touched if (aside / path).is_file()} | overlay
    files = {
        path: {
            "before": sha256_file(checkout / path) if (checkout / path).is_file() else None,
            "after": sha256_file(contents[path]) if path in contents else None,
        }
        for path in sorted({*touched, *overlay})
    }
    # The record goes first: whatever interrupts what follows, --reverse knows the originals.
    for path in touched:
        if (checkout / path).is_file():
            kept = checkout / RECORD / "original" / path
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / path, kept)
    (checkout / RECORD).mkdir(exist_ok=True)
    (checkout / RECORD / ".gitignore").write_text("*\n", encoding="utf-8")
    _save(
        checkout,
        {
            "fingerprint": fingerprint(upstream),
            "series": upstream.label,
            "parts": sorted(parts),
            "files": files,
            "folders": folders,
        },
    )
    for path in files:
        if path in contents:
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(contents[path], checkout / path)
        else:
            (checkout / path).unlink()
    return len(overlay)


def reverse(upstream: Upstream, checkout: Path) -> None:
    """Undoes `apply`; PatchError, changing nothing, when a file was changed meanwhile."""
    record = _load(checkout)
    if not record:
        read_version(upstream, checkout)
        say(f"{checkout}: not applied, nothing to undo")
        return
    files = record["files"]
    changed = _changed(checkout, files)
    if changed:
        raise PatchError(
            f"changed since the patches were applied: {', '.join(changed)}. Take the changes out "
            f"(the originals are in {checkout / RECORD}/original), then try again"
        )
    for path, hashes in files.items():
        if hashes["before"] is None:
            (checkout / path).unlink(missing_ok=True)
        else:
            shutil.copy2(checkout / RECORD / "original" / path, checkout / path)
    for folder in reversed(record["folders"]):
        _remove_if_empty(checkout / folder)
    shutil.rmtree(checkout / RECORD)
    say(f"{checkout}: undone; {len(files)} files are as they were")


def _missing_folders(checkout: Path, paths: list[str]) -> list[str]:
    """Folders that writing `paths` creates, parents first."""
    parents = {parent for path in paths for parent in Path(path).parents}
    missing = [parent for parent in parents if not (checkout / parent).exists()]
    return sorted((folder.as_posix() for folder in missing), key=lambda name: (len(name), name))


def _remove_if_empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name == "__pycache__" and path.is_dir():
            shutil.rmtree(path)
    if all(is_junk(path.name) for path in folder.iterdir()):
        shutil.rmtree(folder)


def _changed(checkout: Path, files: dict[str, dict[str, str | None]]) -> list[str]:
    """Files that are neither as applied nor (after an interrupted run) as they were before."""
    changed = []
    for path, hashes in files.items():
        file = checkout / path
        actual = sha256_file(file) if file.is_file() else None
        if actual not in (hashes["after"], hashes["before"]):
            changed.append(path)
    return changed


def _load(checkout: Path) -> dict | None:
    file = checkout / RECORD / "applied.json"
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PatchError(f"{file} is damaged: {error}") from error


def _save(checkout: Path, record: dict) -> None:
    text = json.dumps(record, indent=1) + "\n"
    (checkout / RECORD / "applied.json").write_text(text, encoding="utf-8")
