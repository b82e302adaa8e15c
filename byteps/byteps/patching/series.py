"""Upstreams, read from upstream.lock, and the series of patches of each."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

JUNK = (
    "__pycache__", "*.pyc", "*.pyo", "*.so", "*.o", "*.egg-info", "*.swp", "*~", ".DS_Store",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".git", ".cache",
)  # fmt: skip
"""Files that editors, interpreters and tools leave in an overlay folder."""
SHOWN = 12
"""Number of failures or files that a message lists. The message only counts further ones."""


class PatchError(Exception):
    """A fault that the user can repair. It is printed without a traceback."""


def say(message: str) -> None:
    print(message, flush=True)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def listed(items: list[str], separator: str = ", ") -> str:
    rest = [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return separator.join(items[:SHOWN] + rest)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() and not path.is_symlink() else None


def home() -> Path:
    """Return the folder with upstream.lock, patches/, Megatron-LM/ and scripts/.

    This is the checkout from which byteps is linked or, if there is none, a folder of the wheel.
    """
    here = Path(__file__).resolve().parent
    checkout = here.parents[2]
    return checkout if (checkout / "upstream.lock").is_file() else here / "data"


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """An entry of upstream.lock, whose comments explain the fields. All paths are absolute."""

    root: Path
    name: str
    version: str
    tree: Path
    overlay: Path
    patches: Path
    sha256: str = ""
    commit: str = ""
    repository: str = ""
    variable: str = ""
    tried: tuple[str, ...] = ()
    version_file: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def pin(self) -> str:
        """Hash that identifies upstream's content."""
        return self.sha256 or self.commit

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    def shown(self, path: Path) -> str:
        """Return the path for messages: relative to the project if the file is in it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def overlay_files(self) -> dict[str, Path]:
        """Return the overlay's files by their path in the patched tree, sorted, without junk and
        README.md."""
        files: dict[str, Path] = {}
        for folder, subfolders, names in os.walk(self.overlay):
            subfolders[:] = [name for name in subfolders if not is_junk(name)]
            for path in (Path(folder, name) for name in names if not is_junk(name)):
                if path.is_symlink() or not path.is_file():
                    raise PatchError(f"{self.shown(path)}: an overlay holds plain files only")
                files[path.relative_to(self.overlay).as_posix()] = path
        files.pop("README.md", None)
        return dict(sorted(files.items()))

    def fingerprint(self) -> str:
        """Return a hash of everything from which the tree is made. Equal hashes mean equal
        trees."""
        digest = hashlib.sha256(f"1\0{self.name}\0{self.version}\0{self.pin}".encode())
        for relative, path in self.overlay_files().items():
            digest.update(
                f"\0o\0{relative}\0{os.access(path, os.X_OK)}\0{sha256_file(path)}".encode()
            )
        for path in read_series(self).patches:
            digest.update(f"\0p\0{path.name}\0{sha256_file(path)}".encode())
        return digest.hexdigest()


def is_junk(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in JUNK)


def load_lock(root: Path) -> list[Upstream]:
    """Read `root`/upstream.lock. Raises PatchError if the file is missing or malformed."""
    path = root / "upstream.lock"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["upstream"]
        for entry in entries:
            entry |= {name: root / entry[name] for name in ("tree", "overlay", "patches")}
            needed = ("repository", "variable", "commit") if "commit" in entry else ("sha256",)
            pin = [entry[name] for name in needed][-1]
            digits = 40 if "commit" in entry else 64
            if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", pin):
                raise PatchError(
                    f"{path}: {needed[-1]} of {entry['name']} is not {digits} hexadecimal digits"
                )
        return [Upstream(root=root, **entry) for entry in entries]
    except KeyError as error:
        raise PatchError(f"{path}: an entry lacks {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise PatchError(f"{path}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Series:
    """The patches that the file `series` of a folder names."""

    include: str = ""
    """First line of the file if it refers to the series of another folder; otherwise empty."""
    shared: list[Path] = field(default_factory=list)
    """Patches of that other series, which are applied first."""
    own: list[Path] = field(default_factory=list)
    instead: dict[str, Path] = field(default_factory=dict)
    """Patches of this folder that replace a shared patch of the same file name, by that name."""

    @property
    def patches(self) -> list[Path]:
        return [self.instead.get(path.name, path) for path in self.shared] + self.own

    def text(self, names: list[str]) -> bytes:
        """Return the content of a file `series` with these names after the shared patches."""
        return "".join(f"{line}\n" for line in [self.include, *names] if line).encode()

    def hash_of_shared(self) -> str:
        content = b"".join(path.read_bytes() for path in self.shared)
        return hashlib.sha256(content).hexdigest() if self.shared else ""


def read_series(upstream: Upstream, folder: Path | None = None) -> Series:
    """Read a series. Raises PatchError unless series and folder have the same files."""
    folder = folder or upstream.patches
    series = folder / "series"
    present = {path.name for path in folder.glob("*.patch")}
    names = series.read_text(encoding="utf-8").split() if series.is_file() else []
    include, shared = "", []
    if names and names[0].endswith("/series"):
        include = names.pop(0)
        if not (folder / include).is_file():
            raise PatchError(f"{upstream.shown(series)} refers to {include}, which is not there")
        other = Path(os.path.normpath(folder / include)).parent
        shared = read_series(upstream, other).patches
    instead = {path.name: folder / path.name for path in shared if path.name in present}
    for name in names:
        if name not in present:
            raise PatchError(f"{upstream.shown(series)} names {name}, which is not in the folder")
        if names.count(name) > 1 or name in instead:
            raise PatchError(f"{upstream.shown(series)} names {name} twice")
    if extra := sorted(present - {*names, *instead}):
        stray = upstream.shown(folder / extra[0])
        raise PatchError(f"{stray} is not named in {upstream.shown(series)}")
    own = [folder / name for name in names]
    return Series(include=include, shared=shared, own=own, instead=instead)


def part_of(upstream: Upstream, patch: Path) -> str | None:
    """Return the part that a patch's message names, or None. Raises PatchError if upstream.lock has
    no such part."""
    message = patch.read_text(encoding="utf-8", errors="replace").split("\n---\n", 1)[0]
    named = re.findall(r"^Part: (.*)$", message, re.M)
    if len(named) > 1 or not set(named) <= set(upstream.parts):
        raise PatchError(
            f"{upstream.shown(patch)} says Part: {', '.join(named)}; upstream.lock has "
            f"{', '.join(upstream.parts) or 'none'}"
        )
    return named[0] if named else None
