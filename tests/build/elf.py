"""What an executable or library needs of the machine it is taken to."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

OLDEST_GLIBC = (2, 34)
"""Of the wheels' tag, manylinux_2_34: Debian 12, Ubuntu 22.04, RHEL 9."""
EVERYWHERE = {"libc.so.6", "libm.so.6", "libgcc_s.so.1"}
"""Libraries that every machine with that C library has."""
MACHINES = {62: "x86_64", 183: "aarch64"}


@dataclass(frozen=True, kw_only=True)
class Needs:
    machine: str
    libraries: set[str]
    glibc: tuple[int, ...]
    """The newest version that a symbol asks for."""

    def demand_portable(self) -> None:
        loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
        assert self.libraries <= EVERYWHERE | loaders
        assert self.glibc <= OLDEST_GLIBC


def needs(file: Path) -> Needs:
    header = file.read_bytes()[:20]
    assert header[:4] == b"\x7fELF", file
    # Wide: a version that is cut off would be taken for an older one.
    said = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--version-info", file],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", said)]
    return Needs(
        machine=MACHINES[int.from_bytes(header[18:20], "little")],
        libraries=set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)),
        glibc=max(versions),
    )
