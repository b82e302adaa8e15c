"""Writes a release's bill of materials (CycloneDX 1.6, JSON), checked against its schema.

What is in it: each file of the release with its hash; what is compiled into the binaries; the
upstream sources with the patches; all packages of locks/; and the distribution's packages in the
images. Runs in build/venv-ship.
"""

from __future__ import annotations

import argparse
import datetime
import email
import io
import json
import re
import sys
import tarfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import (
    Component,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.elffile import ELFFile
from packageurl import PackageURL
from packaging.requirements import Requirement

from scripts.patchkit.series import Upstream, load_lock, read_series, sha256_file
from scripts.releasekit.contents import INTEGRATIONS, ROOT, Release, ReleaseError, packages, pins

IMAGE_SUFFIX = ".image.tar.gz"
BINARIES = (".so", "/byteps-server")


def _sha256(*values: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=value) for value in values]


def _debian(name: str, version: str, architecture: str, distribution: str) -> PackageURL:
    more = {"arch": architecture, "distro": distribution}
    return PackageURL("deb", distribution.partition("-")[0], name, version, more)


def _library(name: str, version: str, purl_type: str, **more: object) -> Component:
    """A component whose reference is its package URL."""
    purl = PackageURL(purl_type, name=name, version=version)
    return Component(name=name, version=version, purl=purl, bom_ref=purl.to_string(), **more)


@dataclass
class Materials:
    """All components, and what each of them holds or needs."""

    release: Release
    main: Component
    components: dict[str, Component] = field(default_factory=dict)
    needs: list[tuple[Component, list[Component]]] = field(default_factory=list)

    def add(self, component: Component, needs: Iterable[Component] = ()) -> Component:
        """The component of this reference, which may be there already."""
        kept = self.components.setdefault(str(component.bom_ref), component)
        self.needs.append((kept, list(needs)))
        return kept

    def bom(self) -> Bom:
        bom = Bom(components=self.components.values())
        bom.serial_number = uuid.uuid5(
            uuid.NAMESPACE_OID, f"{self.release.version} {self.release.commit}"
        )
        bom.metadata.component = self.main
        bom.metadata.timestamp = datetime.datetime.fromtimestamp(self.release.epoch, datetime.UTC)
        for component, needed in [*self.needs, (self.main, self._top())]:
            bom.register_dependency(component, needed)
        return bom

    def _top(self) -> list[Component]:
        """What nothing else holds: the files."""
        held = {str(one.bom_ref) for _, needed in self.needs for one in needed}
        return [one for reference, one in self.components.items() if reference not in held]


def _upstream(materials: Materials, upstream: Upstream) -> Component:
    """The patched tree: upstream's source distribution, and what was done to it."""
    original = _library(upstream.name, upstream.version, "pypi", hashes=_sha256(upstream.sha256))
    patches = [
        Patch(
            type=PatchClassification.UNOFFICIAL,
            diff=Diff(url=XsUri(str(path.relative_to(ROOT)))),
        )
        for path in read_series(upstream).patches
    ]
    version = f"{upstream.version}+{materials.release.version.partition('+')[2]}"
    return materials.add(
        Component(
            type=ComponentType.LIBRARY, name=upstream.name, version=version,
            bom_ref=f"patched:{upstream.name}@{version}",
            pedigree=Pedigree(ancestors=[original], patches=patches),
            properties=[Property(name="megatron-byteps:overlay", value=upstream.overlay.name)],
        )
    )  # fmt: skip


def _pinned(materials: Materials) -> dict[str, dict[str, Component]]:
    """The packages of locks/, by group and name."""
    found: dict[str, dict[str, Component]] = {}
    for (name, version), (groups, hashes) in pins().items():
        component = materials.add(
            _library(
                name, version, "pypi", hashes=_sha256(*hashes),
                properties=[Property(name="megatron-byteps:groups", value=" ".join(groups))],
            )
        )  # fmt: skip
        for group in groups:
            found.setdefault(group, {})[name] = component
    return found


def _sodium(materials: Materials, folder: Path) -> Component:
    """libsodium as scripts/lib/system.sh fetched it: with the distribution's patches."""
    name, version, distribution = (folder / "versions").read_text(encoding="utf-8").split()
    purl = _debian(name, version, "source", distribution)
    upstream = version.partition(":")[2] or version
    upstream = re.split(r"[-+]", upstream)[0]
    return materials.add(
        Component(
            name=name, version=version, purl=purl, bom_ref=purl.to_string(),
            cpe=f"cpe:2.3:a:libsodium:libsodium:{upstream}:*:*:*:*:*:*:*",
            licenses=[LicenseExpression("ISC")],
            description="linked statically; of it, HMAC-SHA-256 is used",
        )
    )  # fmt: skip


def compilers(binary: bytes) -> list[str]:
    """What compiled an ELF file, as its section .comment says."""
    section = ELFFile(io.BytesIO(binary)).get_section_by_name(".comment")
    if section is None:
        return []
    return sorted({one.decode() for one in section.data().split(b"\0") if one})


