"""The wheels that are shipped: what they need, what is in them, and that they work installed."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.build.elf import needs
from tests.images.containers import ROOT, run

# One worker, in embedded mode: the wheel's own scheduler and server.
PROGRAM = """
import torch, byteps.torch as bps
bps.init()
tensor = torch.arange(100_000, dtype=torch.float32)
assert torch.equal(bps.push_pull(tensor, average=False, name="t"), tensor)
bps.shutdown()
print("summed by", bps.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this machine and Python."""
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "scripts/wheel.sh", "--arch", platform.machine(), "--out", folder)
    (made,) = folder.glob("byteps-*.whl")
    return made


def demand_portable(wheel: Path, machine: str, folder: Path) -> None:
    assert f"-manylinux_2_34_{machine}.whl" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    binaries = [name for name in names if name.endswith((".so", "/byteps-server"))]
    assert len(binaries) == 2, binaries
    # Python finds a module by this name alone.
    (module,) = [name for name in binaries if name.endswith(".so")]
    assert module.endswith(f".cpython-{wheel.name.split('-cp')[1][:3]}-{machine}-linux-gnu.so")
    for name in binaries:
        found = needs(folder / name)
        assert found.machine == machine
        found.demand_portable()


@pytest.mark.timeout(1800)
def test_what_it_needs_and_has(wheel: Path, tmp_path: Path) -> None:
    demand_portable(wheel, platform.machine(), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "byteps/torch/__init__.py" in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".tar.gz", ".zip"))]
    kept = [name for name in names if "/licenses/" in name and not name.endswith("/")]
    licences = {Path(name).name for name in kept}
    assert licences == {"LICENSE", "libsodium.txt", "pybind11.txt"}


@pytest.mark.timeout(600)
def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    # An environment of its own, which borrows torch: the server is found next to its Python.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
    python = environment / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([python, *install], check=True, timeout=300)
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", PROGRAM],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"summed by {site}" in done.stdout


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_arm64_wheel(wheel_for: Callable[[str], Path], tmp_path: Path) -> None:
    demand_portable(wheel_for("aarch64"), "aarch64", tmp_path)
