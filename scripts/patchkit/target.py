"""The Megatron overlay, and the series that fits, on a user's own checkout, and their removal.

It needs no git: a checkout may be an unpacked archive, or an installed package.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from scripts.patchkit.series import (
    Hunk,
    PatchError,
    Upstream,
    hash_of,
    is_junk,
    lines_of,
    listed,
    part_of,
    read_patch,
    read_series,
    say,
    warn,
)

RECORD = ".megatron-byteps"
"""Folder in the checkout: what was done, and the originals of the patched files."""


@dataclass(kw_only=True)
class Trial:
    """A series as applied to a checkout's files in memory, past failures."""

    upstream: Upstream
    files: dict[str, bytes] = field(default_factory=dict)
    """The files that the patches touch, as they leave them."""
    count: int = 0
    failures: list[str] = field(default_factory=list)
    """Hunks that do not apply: patch, file, hunk, line."""

    def report(self) -> str:
        failures = listed(self.failures, "\n    ")
        return f"  {self.upstream.label} does not apply:\n    {failures}"

    def apply(self, patch: Path, checkout: Path) -> None:
        self.count += 1
        for path, hunks in read_patch(patch).items():
            where = f"{self.upstream.shown(patch)}: {path}"
            if path not in self.files and not (checkout / path).is_file():
                self.failures.append(f"{where}: there is no such file")
                continue
            lines = lines_of(self.files.get(path) or (checkout / path).read_bytes())
            fitting = []
            for number, hunk in enumerate(hunks, start=1):
                places = hunk.places(lines)
                if len(places) == 1:
                    fitting.append((places[0] - 1, hunk))
                    continue
                reason = _reason(hunk, lines, places)
                self.failures.append(
                    f"{where}: hunk {number} of {len(hunks)}, from line {hunk.line}{reason}"
                )
            for first, hunk in sorted(fitting, key=lambda pair: -pair[0]):
                lines[first : first + len(hunk.before)] = hunk.after
            self.files[path] = b"".join(lines)


def _reason(hunk: Hunk, lines: list[bytes], places: list[int]) -> str:
    if places:
        return f", fits at lines {', '.join(map(str, places))}"
    for line in hunk.before:
        if line.strip() and line not in lines:
            return f": the file has no line {line.decode(errors='replace').rstrip()!r}"
    return ": the file has its lines, but not next to each other"


# ---- a user's checkout


def read_version(upstream: Upstream, checkout: Path) -> str:
    """The version a checkout states, such as 0.19.2 or 0.20.0rc1; PatchError if it has none."""
    file = checkout / upstream.version_file
    if not file.is_file():
        raise PatchError(f"{checkout} is no Megatron-LM checkout: no {file}")
    text = file.read_text(encoding="utf-8")
    fields = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?(\w*)", text, re.M))
    if not {"MAJOR", "MINOR", "PATCH"} <= set(fields):
        raise PatchError(f"{file} states no version")
    return "{MAJOR}.{MINOR}.{PATCH}".format(**fields) + fields.get("PRE_RELEASE", "")


def apply(upstreams: list[Upstream], checkout: Path, parts: Collection[str] = ()) -> None:
    """Applies overlay and series of the upstream that fits to `checkout`, all or nothing.

    Takes the first series whose every hunk the checkout has word for word: those that were tried
    with its version first, then the newest. Of the parts only `parts`. PatchError, changing
    nothing, where no series applies, or for a file in an overlay file's place.
    """
    if record := _load(checkout):
        _check_record(checkout, record, {one.fingerprint() for one in upstreams}, sorted(parts))
        return
    version = read_version(upstreams[0], checkout)
    failed: list[Trial] = []
    newest_first = upstreams[::-1]
    for upstream in sorted(newest_first, key=lambda one: version not in one.tried):
        trial = Trial(upstream=upstream)
        for patch in read_series(upstream).patches:
            if part_of(upstream, patch) in (None, *parts):
                trial.apply(patch, checkout)
        if not trial.failures:
            break
        failed.append(trial)
    reports = "".join(f"\n{trial.report()}" for trial in failed)
    if trial.failures:
        raise PatchError(
            f"no series of patches applies to {checkout} (Megatron-LM {version}); nothing was "
            f"changed{reports}"
        )
    added = _write(trial, checkout, parts)
    if version not in upstream.tried:
        warn(
            f"the series for {upstream.label} applies, and was never tried with Megatron-LM "
            f"{version}{reports}"
        )
    say(
        f"{checkout}: Megatron-LM {version}, series for {upstream.label}: added {added} files, "
        f"patched {len(trial.files)} ({trial.count} patches); undo with --reverse"
    )