def binaries(path: Path) -> Iterator[tuple[str, bytes]]:
    """Our executables and modules in a wheel or a server archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(BINARIES):
                    yield name, wheel.read(name)
        return
    with tarfile.open(path) as packed:
        for member in packed:
            content = packed.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith(BINARIES):
                yield member.name, content.read()


def _runtime(materials: Materials, path: Path) -> list[Component]:
    """The C++ library inside a file of the release: that of the compiler of its binaries."""
    texts = {text for _, binary in binaries(path) for text in compilers(binary)}
    found = []
    for text in sorted(texts):
        version = text.split()[-1]
        if not text.startswith("GCC: ") or not re.fullmatch(r"[\d.]+", version):
            raise ReleaseError(f"{path.name}: was compiled by '{text}', which is no GCC")
        found.append(
            materials.add(
                _library(
                    "libstdc++", version, "generic",
                    description=f"linked statically, of {text.removeprefix('GCC: ')}",
                    licenses=[LicenseExpression("GPL-3.0-or-later WITH GCC-exception-3.1")],
                )
            )
        )  # fmt: skip
    if not found:
        raise ReleaseError(f"{path.name}: no binary in it says what compiled it")
    return found


def _image(path: Path) -> tuple[Component, str | None]:
    """A saved image with its distribution's packages, and the group of locks/ that is in it."""
    inside = [
        Component(
            name=one.name, version=one.version,
            purl=_debian(one.name, one.version, one.architecture, one.distribution),
            bom_ref=f"{path.name}:{one.name}:{one.architecture}",
        )
        for one in packages(path)
    ]  # fmt: skip
    component = Component(
        type=ComponentType.CONTAINER, name=path.name, bom_ref=path.name,
        hashes=_sha256(sha256_file(path)), components=inside,
    )  # fmt: skip
    if path.name.startswith("byteps-server-"):
        return component, None
    found = re.match(r"megatron-byteps-worker-(ray|hf|rl)-", path.name)
    return component, found[1] if found else "base"


def collect(release: Release, folder: Path, sodium_folder: Path) -> Materials:
    """The materials of what lies in a release's folder.

    Raises:
        ReleaseError: a file is there whose contents are not known.
    """
    main = Component(
        type=ComponentType.APPLICATION, name="megatron-byteps", version=release.version,
        bom_ref=release.name, licenses=[LicenseExpression("Apache-2.0")],
        properties=[Property(name="megatron-byteps:commit", value=release.commit)],
    )  # fmt: skip
    materials = Materials(release, main)
    # A series for a commit serves users' own checkouts: nothing that is released is made of it.
    trees = {one.name: _upstream(materials, one) for one in load_lock(ROOT) if one.sha256}
    by_group = _pinned(materials)
    groups = {
        name: materials.add(
            Component(
                type=ComponentType.FILE, name=f"locks/{name}.lock", bom_ref=f"locks/{name}.lock"
            ),
            pinned.values(),
        )
        for name, pinned in by_group.items()
    }
    ps_lite = materials.add(
        Component(
            type=ComponentType.LIBRARY, name="ps-lite", bom_ref="ps-lite",
            description="headers, in the source distribution of byteps; patched with it",
            licenses=[LicenseExpression("Apache-2.0")],
        )
    )  # fmt: skip
    materials.add(trees["byteps"], [ps_lite])
    linked = {"libsodium": _sodium(materials, sodium_folder)}
    # Images last: they hold what is linked into the other files.
    for path in sorted(folder.iterdir(), key=lambda one: (one.name.endswith(IMAGE_SUFFIX), one)):
        file = Component(
            type=ComponentType.FILE, name=path.name, bom_ref=path.name,
            hashes=_sha256(sha256_file(path)),
        )  # fmt: skip
        if path.name.endswith(IMAGE_SUFFIX):
            image, group = _image(path)
            of_worker = [] if group is None else [trees["megatron-core"], groups[group]]
            materials.add(image, [trees["byteps"], *linked.values(), *of_worker])
        elif path.name.startswith("byteps-"):
            runtime = _runtime(materials, path)
            linked |= {str(one.bom_ref): one for one in runtime}
            of_wheel = ("pybind11", "torch") if path.suffix == ".whl" else ()
            needed = [by_group["base"][name] for name in of_wheel]
            materials.add(file, [trees["byteps"], linked["libsodium"], *runtime, *needed])
        elif found := re.match(rf"megatron_byteps_({'|'.join(INTEGRATIONS)})-.*\.whl$", path.name):
            materials.add(file, _asked_for(path, by_group[found[1]]))
        elif path.name == f"{release.name}.tar.gz":
            materials.add(file, [*trees.values(), *groups.values()])
        else:
            raise ReleaseError(f"{path}: not known what is in it")
    return materials


def _asked_for(path: Path, pinned: dict[str, Component]) -> list[Component]:
    """What a wheel asks for, in the versions of its lock."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    asked = [Requirement(one) for one in metadata.get_all("Requires-Dist", [])]
    return [
        pinned[one.name]
        for one in asked
        if "extra" not in str(one.marker) and not one.name.startswith("megatron-byteps-")
    ]


def write(materials: Materials, path: Path) -> None:
    """Writes it, and fails where it is not as its schema says."""
    text = JsonV1Dot6(materials.bom()).output_as_string(indent=1)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ReleaseError(f"{path.name} breaks the schema of CycloneDX: {fault}")
    path.write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sbom.py", description=__doc__)
    parser.add_argument("--release", required=True, help="a Release's fields, as JSON")
    parser.add_argument("--sodium", required=True, type=Path, metavar="FOLDER", help="its sources")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("folder", type=Path, help="with the other files of the release")
    options = parser.parse_args(arguments)
    try:
        release = Release(**json.loads(options.release))
        write(collect(release, options.folder, options.sodium), options.out)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
