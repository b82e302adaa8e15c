"""Shipped files: bill of materials, a whole release made twice, extras, modules."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts.children import captured
from byteps.patching.series import load_lock
from scripts.releasekit.contents import ROOT, SUMS, Release, pins, ship_tools
from tests.images.containers import CACHE

RELEASE = Release(version="1.2", commit="c" * 40, epoch=1_000_000_000)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with files that are named like a release's."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name in (
        "megatron_byteps-1.2-cp312.whl",
        "megatron_byteps-1.2.tar.gz",
        "byteps-server-1.2.tar.gz",
        "byteps-server-1.2.image.tar.gz",
        "megatron-byteps-worker-ray-1.2.image.tar.gz",
        f"{RELEASE.name}-checkout.tar.gz",
    ):
        (folder / name).write_text(name)
    return folder


def _write(folder: Path, out: Path, sodium: str = "libsodium 1.0.18-1+deb12u1 debian-12\n") -> str:
    """Runs the writer of the bill; returns the text of its error."""
    (out.parent / "versions").write_text(sodium)
    command: list[str | Path] = [ship_tools() / "python", "-m", "scripts.releasekit.sbom"]
    command += ["--release", json.dumps(asdict(RELEASE)), "--sodium", out.parent, "--out", out]
    done = captured([*command, folder], 300, cwd=ROOT)
    assert (done.returncode == 0) == out.exists(), done.stderr
    return done.stderr


@pytest.mark.slow
def test_bill_of_materials(files: Path, tmp_path: Path) -> None:
    """The bill lists each file's contents; the writer itself checks it against the schema."""
    bill = tmp_path / "bill.json"
    assert _write(files, bill) == ""
    read: dict[str, Any] = json.loads(bill.read_text())
    assert read["metadata"]["component"]["version"] == RELEASE.version
    assert read["metadata"]["timestamp"] == "2001-09-09T01:46:40+00:00"
    components = {component["bom-ref"]: component for component in read["components"]}
    needs = {component["ref"]: set(component.get("dependsOn", [])) for component in read["dependencies"]}
    names = {path.name for path in files.iterdir()}
    assert needs[RELEASE.name] == names

    sodium = "pkg:deb/debian/libsodium@1.0.18-1%2Bdeb12u1?arch=source&distro=debian-12"
    assert components[sodium]["cpe"] == "cpe:2.3:a:libsodium:libsodium:1.0.18:*:*:*:*:*:*:*"
    (patched,) = (reference for reference in components if reference.startswith("patched:byteps@"))
    assert needs[patched] == {"ps-lite"}
    upstream = load_lock(ROOT)[0]
    pedigree = components[patched]["pedigree"]
    assert pedigree["ancestors"][0]["hashes"][0]["content"] == upstream.sha256
    assert len(pedigree["patches"]) == len([*upstream.patches.glob("*.patch")])
    for name in ("megatron_byteps-1.2-cp312.whl", "byteps-server-1.2.tar.gz"):
        assert needs[name] == {patched, sodium}
        assert components[name]["hashes"]
    assert needs["megatron_byteps-1.2.tar.gz"] == {patched}
    worker = needs["megatron-byteps-worker-ray-1.2.image.tar.gz"]
    assert {"locks/ray.lock", patched, sodium} < worker
    of_ray = {f"pkg:pypi/{n}@{v}" for (n, v), (groups, _) in pins().items() if "ray" in groups}
    assert needs["locks/ray.lock"] == of_ray
    assert needs["byteps-server-1.2.image.tar.gz"] == {patched, sodium}


@pytest.mark.slow
def test_a_bill_leaves_nothing_out(files: Path, tmp_path: Path) -> None:
    (files / "other.zip").touch()
    assert "other.zip: no rule here says what" in _write(files, tmp_path / "bill.json")