def _check_record(checkout: Path, record: dict, known: set[str], parts: list[str]) -> None:
    """Says that `checkout` is patched already; PatchError unless it still is, and alike."""
    if record["fingerprint"] not in known or record.get("parts", []) != parts:
        raise PatchError(
            f"{checkout} carries another state of the series, or other parts of it: undo it first "
            "with --reverse"
        )
    files = record["files"]
    now = {path: hash_of(checkout / path) for path in files}
    # A checkout after git checkout, stash or clean has these. Other changes are the user's.
    lost = [path for path, one in files.items() if now[path] == one["before"] != one["after"]]
    if lost:
        raise PatchError(
            f"{checkout} was patched, and {len(lost)} of {len(files)} files are as they were "
            f"before (git checkout, stash or clean?): {listed(lost)}. Undo the rest with "
            "--reverse, then apply again"
        )
    changed = [path for path, hashes in files.items() if now[path] != hashes["after"]]
    note = f"; changed since: {listed(changed)}" if changed else ""
    say(f"{checkout}: applied already{note}")


def _write(trial: Trial, checkout: Path, parts: Collection[str]) -> int:
    """Writes overlay and patched files into `checkout`; returns how many files were added."""
    upstream = trial.upstream
    left_out = {path for part in set(upstream.parts) - set(parts) for path in upstream.parts[part]}
    overlay = {p: file for p, file in upstream.overlay_files().items() if p not in left_out}
    for path, source in overlay.items():
        if os.path.lexists(checkout / path):
            raise PatchError(
                f"overlay file {upstream.shown(source)} would overwrite {checkout / path}"
            )
    contents = trial.files | {path: source.read_bytes() for path, source in overlay.items()}
    parents = {parent for path in contents for parent in Path(path).parents}
    missing = [parent.as_posix() for parent in parents if not (checkout / parent).exists()]
    record = {
        "fingerprint": upstream.fingerprint(),
        "series": upstream.label,
        "parts": sorted(parts),
        "files": {
            path: {"before": hash_of(checkout / path), "after": hashlib.sha256(new).hexdigest()}
            for path, new in sorted(contents.items())
        },
        "folders": sorted(missing, key=len),
    }
    # The record goes first: whatever interrupts what follows, --reverse knows the originals.
    for path in trial.files:
        kept = checkout / RECORD / "original" / path
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkout / path, kept)
    (checkout / RECORD).mkdir(exist_ok=True)
    (checkout / RECORD / ".gitignore").write_text("*\n", encoding="utf-8")
    text = json.dumps(record, indent=1) + "\n"
    (checkout / RECORD / "applied.json").write_text(text, encoding="utf-8")
    for path, new in contents.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_bytes(new)
        if path in overlay:
            shutil.copymode(overlay[path], checkout / path)
    return len(overlay)


def reverse(upstream: Upstream, checkout: Path) -> None:
    """Undoes `apply`; PatchError, changing nothing, when a file was changed meanwhile."""
    record = _load(checkout)
    if not record:
        read_version(upstream, checkout)
        say(f"{checkout}: not applied, nothing to undo")
        return
    files = record["files"]
    changed = [path for path, one in files.items() if hash_of(checkout / path) not in one.values()]
    if changed:
        raise PatchError(
            f"changed since the patches were applied: {listed(changed)}. Take the changes out (the "
            f"originals are in {checkout / RECORD}/original), then try again"
        )
    for path, hashes in files.items():
        if hashes["before"] is None:
            (checkout / path).unlink(missing_ok=True)
        else:
            shutil.copy2(checkout / RECORD / "original" / path, checkout / path)
    for folder in (checkout / one for one in reversed(record["folders"])):
        # Files of interpreters and editors go with ours.
        if folder.is_dir() and all(is_junk(path.name) for path in folder.iterdir()):
            shutil.rmtree(folder)
    shutil.rmtree(checkout / RECORD)
    say(f"{checkout}: undone; {len(files)} files are as they were")


def _load(checkout: Path) -> dict | None:
    file = checkout / RECORD / "applied.json"
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise PatchError(f"{file} is damaged: {error}") from error
