"""The wheel that is shipped: what it needs, what is in it, and that it works installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/build"))

from elf import needs  # noqa: E402

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
    folder = tmp_path_factory.mktemp("wheel")
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        [ROOT / "scripts/wheel.sh", "--arch", machine.strip(), "--out", folder],
        capture_output=True, text=True, check=False, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("byteps-*.whl")
    return made


@pytest.mark.timeout(1800)
def test_what_it_needs_and_has(wheel: Path, tmp_path: Path) -> None:
    assert "-manylinux_2_34_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    binaries = [name for name in names if name.endswith((".so", "/byteps-server"))]
    assert len(binaries) == 2, binaries
    for name in binaries:
        needs(tmp_path / name).demand_portable()
    assert not [name for name in names if name.endswith((".cc", ".h", ".tar.gz", ".zip"))]
    for left_out in ("tensorflow", "mxnet", "cross_barrier", "torch/parallel"):
        assert not [name for name in names if left_out in name], left_out
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    # An environment of its own, which borrows torch: the server is found beside its Python.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
    python = environment / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
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