def _released(root: Path, cache: Path, **more: str) -> dict[str, str]:
    """Makes a release in a new clone, with this checkout's environments; returns its checksums."""
    subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
    (root / "build").mkdir()
    for name in ("venv", "venv-ship"):
        (root / "build" / name).symlink_to(ROOT / "build" / name)
    cache.mkdir()
    (cache / "sdists").symlink_to(CACHE / "sdists")
    env = {**os.environ, "PYTHONPATH": str(root), "MEGATRON_BYTEPS_CACHE": str(cache), **more}
    subprocess.run([root / "scripts/apply_patches.sh"], check=True, env=env, timeout=600)
    command: list[str | Path] = [root / "build/venv/bin/python", "scripts/release.py", "--draft"]
    done = captured(
        [*command, "--images", "none", "--arch", platform.machine()], 3000, env=env, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (folder,) = (root / "build/release").iterdir()
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    lines = [line.split() for line in (folder / SUMS).read_text().splitlines()]
    return {name: digest for digest, name in lines}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_release_of_two_checkouts(tmp_path: Path) -> None:
    """A commit that is compiled in two places gives the same bytes, and the patches in its archive
    apply."""
    ship_tools()
    first = _released(tmp_path / "one", tmp_path / "cache")
    again = _released(tmp_path / "another-place", tmp_path / "other", CCACHE_DISABLE="1")
    assert first == again
    assert {name.split("-")[0] for name in first} == {"byteps", "megatron", "megatron_byteps"}
    (archive,) = (tmp_path / "one/build/release").glob("*/*-checkout.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("megatron-byteps-*")
    subprocess.run([unpacked / "scripts/apply_patches.sh"], check=True, timeout=600)


CMAKE = """#!/bin/sh
case "$1" in
  --build) {edit} ;;
  --install) mkdir -p "$5/bin"; cp /bin/true "$5/bin/byteps-server" ;;
esac
"""


@pytest.mark.parametrize("edit", ["", "echo edited >>README.md"])
def test_a_checkout_that_changes_is_not_built_of_two_commits(tmp_path: Path, edit: str) -> None:
    root, venv = tmp_path / "root", tmp_path / "root/build/venv/bin"
    subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(ROOT / "build/venv/bin/python")
    (venv / "cmake").write_text(CMAKE.format(edit=edit or ":"))
    (venv / "cmake").chmod(0o755)
    (root / "build/byteps").symlink_to(ROOT / "build/byteps")
    (tmp_path / "cache").mkdir()
    for sources in CACHE.glob("libsodium-*"):
        (tmp_path / "cache" / sources.name).symlink_to(sources)
    words = ("--server-only", "--arch", platform.machine(), "--out", tmp_path / "out")
    env = {**os.environ, "MEGATRON_BYTEPS_CACHE": str(tmp_path / "cache")}
    done = captured([root / "scripts/wheel.sh", *words], 300, env=env, cwd=root)
    made = [path.name for path in (tmp_path / "out").iterdir()]
    cached = [*tmp_path.glob("cache/servers/*/byteps-server")]
    if edit:
        assert "error: the checkout changed while it was built" in done.stderr
        assert (done.returncode, made, cached) == (1, [], [])
    else:
        assert done.returncode == 0, done.stderr
        assert (len(made), len(cached)) == (1, 1)


# The locks have the packages that the extras require.


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", PROJECT["optional-dependencies"])
def test_the_locked_environment_has_the_requirements_of_each_extra(name: str) -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "scripts/locks.py", "show", name],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    versions = dict(re.findall(r"^([a-z0-9-]+)(?:\[[^]]*\])?==([^ ]+)", shown.stdout, re.MULTILINE))
    versions[PROJECT["name"]] = PROJECT["version"]
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][name]]
    for requirement in map(Requirement, required):
        assert Version(versions[requirement.name]) in requirement.specifier, requirement


# Every installed Python module has a test here.


