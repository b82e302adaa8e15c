"""Contents of a release, and the conditions that a checkout must meet for one."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from byteps.patching.series import sha256_file

from scripts import locks

ROOT = Path(__file__).resolve().parents[2]


class ReleaseError(Exception):
    """Error that a user can cause or fix. The message is printed without a traceback."""


def ship_tools() -> Path:
    """Return the folder with the programs that locks/ship.lock lists. If they are not current,
    install them first.

    Raises:
        ReleaseError: the programs could not be installed.
    """
    install = f'source "{ROOT}/scripts/lib/system.sh"; install_ship_tools "{ROOT}"'
    if subprocess.run(["bash", "-euo", "pipefail", "-c", install], check=False).returncode != 0:
        raise ReleaseError("locks/ship.lock could not be installed in build/venv-ship, see above")
    return ROOT / "build/venv-ship/bin"


def pins() -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """Return, by name and version of each package in locks/, its groups and its files' sha256."""
    hashes_of: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    groups = locks.configuration()["dependency-groups"]
    for group in groups:
        for name, entry in locks.whole(group, groups).items():
            version = entry.removeprefix(name).split(maxsplit=1)[0].split("==", 1)[1]
            hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
            of_groups, of_files = hashes_of.setdefault((name, version), ([], []))
            of_groups.append(group)
            of_files += [digest for digest in hashes if digest not in of_files]
    return dict(sorted(hashes_of.items()))


SUMS = "SHA256SUMS"


@dataclass(frozen=True, kw_only=True)
class Release:
    version: str
    """Version of the distribution, such as "1.0.0"."""
    commit: str
    epoch: int
    """Time of the commit, or SOURCE_DATE_EPOCH, in seconds since 1970. Every file gets this
    date."""

    @property
    def name(self) -> str:
        return f"megatron-byteps-{self.version}"


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ReleaseError(f"git {arguments[0]} failed in {root}: {said[-1]}")
    return done.stdout


def version_of(root: Path) -> str:
    """Return the version in this checkout's pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def check_changelog(root: Path, version: str, draft: bool) -> None:
    """Raise ReleaseError unless CHANGELOG.md begins with this version and, except for a draft, a
    date."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)(?: \((.*)\))?$", text, re.MULTILINE)
    if newest is None or newest[1] != version:
        raise ReleaseError(
            f"CHANGELOG.md begins with {newest[1] if newest else 'no version'}, and "
            f"pyproject.toml says {version}: write down what is new in {version}"
        )
    if not draft and not re.match(r"\d{4}-\d{2}-\d{2}", newest[2] or ""):
        raise ReleaseError(
            f"CHANGELOG.md calls {version} '{newest[2]}': put the date there and commit it "
            "(--draft makes it as it is)"
        )


def check(root: Path, *, draft: bool = False) -> Release:
    """Return the release that this checkout makes.

    Args:
        draft: whether the changelog may call the version unreleased.

    Raises:
        ReleaseError: files are not committed, or versions and changelog disagree.
    """
    changed = _git(root, "status", "--porcelain").decode(errors="replace").splitlines()
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ReleaseError(
            "these files are not as committed: "
            f"{', '.join(line[3:] for line in changed[:5])}{more}. Commit or remove them"
        )
    version = version_of(root)
    check_changelog(root, version, draft)
    committed = _git(root, "log", "-1", "--format=%H %ct").decode().split()
    epoch = os.environ.get("SOURCE_DATE_EPOCH", committed[1])
    if not epoch.isdecimal():
        raise ReleaseError(f"SOURCE_DATE_EPOCH is '{epoch}', not seconds since 1970")
    return Release(version=version, commit=committed[0], epoch=int(epoch))


def archive(root: Path, release: Release, folder: Path) -> Path:
    """Write an archive of the checkout's committed files. The same commit gives the same bytes.

    pip does not use this archive. It takes the source distribution beside it, which has the patched
    BytePS.
    """
    packed = _git(root, "archive", "--format=tar", f"--prefix={release.name}/", release.commit)
    path = folder / f"{release.name}-checkout.tar.gz"
    path.write_bytes(gzip.compress(packed, mtime=0))
    return path


def write_sums(folder: Path) -> Path:
    """Write SHA256SUMS of all files in the folder, for `sha256sum --check`."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return folder / SUMS
