"""Writes a release's bill of materials (CycloneDX 1.6, JSON), checked against its schema.

It lists each file of the release with its hash, the upstream sources with the patches, libsodium,
and all packages of locks/. For an image, a scanner lists the distribution's packages. Runs in
build/venv-ship.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from byteps.patching.series import Upstream, load_lock, read_series, sha256_file
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
from packageurl import PackageURL

from scripts.releasekit.contents import ROOT, Release, ReleaseError, pins

IMAGE_SUFFIX = ".image.tar.gz"


def _sha256(*values: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=value) for value in values]


def _library(name: str, version: str, purl_type: str, **more: object) -> Component:
    """Make a component whose reference is its package URL."""
    purl = PackageURL(purl_type, name=name, version=version)
    return Component(name=name, version=version, purl=purl, bom_ref=purl.to_string(), **more)


@dataclass
class Materials:
    """All components. For each, the components that it holds or needs."""

    release: Release
    main: Component
    components: dict[str, Component] = field(default_factory=dict)
    needs: list[tuple[Component, list[Component]]] = field(default_factory=list)

    def add(self, component: Component, needs: Iterable[Component] = ()) -> Component:
        """Add a component, unless there is one with the same reference. Return the component that
        is there."""
        known = self.components.setdefault(str(component.bom_ref), component)
        self.needs.append((known, list(needs)))
        return known

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
        """Return the components that no other component contains, which are the files."""
        held = {str(component.bom_ref) for _, needed in self.needs for component in needed}
        return [
            component for reference, component in self.components.items() if reference not in held
        ]


def _upstream(materials: Materials, upstream: Upstream) -> Component:
    """Add the patched tree: upstream's source distribution, with the patches and the overlay."""
    original = _library(upstream.name, upstream.version, "pypi", hashes=_sha256(upstream.sha256))
    patches = [
        Patch(
            type=PatchClassification.UNOFFICIAL,
            diff=Diff(url=XsUri(str(path.relative_to(ROOT)))),
        )
        for path in read_series(upstream).patches
    ]
    version = f"{upstream.version}+megatron.{materials.release.version}"
    return materials.add(
        Component(
            type=ComponentType.LIBRARY, name=upstream.name, version=version,
            bom_ref=f"patched:{upstream.name}@{version}",
            pedigree=Pedigree(ancestors=[original], patches=patches),
            properties=[Property(name="megatron-byteps:overlay", value=upstream.overlay.name)],
        )
    )  # fmt: skip


def _pinned(materials: Materials) -> dict[str, dict[str, Component]]:
    """Add the packages of locks/. Return them by group and name."""
    by_group: dict[str, dict[str, Component]] = {}
    for (name, version), (groups, hashes) in pins().items():
        component = materials.add(
            _library(
                name, version, "pypi", hashes=_sha256(*hashes),
                properties=[Property(name="megatron-byteps:groups", value=" ".join(groups))],
            )
        )  # fmt: skip
        for group in groups:
            by_group.setdefault(group, {})[name] = component
    return by_group


def _sodium(materials: Materials, folder: Path) -> Component:
    """Add libsodium as scripts/lib/system.sh fetched it, with the distribution's patches."""
    name, version, distribution = (folder / "versions").read_text(encoding="utf-8").split()
    about = {"arch": "source", "distro": distribution}
    purl = PackageURL("deb", distribution.partition("-")[0], name, version, about)
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


def collect(release: Release, folder: Path, sodium_folder: Path) -> Materials:
    """Return the materials of the files in a release's folder.

    Raises:
        ReleaseError: the contents of a file in the folder are not known.
    """
    main = Component(
        type=ComponentType.APPLICATION, name="megatron-byteps", version=release.version,
        bom_ref=release.name, licenses=[LicenseExpression("Apache-2.0")],
        properties=[Property(name="megatron-byteps:commit", value=release.commit)],
    )  # fmt: skip
    materials = Materials(release, main)
    # A series for a commit is for users' own checkouts. Nothing that is released is made of it.
    trees = {
        upstream.name: _upstream(materials, upstream)
        for upstream in load_lock(ROOT)
        if upstream.sha256
    }
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
    sodium = _sodium(materials, sodium_folder)
    for path in sorted(folder.iterdir()):
        is_image = path.name.endswith(IMAGE_SUFFIX)
        file = Component(
            type=ComponentType.CONTAINER if is_image else ComponentType.FILE,
            name=path.name, bom_ref=path.name, hashes=_sha256(sha256_file(path)),
        )  # fmt: skip
        if path.name.startswith("byteps-server-") or path.name.endswith(".whl"):
            materials.add(file, [trees["byteps"], sodium])
        elif match := re.match(r"megatron-byteps-worker-(ray-|hf-|rl-|)", path.name):
            group = groups[match[1].strip("-") or "base"]
            materials.add(file, [*trees.values(), sodium, group])
        elif path.name == f"megatron_byteps-{release.version}.tar.gz":
            materials.add(file, [trees["byteps"]])
        elif path.name == f"{release.name}-checkout.tar.gz":
            materials.add(file, [*trees.values(), *groups.values()])
        else:
            raise ReleaseError(f"{path}: no rule here says what the file holds")
    return materials


def write(materials: Materials, path: Path) -> None:
    """Write the bill of materials. Raises ReleaseError if it breaks its schema."""
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
