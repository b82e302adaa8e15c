"""upstream.lock, the patch series and the overlay folders: what the trees are made from."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from .common import PatchError, sha256_file

# What editors, interpreters and tools leave in an overlay folder; never part of the tree.
JUNK = (
    "__pycache__", "*.pyc", "*.pyo", "*.so", "*.o", "*.egg-info", "*.swp", "*~", ".DS_Store",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".git", ".cache",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """One entry of upstream.lock; every path is absolute."""

    root: Path
    """The project's checkout."""
    name: str
    version: str
    sha256: str
    """Of the source distribution; empty for a commit."""
    commit: str
    """Of a git repository, where upstream has not released this version; else empty."""
    repository: str
    """Where the commit can be fetched."""
    variable: str
    """The environment variable in which a user names a checkout that has the commit."""
    tree: Path
    """Where the patched tree is assembled."""
    overlay: Path
    """Files to add; the folder may be missing."""
    patches: Path
    """Folder of the series; may be missing or empty."""
    tried: tuple[str, ...]
    """Versions of a user's own checkout with which the series was tried."""
    version_file: str
    """Where such a checkout states its version, relative to it; empty: no series for --target."""
    parts: Mapping[str, tuple[str, ...]]
    """What --target leaves out unless it is asked for, by the name of its option: the overlay's
    files that belong to it. Patches say `Part: NAME` in their message."""

    @property
    def pin(self) -> str:
        """The hash that names upstream's content."""
        return self.sha256 or self.commit

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    def shown(self, path: Path) -> str:
        """`path` as a user knows it: relative to the project where it lies inside."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def load_lock(root: Path) -> list[Upstream]:
    """Reads `root`/upstream.lock; PatchError when it is missing or malformed."""
    path = root / "upstream.lock"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["upstream"]
        upstreams = [
            Upstream(
                root=root,
                name=entry["name"],
                version=entry["version"],
                sha256=entry["sha256"] if "commit" not in entry else "",
                commit=entry.get("commit", ""),
                repository=entry["repository"] if "commit" in entry else "",
                variable=entry["variable"] if "commit" in entry else "",
                tree=root / entry["tree"],
                overlay=root / entry["overlay"],
                patches=root / entry["patches"],
                tried=tuple(entry.get("tried", ())),
                version_file=entry.get("version_file", ""),
                parts={name: tuple(files) for name, files in entry.get("parts", {}).items()},
            )
            for entry in entries
        ]
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise PatchError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise PatchError(f"{path}: an entry lacks {error}") from error
    for upstream in upstreams:
        digits = 40 if upstream.commit else 64
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", upstream.pin):
            kind = "commit" if upstream.commit else "sha256"
            raise PatchError(
                f"{path}: {kind} of {upstream.name} is not {digits} hexadecimal digits"
            )
    return upstreams


@dataclass(frozen=True, kw_only=True)
class Series:
    """What a patch folder's file `series` names."""

    include: str
    """Its line that refers to another folder's series; empty: none."""
    shared: tuple[Path, ...]
    """The patches of that series. They come first."""
    own: tuple[Path, ...]
    """Patches of the folder that come after them."""
    instead: Mapping[str, Path]
    """Patches of the folder that take the place of a shared one, by the name of both."""

    @property
    def patches(self) -> list[Path]:
        """All of them, in order."""
        return [self.instead.get(path.name, path) for path in self.shared] + [*self.own]


def read_series(upstream: Upstream) -> Series:
    """Reads the series of `upstream`.

    Raises PatchError unless series and folder name the same files. The first line may be the path
    of another folder's series, relative to the folder; a file that is called like one of its
    patches takes that one's place.
    """
    return _read_series(upstream, upstream.patches)


def _read_series(upstream: Upstream, folder: Path) -> Series:
    series = folder / "series"
    present = {path.name for path in folder.glob("*.patch")} if folder.is_dir() else set()
    lines = series.read_text(encoding="utf-8").splitlines() if series.is_file() else []
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    include, shared = "", []
    if names and names[0].endswith("/series"):
        include = names.pop(0)
        if not (folder / include).is_file():
            raise PatchError(f"{upstream.shown(series)} refers to {include}, which is not there")
        other = Path(os.path.normpath(folder / include)).parent
        shared = _read_series(upstream, other).patches
    instead = {path.name: folder / path.name for path in shared if path.name in present}
    for name in names:
        if name not in present:
            raise PatchError(f"{upstream.shown(series)} names {name}, which is not in the folder")
        if names.count(name) > 1 or name in instead:
            raise PatchError(f"{upstream.shown(series)} names {name} twice")
    extra = sorted(present - set(names) - set(instead))
    if extra:
        raise PatchError(
            f"{upstream.shown(folder / extra[0])} is not named in {upstream.shown(series)}"
        )
    own = tuple(folder / name for name in names)
    return Series(include=include, shared=tuple(shared), own=own, instead=instead)


def part_of(upstream: Upstream, patch: Path) -> str | None:
    """The part that a patch's message names; None: it is always applied.

    Raises PatchError for a part that upstream.lock does not know.
    """
    message = patch.read_text(encoding="utf-8", errors="replace").split("\n---\n", 1)[0]
    named = re.findall(r"^Part: (.*)$", message, re.M)
    if not named:
        return None
    if len(named) > 1 or named[0] not in upstream.parts:
        known = ", ".join(upstream.parts) or "none"
        raise PatchError(
            f"{upstream.shown(patch)} says Part: {', '.join(named)}; upstream.lock has {known}"
        )
    return named[0]


def is_junk(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in JUNK)


def overlay_files(upstream: Upstream) -> dict[str, Path]:
    """The overlay's files by the path they take in the tree, sorted; junk left out."""
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(upstream.overlay):
        subfolders[:] = [name for name in subfolders if not is_junk(name)]
        for name in names:
            path = Path(folder, name)
            if is_junk(name):
                continue
            if path.is_symlink() or not path.is_file():
                raise PatchError(f"{upstream.shown(path)}: an overlay holds plain files only")
            found[path.relative_to(upstream.overlay).as_posix()] = path
    return dict(sorted(found.items()))


def fingerprint(upstream: Upstream) -> str:
    """A hash of everything the tree is made from; equal fingerprints give equal trees."""
    digest = hashlib.sha256(f"1\0{upstream.name}\0{upstream.version}\0{upstream.pin}".encode())
    for relative, path in overlay_files(upstream).items():
        digest.update(f"\0o\0{relative}\0{os.access(path, os.X_OK)}\0".encode())
        digest.update(sha256_file(path).encode())
    for path in read_series(upstream).patches:
        digest.update(f"\0p\0{path.name}\0{sha256_file(path)}".encode())
    return digest.hexdigest()
