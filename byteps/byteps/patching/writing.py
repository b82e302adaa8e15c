"""Changes several files of a folder: all of them or none.

The new files and the old files are completely on the disk before a journal is written. Then the
files are renamed to their places. After an error, the old files are restored. If the process was
killed, `recover` restores them. The files of the record change in the same way.
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
"""Subfolder of the changed folder. It has the record of the change, and the originals of the
patched files."""
_STAGED, _APPLIED, _JOURNAL = f"{RECORD}.new", f"{RECORD}/applied.json", "journal.json"


def load(root: Path) -> dict[str, Any]:
    """Return the record of the last change; empty: there is none. Raises PatchError if it is
    damaged."""
    file = root / _APPLIED
    try:
        record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise PatchError(f"{file} is damaged: {error}") from error
    return record


def original(root: Path, path: str) -> Path:
    """Return the original of the patched file `path`."""
    return root / RECORD / "original" / path


def change(
    root: Path,
    files: Mapping[str, bytes | Path | None],
    record: Mapping[str, Any] | None,
    originals: Mapping[str, Path],
    folders: Collection[str] = (),
) -> None:
    """Make a change; on an error, restore everything and raise it.

    Args:
        files: changes by path in `root`. A content replaces the file and keeps its mode and owner.
            A Path replaces the file, and brings its own mode and owner. None removes the file.
        record: record that `load` returns afterwards. None: no record is kept.
        originals: files that `original` returns afterwards, by path.
        folders: folders to remove if they contain only junk; the innermost last.
    """
    records = (path for path in (root / RECORD).rglob("*") if path.is_file())
    files = {**files, **{path.relative_to(root).as_posix(): None for path in records}}
    if record is not None:
        files |= {f"{RECORD}/original/{path}": source for path, source in originals.items()}
        files[f"{RECORD}/.gitignore"] = b"*\n"
        files[_APPLIED] = f"{json.dumps(record, indent=1)}\n".encode()
    try:
        _stage(root, files)
        _make(root, files)
    except BaseException:
        recover(root)
        raise
    shutil.rmtree(root / _STAGED, ignore_errors=True)
    if record is None:
        shutil.rmtree(root / RECORD, ignore_errors=True)
    for folder in (root / path for path in reversed(list(folders))):
        # The files of interpreters and editors are removed together with the folder.
        if folder.is_dir() and all(is_junk(entry.name) for entry in folder.iterdir()):
            shutil.rmtree(folder)


def _stage(root: Path, files: Mapping[str, bytes | Path | None]) -> None:
    staged = root / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for path, new in files.items():
        target, staging = root / path, _place(staged / "files" / path)
        if isinstance(new, Path):
            _link(new, staging)
        elif new is not None:
            staging.write_bytes(new)
            if target.exists():
                staging.chmod(target.stat().st_mode & 0o7777)
            _own(staging, target if target.exists() else _nearest(target))
        if target.exists():
            _link(target, _place(staged / "old" / path))


def _make(root: Path, files: Collection[str]) -> None:
    staged = root / _STAGED
    journal = {path: (staged / "old" / path).exists() for path in files}
    (staged / "journal").write_text(json.dumps(journal))
    (staged / "journal").rename(staged / _JOURNAL)
    for path in files:
        if (staged / "files" / path).exists():
            _make_folder((root / path).parent)
            (staged / "files" / path).replace(root / path)
        else:
            (root / path).unlink(missing_ok=True)
    (staged / _JOURNAL).unlink()


def is_interrupted(root: Path) -> bool:
    """Return whether a process was killed during a change."""
    return (root / _STAGED / _JOURNAL).is_file()


def recover(root: Path) -> None:
    """Undo a change that was interrupted."""
    staged = root / _STAGED
    if not is_interrupted(root):
        return shutil.rmtree(staged, ignore_errors=True)
    for path, was_there in json.loads((staged / _JOURNAL).read_text()).items():
        old = staged / "old" / path
        # An earlier recovery that was killed has already put some files back.
        if old.exists():
            old.replace(root / path)
        elif not was_there and not (root / path).is_dir():
            (root / path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # removes folders that are empty now
                for folder in (root / path).parents:
                    folder.rmdir()
    shutil.rmtree(staged)


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _link(source: Path, copy: Path) -> None:
    """Make a hard link to a file, with the same mode, owner and times. Make a copy if the file
    system has no hard links."""
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)
        _own(copy, source)


def _own(path: Path, like: Path) -> None:
    wanted, now = like.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, wanted.st_uid, wanted.st_gid)


def _nearest(path: Path) -> Path:
    """Return the nearest existing folder above `path`."""
    return next(parent for parent in path.parents if parent.is_dir())


def _make_folder(folder: Path) -> None:
    for missing in reversed(
        [parent for parent in (folder, *folder.parents) if not parent.is_dir()]
    ):
        missing.mkdir()
        _own(missing, missing.parent)
