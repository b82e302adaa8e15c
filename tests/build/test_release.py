"""A release's bill of materials, and a whole release, made twice."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import tarfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts.patchkit.lock import load_lock
from scripts.releasekit.common import ROOT, pins, ship_tools
from scripts.releasekit.contents import INTEGRATIONS, SUMS, Release
from tests.images.containers import CACHE

RELEASE = Release(version="1.2+megatron.7", commit="c" * 40, epoch=1_000_000_000)
DEB = "Package: libssl3\nStatus: install ok installed\nArchitecture: amd64\nVersion: 3.0\n"
CONTROL = {"manifest.json": json.dumps([{"Layers": ["a.tar"]}]).encode()}


def _tar(files: dict[str, bytes], path: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path.write_bytes(out.getvalue())
    return out.getvalue()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder as a release's, with a real executable in wheel and archive."""
    folder = tmp_path / "files"
    folder.mkdir()
    binary = (ROOT / "build/venv/bin/byteps-server").read_bytes()
    with zipfile.ZipFile(folder / "byteps-1.2-cp312.whl", "w") as wheel:
        wheel.writestr("byteps/torch/c_lib.so", binary)
    _tar({"byteps-server-1.2/bin/byteps-server": binary}, folder / "byteps-server-1.2.tar.gz")
    with zipfile.ZipFile(folder / "megatron_byteps_rl-0.7.0-py3-none-any.whl", "w") as wheel:
        asked = ["datasets", "megatron-byteps-hf==0.7.0", 'byteps>=1; extra == "training"']
        metadata = "".join(f"Requires-Dist: {one}\n" for one in asked)
        wheel.writestr("megatron_byteps_rl-0.7.0.dist-info/METADATA", metadata)
    layer = _tar({"var/lib/dpkg/status": DEB.encode()}, tmp_path / "layer")
    for image in ("byteps-server-1.2", "megatron-byteps-worker-ray-1.2"):
        _tar({**CONTROL, "a.tar": layer}, folder / f"{image}.image.tar.gz")
    (folder / f"{RELEASE.name}.tar.gz").write_text("sources")
    return folder


def _write(folder: Path, out: Path, sodium: str = "libsodium 1.0.18-1+deb12u1 debian-12\n") -> str:
    """Runs the writer; what it printed as error."""
    (out.parent / "versions").write_text(sodium)
    command: list[str | Path] = [ship_tools() / "python", "-m", "scripts.releasekit.sbom"]
    command += ["--release", json.dumps(asdict(RELEASE)), "--sodium", out.parent, "--out", out]
    done = subprocess.run(
        [*command, folder], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode == 0) == out.exists(), done.stderr
    return done.stderr


@pytest.mark.slow
def test_bill_of_materials(files: Path, tmp_path: Path) -> None:
    """What is in each file; the writer itself checks it against the schema."""
    bill = tmp_path / "bill.json"
    assert _write(files, bill) == ""
    read: dict[str, Any] = json.loads(bill.read_text())
    assert read["metadata"]["component"]["version"] == RELEASE.version
    assert read["metadata"]["timestamp"] == "2001-09-09T01:46:40+00:00"
    components = {one["bom-ref"]: one for one in read["components"]}
    needs = {one["ref"]: set(one.get("dependsOn", [])) for one in read["dependencies"]}
    names = {path.name for path in files.iterdir()}
    assert needs[RELEASE.name] == names

    sodium = "pkg:deb/debian/libsodium@1.0.18-1%2Bdeb12u1?arch=source&distro=debian-12"
    assert components[sodium]["cpe"] == "cpe:2.3:a:libsodium:libsodium:1.0.18:*:*:*:*:*:*:*"
    (patched,) = (one for one in components if one.startswith("patched:byteps@"))
    (runtime,) = (one for one in components if "libstdc" in one)
    assert needs[patched] == {"ps-lite"}
    upstream = load_lock(ROOT)[0]
    pedigree = components[patched]["pedigree"]
    assert pedigree["ancestors"][0]["hashes"][0]["content"] == upstream.sha256
    assert len(pedigree["patches"]) == len([*upstream.patches.glob("*.patch")])
    for name in ("byteps-1.2-cp312.whl", "byteps-server-1.2.tar.gz"):
        assert {patched, sodium, runtime} <= needs[name]
        assert components[name]["hashes"]
    versions = {name: version for (name, version), (groups, _) in pins().items() if "rl" in groups}
    rl = needs["megatron_byteps_rl-0.7.0-py3-none-any.whl"]
    assert rl == {f"pkg:pypi/datasets@{versions['datasets']}"}

    image = components["megatron-byteps-worker-ray-1.2.image.tar.gz"]
    assert [one["name"] for one in image["components"]] == ["libssl3"]
    assert {"locks/ray.lock", patched, sodium, runtime} <= needs[image["bom-ref"]]
    of_ray = {f"pkg:pypi/{n}@{v}" for (n, v), (groups, _) in pins().items() if "ray" in groups}
    assert needs["locks/ray.lock"] == of_ray
    assert not [one for one in needs["byteps-server-1.2.image.tar.gz"] if "lock" in one]


@pytest.mark.slow
def test_a_bill_leaves_nothing_out(files: Path, tmp_path: Path) -> None:
    (files / "other.zip").touch()
    assert "other.zip: not known what is in it" in _write(files, tmp_path / "bill.json")
    (files / "other.zip").unlink()
    with zipfile.ZipFile(files / "byteps-1.2-cp312.whl", "w") as wheel:
        wheel.writestr("byteps/__init__.py", "")
    assert "no binary in it says what compiled it" in _write(files, tmp_path / "bill.json")


def _released(root: Path, cache: Path, **more: str) -> dict[str, str]:
    """Makes a release in a new clone, with this checkout's environments; its checksums."""
    subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
    (root / "build").mkdir()
    for name in ("venv", "venv-ship"):
        (root / "build" / name).symlink_to(ROOT / "build" / name)
    cache.mkdir()
    (cache / "sdists").symlink_to(CACHE / "sdists")
    env = {**os.environ, "PYTHONPATH": str(root), "MEGATRON_BYTEPS_CACHE": str(cache), **more}
    subprocess.run([root / "scripts/apply_patches.sh"], check=True, env=env, timeout=600)
    command: list[str | Path] = [root / "build/venv/bin/python", "scripts/release.py", "--draft"]
    done = subprocess.run(
        [*command, "--images", "none", "--arch", platform.machine()],
        cwd=root, env=env, capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (folder,) = (root / "build/release").iterdir()
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    lines = [line.split() for line in (folder / SUMS).read_text().splitlines()]
    return {name: digest for digest, name in lines}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_release_of_two_checkouts(tmp_path: Path) -> None:
    """Of one commit, in two places, compiled twice: the same bytes. Patches apply from its archive."""
    ship_tools()
    first = _released(tmp_path / "one", tmp_path / "cache")
    again = _released(tmp_path / "another-place", tmp_path / "other", CCACHE_DISABLE="1")
    assert first == again
    assert {name.split("-")[0] for name in first} == {
        "byteps", "megatron", *(f"megatron_byteps_{one}" for one in INTEGRATIONS),
    }  # fmt: skip
    (archive,) = (tmp_path / "one/build/release").glob("*/megatron-byteps-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    subprocess.run([unpacked / "scripts/apply_patches.sh"], check=True, timeout=600)
