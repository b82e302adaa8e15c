"""Which packages of its distribution a saved container image holds."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.releasekit.common import ReleaseError

STATUS = "var/lib/dpkg/status"
RELEASE = ("usr/lib/os-release", "etc/os-release")


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str
    version: str
    architecture: str
    distribution: str
    """Such as "debian-12"."""


def _fields(text: str, separator: str) -> dict[str, str]:
    lines = (line.split(separator, 1) for line in text.splitlines() if line[:1].isalpha())
    return {line[0]: line[1].strip().strip('"') for line in lines if len(line) == 2}


def _read_layer(file: IO[bytes]) -> dict[str, str]:
    """The files of a layer that are wanted here."""
    found = {}
    try:
        with tarfile.open(fileobj=file, mode="r|*") as layer:
            for member in layer:
                name = member.name.removeprefix("./")
                if name == STATUS or (name in RELEASE and member.isfile()):
                    content = layer.extractfile(member)
                    if content is not None:
                        found[name] = content.read().decode(errors="replace")
    except tarfile.ReadError:
        return {}  # a description of the image, and no layer
    return found


def packages(image: Path) -> list[Package]:
    """What dpkg installed in an image that `docker save` or `buildah push docker-archive:` wrote.

    Raises:
        ReleaseError: this is no such file, or the image has no packages of Debian's kind.
    """
    layers: dict[str, dict[str, str]] = {}
    order: list[str] = []
    try:
        # Once, from its beginning to its end: a worker's has gigabytes.
        with tarfile.open(image, mode="r|*") as saved:
            for member in saved:
                content = saved.extractfile(member) if member.isfile() else None
                if content is None:
                    continue
                if member.name == "manifest.json":
                    order = json.loads(content.read())[0]["Layers"]
                elif member.size:
                    layers[member.name] = _read_layer(content)
    except tarfile.ReadError as error:
        raise ReleaseError(f"{image} is no saved image: {error}") from error
    files: dict[str, str] = {}
    for name in order:
        files |= layers.get(name, {})
    if STATUS not in files:
        raise ReleaseError(f"{image} has no {STATUS}: its packages cannot be listed")
    about = _fields(next((files[name] for name in RELEASE if name in files), ""), "=")
    distribution = f"{about.get('ID', 'unknown')}-{about.get('VERSION_ID', 'unknown')}"
    stanzas = [_fields(one, ":") for one in files[STATUS].split("\n\n")]
    return [
        Package(
            name=one["Package"],
            version=one["Version"],
            architecture=one["Architecture"],
            distribution=distribution,
        )
        for one in stanzas
        if one.get("Status", "").endswith(" installed")
    ]
