"""Errors, the tools of the dependency group `ship`, and all pins of locks/."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts import locks

ROOT = Path(__file__).resolve().parents[2]


class ReleaseError(Exception):
    """What a user can cause or repair; the message is printed without a traceback."""


def ship_tools() -> Path:
    """The folder of the programs of locks/ship.lock, which is installed where it is not current.

    Raises:
        ReleaseError: it could not be installed.
    """
    install = f'source "{ROOT}/scripts/lib/ship_tools.sh"; install_ship_tools "{ROOT}"'
    if subprocess.run(["bash", "-euo", "pipefail", "-c", install], check=False).returncode != 0:
        raise ReleaseError("locks/ship.lock could not be installed in build/venv-ship, see above")
    return ROOT / "build/venv-ship/bin"


def pins() -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """By name and version of each package in locks/: the groups that hold it, its files' sha256."""
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    groups = locks.configuration()["dependency-groups"]
    for group in groups:
        for name, entry in locks.whole(group, groups).items():
            version = entry.removeprefix(name).split(maxsplit=1)[0].split("==", 1)[1]
            hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
            of_groups, of_files = found.setdefault((name, version), ([], []))
            of_groups.append(group)
            of_files += [one for one in hashes if one not in of_files]
    return dict(sorted(found.items()))
