"""Applies the Megatron overlay and the fitting series of patches to a user's Megatron, and undoes
this."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from byteps.patching import writing
from byteps.patching.hunks import Trial, lines_of
from byteps.patching.series import (
    PatchError,
    Upstream,
    hash_of,
    home,
    listed,
    load_lock,
    part_of,
    read_series,
    say,
    warn,
)

PATCHED, PLAIN, EDITED = "patched", "plain", "edited since"


def installed() -> Path:
    """Return the folder of the megatron-core that this Python imports. Raises PatchError without
    one."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if not spec or not spec.submodule_search_locations:
        raise PatchError("this Python has no megatron-core: name the folder of a checkout")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    """A Megatron that can be patched: a checkout, a plain folder, or an installed package.

    The files themselves say whether they are patched. `apply` writes a record with the original
    files, and with hashes to compare with.
    """

    root: Path
    upstreams: tuple[Upstream, ...]
    """Upstreams with a series for Megatron, oldest first."""

    @classmethod
    def of(cls, root: Path | None = None, source: Path | None = None) -> Target:
        """Return the Megatron in a folder; None: the installed megatron-core.

        Args:
            source: folder with upstream.lock; None: `home()`.
        """
        upstreams = [upstream for upstream in load_lock(source or home()) if upstream.version_file]
        return cls(root.resolve() if root else installed(), tuple(upstreams))

    @cached_property
    def version(self) -> str:
        """Version of this Megatron, such as 0.19.2 or 0.20.0rc1. Raises PatchError if its files
        have none."""
        file = self.root / self.upstreams[0].version_file
        if not file.is_file():
            raise PatchError(f"{self.root} is no Megatron-LM checkout: no {file}")
        pattern = r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?(\w*)"
        fields = dict(re.findall(pattern, file.read_text(encoding="utf-8"), re.M))
        if not {"MAJOR", "MINOR", "PATCH"} <= set(fields):
            raise PatchError(f"{file} states no version")
        return "{MAJOR}.{MINOR}.{PATCH}".format(**fields) + fields.get("PRE_RELEASE", "")

    def states(self, record: dict[str, Any]) -> dict[str, list[str]]:
        """Return the files of a record by their present state.

        A file is PLAIN if it has none of the patches' lines, because git or pip has replaced it.
        """
        paths: dict[str, list[str]] = {PATCHED: [], PLAIN: [], EDITED: []}
        for path, was in record.get("files", {}).items():
            now = hash_of(self.root / path)
            if now == was["after"]:
                state = PATCHED
            elif now in (was["before"], None):
                state = PLAIN
            else:
                lines = set(lines_of((self.root / path).read_bytes()))
                ours = {line.encode() for line in was["added"]}
                state = EDITED if was["before"] is None or lines & ours else PLAIN
            paths[state].append(path)
        return paths

    def apply(self, parts: Collection[str] = ()) -> None:
        """Apply the overlay and the series that fits: all files or none.

        Uses the first series of which every hunk fits exactly. Series that were tested with this
        version are tried first, then the newest. If another version of the patches is applied, the
        original files are restored first. Optional parts are left out unless `parts` names them.
        Raises PatchError, and changes nothing, if no series fits, a patched file was edited, or a
        file has the path of an overlay file.
        """
        writing.recover(self.root)
        version, parts, record = self.version, sorted(parts), writing.load(self.root)
        states = self.states(record)
        if self._is_known(record) and record["parts"] == parts and not states[PLAIN]:
            edited = f"; changed since: {listed(states[EDITED])}" if states[EDITED] else ""
            return say(f"{self.root}: applied already{edited}")
        self._demand_unedited(states)
        ours, failed = set(states[PATCHED]), []

        def base(path: str) -> Path:
            return writing.original(self.root, path) if path in ours else self.root / path

        newest_first = list(self.upstreams[::-1])
        for upstream in sorted(newest_first, key=lambda upstream: version not in upstream.tried):
            trial = Trial(upstream=upstream, base=base).run(_patches(upstream, parts))
            if not trial.failures:
                break
            failed.append(trial)
        reports = "".join(f"\n{trial.report()}" for trial in failed)
        if trial.failures:
            if applied := self._applied_elsewhere():
                return say(f"{self.root}: applied already (series for {applied.label})")
            raise PatchError(
                f"no series of patches applies to {self.root} (Megatron-LM {version}); nothing was "
                f"changed{reports}"
            )
        files: dict[str, bytes | Path | None] = {**trial.files}
        for path, source in _overlay(upstream, parts).items():
            if os.path.lexists(base(path)):
                raise PatchError(
                    f"overlay file {upstream.shown(source)} would overwrite {self.root / path}"
                )
            files[path] = source.read_bytes()
        if links := [path for path in files if (self.root / path).is_symlink()]:
            raise PatchError(f"{self.root / links[0]} is a symbolic link: patch where it leads")
        parents = {parent for path in files for parent in Path(path).parents}
        folders = {parent.as_posix() for parent in parents if not (self.root / parent).exists()}
        if record:
            folders |= set(record["folders"])
            gone = ours - set(files)
            files |= {path: base(path) if base(path).exists() else None for path in gone}
        new_record = {
            "fingerprint": upstream.fingerprint(),
            "series": upstream.label,
            "parts": parts,
            "files": {
                path: _entry(base(path), new)
                for path, new in sorted(files.items())
                if isinstance(new, bytes)
            },
            "folders": sorted(folders, key=len),
        }
        writing.change(self.root, files, new_record, {path: base(path) for path in trial.files})
        if version not in upstream.tried:
            warn(
                f"the series for {upstream.label} applies, and was never tried with Megatron-LM "
                f"{version}{reports}"
            )
        say(
            f"{self.root}: Megatron-LM {version}, series for {upstream.label}: added "
            f"{len(new_record['files']) - len(trial.files)} files, patched {len(trial.files)} "
            f"({trial.count} patches); undo with 'megatron-byteps unpatch'"
        )

    def reverse(self) -> None:
        """Undo `apply`. Raises PatchError, and changes nothing, if a patched file was edited."""
        writing.recover(self.root)
        record = writing.load(self.root)
        if not record:
            if self.version and self._applied_elsewhere():
                raise PatchError(
                    f"{self.root} has the patches, but not the original files: it is a copy of a "
                    "patched folder. Undo the patches in that folder, or with git"
                )
            return say(f"{self.root}: not applied, nothing to undo")
        states = self.states(record)
        self._demand_unedited(states)
        originals = {path: writing.original(self.root, path) for path in states[PATCHED]}
        back = {path: file if file.exists() else None for path, file in originals.items()}
        writing.change(self.root, back, None, {}, record["folders"])
        rest = f"; {len(states[PLAIN])} others were" if states[PLAIN] else ""
        say(f"{self.root}: undone; {len(back)} files are as they were{rest}")

    def status(self) -> bool:
        """Print the state of the files. Return whether they are patched by this version of
        byteps."""
        record, about = writing.load(self.root), f"{self.root}: Megatron-LM {self.version}"
        if writing.is_interrupted(self.root):
            say(f"{about}: a change was interrupted; 'patch' or 'unpatch' takes it back first")
            return False
        if not record:
            applied = self._applied_elsewhere()
            say(f"{about}: {f'patched, series for {applied.label}' if applied else 'not patched'}")
            return bool(applied)
        states = self.states(record)
        say(f"{about}: {len(states[PATCHED])} files as the series for {record['series']} has them")
        if states[EDITED]:
            say(f"  changed since: {listed(states[EDITED])}")
        if states[PLAIN]:
            say(
                f"  without the patches: {listed(states[PLAIN])} (git, or an upgrade of "
                "megatron-core, has put others there): 'patch' patches them"
            )
        if not self._is_known(record):
            say("  by another version of byteps: 'patch' brings it to this one's")
        return self._is_known(record) and not states[PLAIN]

    def _demand_unedited(self, states: dict[str, list[str]]) -> None:
        if states[EDITED]:
            raise PatchError(
                f"changed since the patches were applied: {listed(states[EDITED])}. Take the "
                f"changes out (the originals are in {writing.original(self.root, '')}), then try "
                "again"
            )

    def _is_known(self, record: dict[str, Any]) -> bool:
        return record.get("fingerprint") in {upstream.fingerprint() for upstream in self.upstreams}

    def _applied_elsewhere(self) -> Upstream | None:
        """Return the upstream whose series is applied, if there is no record of it, as in a clone;
        or None."""
        for upstream in self.upstreams[::-1]:
            for parts in (list(upstream.parts), []):
                overlay, patches = _overlay(upstream, parts), _patches(upstream, parts)
                if all(
                    hash_of(self.root / path) == hash_of(content)
                    for path, content in overlay.items()
                ):
                    trial = Trial(upstream=upstream, base=lambda path: self.root / path)
                    if not trial.run(patches[::-1], backwards=True).failures:
                        return upstream
        return None


def _entry(base: Path, new: bytes) -> dict[str, Any]:
    """Return the record's entry for a file."""
    old = lines_of(base.read_bytes()) if base.is_file() else []
    added = [line for line in lines_of(new) if old and line.strip() and line not in old]
    return {
        "before": hash_of(base),
        "after": hashlib.sha256(new).hexdigest(),
        "added": [line.decode(errors="replace") for line in added],
    }


def _patches(upstream: Upstream, parts: Collection[str]) -> list[Path]:
    return [
        patch
        for patch in read_series(upstream).patches
        if part_of(upstream, patch) in (None, *parts)
    ]


def _overlay(upstream: Upstream, parts: Collection[str]) -> dict[str, Path]:
    left_out = {path for part in set(upstream.parts) - set(parts) for path in upstream.parts[part]}
    return {path: file for path, file in upstream.overlay_files().items() if path not in left_out}
