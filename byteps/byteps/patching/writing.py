"""Changes to several files of a folder, made as a whole or not at all.

What will be there, and what was, is complete on the disk before a journal says so; then files are
renamed. An error takes all back; so does `recover`, after a process that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from byteps.patching.series import PatchError, is_junk

RECORD = ".megatron-byteps"
"""Folder in the changed one: what was done, and the originals of the patched files."""
_STAGED, _APPLIED, _JOURNAL = f"{RECORD}.new", "applied.json", "journal.json"


def load(root: Path) -> dict[str, Any]:
    """The record of the last change; empty: there is none. PatchError if it is damaged."""
    file = root / RECORD / _APPLIED
    try:
        record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise PatchError(f"{file} is damaged: {error}") from error
    return record


def original(root: Path, path: str) -> Path:
    """The file that was there before `path` was patched."""
    return root / RECORD / "original" / path


def change(
    root: Path,
    files: Mapping[str, bytes | Path | None],
    record: Mapping[str, Any] | None,
    originals: Mapping[str, Path],
    folders: Collection[str] = (),
) -> None:
    """Makes a change, or raises and leaves all as it was.

    Args:
        files: by path in `root`: a content, which replaces a file with the same mode and owner; a
            file that takes the place, with its own; None: the file goes.
        record: what `load` returns from then on. None: no record stays.
        originals: what `original` returns from then on, by path.
        folders: that go, if nothing but junk is in them. The innermost come last.
    """
    try:
        _stage(root, files, record, originals)
        _make(root, files, is_recorded=record is not None)
    except BaseException:
        recover(root)
        raise
    shutil.rmtree(root / _STAGED, ignore_errors=True)
    for folder in (root / path for path in reversed(list(folders))):
        # Files of interpreters and editors go with ours.
        if folder.is_dir() and all(is_junk(one.name) for one in folder.iterdir()):
            shutil.rmtree(folder)


def _stage(
    root: Path,
    files: Mapping[str, bytes | Path | None],
    record: Mapping[str, Any] | None,
    originals: Mapping[str, Path],
) -> None:
    staged = root / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    (staged / "record").mkdir(parents=True)
    for path, new in files.items():
        target, place = root / path, _place(staged / "files" / path)
        if isinstance(new, Path):
            _link(new, place)
        elif new is not None:
            place.write_bytes(new)
            if target.exists():
                place.chmod(target.stat().st_mode & 0o7777)
            _own(place, target if target.exists() else _nearest(target))
        if target.exists():
            _link(target, _place(staged / "old" / path))
    for path, source in originals.items():
        _link(source, _place(staged / "record/original" / path))
    (staged / "record/.gitignore").write_text("*\n")
    (staged / "record" / _APPLIED).write_text(json.dumps(record, indent=1) + "\n")
    for one in (staged / "record", *(staged / "record").rglob("*")):
        if one.is_dir() or one.parent == staged / "record":
            _own(one, root)


def _make(root: Path, files: Collection[str], *, is_recorded: bool) -> None:
    staged = root / _STAGED
    (staged / "journal").write_text(json.dumps(list(files)))
    (staged / "journal").rename(staged / _JOURNAL)
    for path in files:
        if (staged / "files" / path).exists():
            _make_folder((root / path).parent)
            (staged / "files" / path).replace(root / path)
        else:
            (root / path).unlink(missing_ok=True)
    if (root / RECORD).exists():
        (root / RECORD).rename(staged / "old-record")
    if is_recorded:
        (staged / "record").rename(root / RECORD)
    (staged / _JOURNAL).unlink()


def is_interrupted(root: Path) -> bool:
    """Whether a process was killed amid a change."""
    return (root / _STAGED / _JOURNAL).is_file()


def recover(root: Path) -> None:
    """Takes back a change that was interrupted."""
    staged = root / _STAGED
    if not is_interrupted(root):
        return shutil.rmtree(staged, ignore_errors=True)
    for path in json.loads((staged / _JOURNAL).read_text()):
        if (staged / "old" / path).exists():
            (staged / "old" / path).replace(root / path)
        elif not (root / path).is_dir():
            (root / path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folders that are empty now
                for folder in (root / path).parents:
                    folder.rmdir()
    if (staged / "old-record").exists():
        shutil.rmtree(root / RECORD, ignore_errors=True)
        (staged / "old-record").rename(root / RECORD)
    elif not (staged / "record").exists():
        shutil.rmtree(root / RECORD, ignore_errors=True)
    shutil.rmtree(staged)


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _link(source: Path, place: Path) -> None:
    """Another name for a file: it keeps mode, owner and times. A copy, where there are no links."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
        _own(place, source)


def _own(path: Path, like: Path) -> None:
    wanted, now = like.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, wanted.st_uid, wanted.st_gid)


def _nearest(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    return next(parent for parent in path.parents if parent.is_dir())


def _make_folder(folder: Path) -> None:
    for one in reversed([one for one in (folder, *folder.parents) if not one.is_dir()]):
        one.mkdir()
        _own(one, one.parent)
