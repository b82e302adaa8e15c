"""Upstreams by hash: source distributions through pip, commits through git, into the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .common import PatchError, git, reason_of, say, sha256_file, try_git
from .lock import Upstream


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


def _python_with_pip(root: Path) -> str:
    candidates = [sys.executable, str(root / "build/venv/bin/python")]
    candidates += [path for name in ("python3", "python") if (path := shutil.which(name))]
    # megatron-core's metadata asks for 3.12.
    probe = "import pip, sys; sys.exit(sys.version_info < (3, 12))"
    for candidate in candidates:
        if not os.path.exists(candidate):
            continue
        result = subprocess.run([candidate, "-c", probe], capture_output=True, check=False)
        if result.returncode == 0:
            return candidate
    raise PatchError(
        "fetching needs a Python >= 3.12 with pip: run scripts/setup.sh, which makes one "
        "(build/venv), or install pip for the Python that runs this script"
    )


def _pip_download(upstream: Upstream, destination: Path) -> None:
    pin = f"{upstream.name}=={upstream.version}"
    requirements = destination / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{upstream.sha256}\n", encoding="utf-8")
    # Only this package has to come as source: its build dependencies may be wheels, which is
    # what makes this take seconds. Build isolation stays on, since BytePS's setup.py needs it.
    command = [
        _python_with_pip(upstream.root), "-m", "pip", "download", "--no-deps",
        "--no-binary", upstream.name, "--require-hashes", "--disable-pip-version-check",
        "--progress-bar", "off", "--dest", str(destination), "-r", str(requirements),
    ]  # fmt: skip
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    requirements.unlink()
    if result.returncode == 0:
        return
    got = re.search(r"Got\s+([0-9a-f]{64})", result.stdout)
    if got:
        file = re.search(r"([^\s/]+\.tar\.gz)", result.stdout)
        raise PatchError(
            f"wrong hash of {file.group(1) if file else pin} as downloaded: expected sha256 "
            f"{upstream.sha256} (upstream.lock), actual {got.group(1)}"
        )
    tail = "\n  ".join(result.stdout.strip().splitlines()[-12:])
    raise PatchError(f"pip could not download {pin}:\n  {tail}")
