"""What the trees are made from: upstream.lock, overlays, series of patches, and the upstreams.

These are fetched by hash. With errors, messages and a git that heeds no user's configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

IDENTITY_NAME = "Megatron-BytePS"
IDENTITY_EMAIL = "patches@megatron-byteps.invalid"
# Upstream and overlay commits carry a fixed date so that equal content gives equal commit hashes.
FIXED_DATE = "2000-01-01T00:00:00+0000"


class PatchError(Exception):
    """What a user can cause or repair; the message is printed without a traceback."""


def say(message: str) -> None:
    print(message, flush=True)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def git_env() -> dict[str, str]:
    """An environment in which git ignores the user's and the system's settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_COUNT": "1",
        # A tree made as root and read as a user (or the reverse, in containers) is still ours.
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": IDENTITY_NAME,
        "GIT_AUTHOR_EMAIL": IDENTITY_EMAIL,
        "GIT_AUTHOR_DATE": FIXED_DATE,
        "GIT_COMMITTER_NAME": IDENTITY_NAME,
        "GIT_COMMITTER_EMAIL": IDENTITY_EMAIL,
        "GIT_COMMITTER_DATE": FIXED_DATE,
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    return env


def try_git(
    cwd: Path, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs git in `cwd` and returns the result, whatever its exit status."""
    try:
        return subprocess.run(
            ["git", *args],
            cwd=cwd,
            env=git_env() | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        if not Path(cwd).is_dir():
            raise
        raise PatchError("git is not installed (or not on PATH)") from error


def git(cwd: Path, *args: str, env: dict[str, str] | None = None) -> str:
    """Runs git in `cwd` and returns what it printed; a failure is a PatchError."""
    result = try_git(cwd, *args, env=env)
    if result.returncode != 0:
        reason = reason_of(result)
        raise PatchError(f"git {' '.join(args)} failed in {cwd}: {reason}")
    return result.stdout.decode(errors="surrogateescape")


def reason_of(result: subprocess.CompletedProcess[bytes]) -> str:
    """The lines in which git says what is wrong, without its advice on what to type next."""
    lines = (result.stderr + b"\n" + result.stdout).decode(errors="replace").splitlines()
    marks = ("error: ", "fatal: ")
    errors = [line.strip().partition(": ")[2] for line in lines if line.startswith(marks)]
    return "; ".join(errors) or " ".join(line.strip() for line in lines if line.strip())


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


# git apply outside any repository: paths are relative to the folder it runs in, wherever that is.
NOWHERE = {"GIT_DIR": os.devnull}


def paths_of(upstream: Upstream, patch: Path) -> list[str]:
    """The files that a patch touches; PatchError where git cannot read it."""
    listed = try_git(patch.parent, "apply", "--numstat", "-z", str(patch), env=NOWHERE)
    if listed.returncode != 0:
        raise PatchError(f"{upstream.shown(patch)} is no patch: {reason_of(listed)}")
    entries = listed.stdout.decode().split("\0")
    return [entry.split("\t", 2)[2] for entry in entries if entry]


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


# ---- upstreams, through pip and git, into the cache


def cache_root() -> Path:
    """The project's cache folder, outside the checkout; everything in it is keyed by content."""
    chosen = os.environ.get("MEGATRON_BYTEPS_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron-byteps"


def fetch_sdist(upstream: Upstream) -> Path:
    """The verified archive of `upstream`; downloads it when the cache lacks it.

    Raises PatchError, naming the file and both hashes, when the content is not what is pinned.
    """
    folder = cache_root() / "sdists" / upstream.sha256
    files = sorted(folder.glob("*.tar.gz"))
    if files:
        _verify(files[0], upstream)
        return files[0]
    say(f"{upstream.name} {upstream.version}: fetching the source distribution")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        _pip_download(upstream, Path(temporary))
        archives = sorted(Path(temporary).glob("*.tar.gz"))
        if len(archives) != 1:
            raise PatchError(f"pip left {len(archives)} archives for {upstream.name}, not one")
        _verify(archives[0], upstream)
        folder.mkdir(exist_ok=True)
        # A rename, so that a reader never sees half a file.
        return archives[0].replace(folder / archives[0].name)


def unpack(upstream: Upstream, destination: Path) -> None:
    """Writes upstream's files to `destination`, which must not exist.

    Raises PatchError when they are neither at hand nor can be fetched.
    """
    if upstream.commit:
        _check_out(upstream, find_repository(upstream), destination)
    else:
        _unpack(fetch_sdist(upstream), destination)


def find_repository(upstream: Upstream) -> Path:
    """A git repository that has the commit of `upstream`: the one that the user names, or the one
    in the cache, which is fetched where it is missing.

    Raises PatchError when there is none.
    """
    named = os.environ.get(upstream.variable)
    if named:
        if not Path(named).is_dir():
            raise PatchError(f"{upstream.variable}={named}: there is no such folder")
        if not _has_commit(Path(named), upstream):
            raise PatchError(
                f"{upstream.variable}={named} has no commit {upstream.commit}, for which the "
                f"series of {upstream.label} is made"
            )
        return Path(named)
    cached = cache_root() / "checkouts" / upstream.commit
    if cached.is_dir() and _has_commit(cached, upstream):
        return cached
    say(f"{upstream.label}: fetching commit {upstream.commit}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as temporary:
        new = Path(temporary, "repository")
        git(cached.parent, "init", "-q", "--bare", "--template=", str(new))
        # A link that carries nothing ends the command after half a minute.
        result = try_git(
            new, "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30",
            "fetch", "-q", "--depth=1", "--no-tags", upstream.repository, upstream.commit,
        )  # fmt: skip
        if result.returncode != 0:
            raise PatchError(
                f"{upstream.label}: cannot fetch commit {upstream.commit} from "
                f"{upstream.repository} ({reason_of(result)}): name a checkout that has it, "
                f"{upstream.variable}=/path/to/Megatron-LM"
            )
        shutil.rmtree(cached, ignore_errors=True)
        new.rename(cached)
    return cached


def _has_commit(repository: Path, upstream: Upstream) -> bool:
    return try_git(repository, "cat-file", "-e", f"{upstream.commit}^{{tree}}").returncode == 0


def _check_out(upstream: Upstream, repository: Path, destination: Path) -> None:
    """Writes the files of the commit, without touching the repository's own index and files."""
    destination.mkdir()
    with tempfile.TemporaryDirectory(prefix="patchset-index-") as temporary:
        env = {
            "GIT_DIR": git(repository, "rev-parse", "--absolute-git-dir").strip(),
            "GIT_WORK_TREE": str(destination.absolute()),
            "GIT_INDEX_FILE": str(Path(temporary, "index")),
        }
        git(destination, "read-tree", upstream.commit, env=env)
        git(destination, "checkout-index", "--all", "--quiet", env=env)


def _unpack(archive: Path, destination: Path) -> None:
    """Unpacks the one top folder of `archive` as `destination`, which must not exist."""
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".unpack-") as temporary:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        tops = list(Path(temporary).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise PatchError(f"{archive} does not hold exactly one top folder")
        tops[0].rename(destination)


def _verify(archive: Path, upstream: Upstream) -> None:
    actual = sha256_file(archive)
    if actual != upstream.sha256:
        raise PatchError(
            f"wrong hash of {archive}: expected sha256 {upstream.sha256} (upstream.lock), "
            f"actual {actual}; delete the file if it is damaged"
        )


def _pip_download(upstream: Upstream, destination: Path) -> None:
    # megatron-core's metadata asks for 3.12.
    probe = "import pip, sys; sys.exit(sys.version_info < (3, 12))"
    candidates = [sys.executable, str(upstream.root / "build/venv/bin/python")]
    candidates += [path for name in ("python3", "python") if (path := shutil.which(name))]
    for python in (one for one in candidates if os.path.exists(one)):
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:
            break
    else:
        raise PatchError(
            "fetching needs a Python >= 3.12 with pip: run scripts/setup.sh, which makes one "
            "(build/venv), or install pip for the Python that runs this script"
        )
    pin = f"{upstream.name}=={upstream.version}"
    requirements = destination / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{upstream.sha256}\n", encoding="utf-8")
    # Only this package has to come as source: its build dependencies may be wheels, which is
    # what makes this take seconds. Build isolation stays on, since BytePS's setup.py needs it.
    command: list[str | Path] = [
        python, "-m", "pip", "download", "--no-deps",
        "--no-binary", upstream.name, "--require-hashes", "--disable-pip-version-check",
        "--progress-bar", "off", "--dest", destination, "-r", requirements,
    ]  # fmt: skip
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    requirements.unlink()
    if result.returncode != 0:
        said = (result.stdout + result.stderr).strip().splitlines()
        raise PatchError(f"pip could not download {pin}:\n  " + "\n  ".join(said[-12:]))