MODULES = {
    "byteps/__init__.py": "",
    "byteps/c10d_plugin.py": "tests/multiproc/test_c10d.py",
    "byteps/cli/__init__.py": "tests/unit/test_cli.py",
    "byteps/cli/__main__.py": "tests/unit/test_cli.py",
    "byteps/cli/bench.py": "tests/multiproc/test_commands.py",
    "byteps/cli/check.py": "tests/megatron/test_check.py",
    "byteps/cli/doctor.py": "tests/multiproc/test_commands.py",
    "byteps/cli/nodes.py": "tests/multiproc/test_commands.py",
    "byteps/cli/patch.py": "tests/patches/test_target.py",
    "byteps/cost_model.py": "tests/unit/test_forecast.py",
    "byteps/distribution.py": "tests/unit/test_distribution.py",
    "byteps/forecast/__init__.py": "tests/unit/test_forecast.py",
    "byteps/forecast/learning.py": "tests/unit/test_forecast.py",
    "byteps/forecast/machines.py": "tests/unit/test_forecast.py",
    "byteps/forecast/needs.py": "tests/unit/test_forecast.py",
    "byteps/forecast/rows.py": "tests/unit/test_forecast.py",
    "byteps/forecast/training.py": "tests/unit/test_forecast.py",
    "byteps/forecast/words.py": "tests/unit/test_forecast.py",
    "byteps/launcher/__init__.py": "",
    "byteps/launcher/addresses.py": "tests/unit/test_embedded_choices.py",
    "byteps/launcher/child.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/embedded.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/embedded_nodes.py": "tests/unit/test_embedded_choices.py",
    "byteps/launcher/host_servers.py": "tests/unit/test_embedded_choices.py",
    "byteps/launcher/leaving.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/meeting.py": "tests/unit/test_meeting.py",
    "byteps/launcher/places.py": "tests/multiproc/test_embedded.py",
    "byteps/launcher/start.py": "tests/multiproc/test_embedded.py",
    "byteps/logs.py": "tests/multiproc/test_logs.py",
    "byteps/patching/__init__.py": "",
    "byteps/patching/hunks.py": "tests/patches/test_target.py",
    "byteps/patching/series.py": "tests/patches/test_target.py",
    "byteps/patching/target.py": "tests/patches/test_target.py",
    "byteps/patching/writing.py": "tests/patches/test_target.py",
    "byteps/routing.py": "tests/megatron/test_routes.py",
    "byteps/server/__init__.py": "tests/multiproc/test_push_pull.py",
    "byteps/sizing.py": "tests/unit/test_sizing.py",
    "byteps/torch/__init__.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/agreement.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/arrivals.py": "tests/unit/test_step_machine.py",
    "byteps/torch/block_kernels.py": "tests/unit/test_step_machine.py",
    "byteps/torch/broadcast.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/c10d/__init__.py": "",
    "byteps/torch/c10d/checks.py": "tests/multiproc/test_c10d_torch.py",
    "byteps/torch/c10d/events.py": "tests/multiproc/test_c10d_torch.py",
    "byteps/torch/c10d/hooks.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/identity.py": "tests/multiproc/test_c10d_groups.py",
    "byteps/torch/c10d/reductions.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/replaced.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/scatters.py": "tests/multiproc/test_fsdp.py",
    "byteps/torch/c10d/ddp.py": "tests/multiproc/test_c10d.py",
    "byteps/torch/c10d/work.py": "tests/unit/test_c10d_work.py",
    "byteps/torch/c10d/work_of_many.py": "tests/multiproc/test_c10d_torch.py",
    "byteps/torch/compression.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/diloco.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/distributed_optimizer.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/engine.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/feedback_state.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/figures.py": "tests/multiproc/test_status.py",
    "byteps/torch/fsdp.py": "tests/multiproc/test_fsdp.py",
    "byteps/torch/gradient_averager.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/in_flight.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/members.py": "tests/multiproc/test_replicas.py",
    "byteps/torch/names.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/node_groups.py": "tests/unit/test_nodes.py",
    "byteps/torch/nodes.py": "tests/unit/test_nodes.py",
    "byteps/torch/operations.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/ops.py": "tests/multiproc/test_push_pull.py",
    "byteps/torch/routes.py": "tests/megatron/test_routes.py",
    "byteps/torch/server_bucket.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_optimizer.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_tensor.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/server_transfer.py": "tests/unit/test_nodes.py",
    "byteps/torch/session.py": "tests/multiproc/test_lifecycle.py",
    "byteps/torch/spans.py": "tests/multiproc/test_observed.py",
    "byteps/torch/step_machine.py": "tests/unit/test_step_machine.py",
    "byteps/torch/step_metrics.py": "tests/multiproc/test_observed.py",
    "byteps/torch/streams.py": "tests/unit/test_streams.py",
    "byteps/torch/wire.py": "tests/multiproc/test_server_optimizer.py",
    "byteps/torch/world.py": "tests/multiproc/test_push_pull.py",
    "byteps/trial/__init__.py": "",
    "byteps/trial/__main__.py": "tests/unit/test_trial.py",
    "byteps/trial/child.py": "tests/unit/test_trial.py",
    "byteps/trial/command.py": "tests/unit/test_trial.py",
    "byteps/trial/hosts.py": "tests/unit/test_trial.py",
    "byteps/trial/meter.py": "tests/netkit/test_trial.py",
    "byteps/trial/reports.py": "tests/unit/test_trial.py",
    "byteps/trial/verdict.py": "tests/unit/test_trial.py",
}
"""All modules of the wheel, and the test that runs each on a CPU. A new module is left out of the
wheel (wheel.exclude in pyproject.toml) or gets a test, and a line here."""


def test_each_module_of_the_wheel_has_its_test() -> None:
    files = importlib.metadata.files(PROJECT["name"])
    assert files is not None
    modules = {str(file) for file in files if file.suffix == ".py" and file.parts[0] == "byteps"}
    data = {name for name in modules if name.startswith("byteps/patching/data/")}
    assert modules - data == set(MODULES)
    for module, test in MODULES.items():
        assert not test or (ROOT / test).is_file(), module
