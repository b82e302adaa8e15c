"""BytePS builds with and without what is optional, and links only what every machine has."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "byteps"
PARTS = ("RDMA",)
"""What a build may leave out."""


def run(*command: str | Path) -> str:
    """The command's output; the test fails with it when the command does."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\nexit {done.returncode}\n{done.stdout}")
    return done.stdout


def configure(folder: Path, *options: str) -> str:
    tools = Path(sysconfig.get_path("scripts"))
    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    return run(
        tools / "cmake", "-G", "Ninja", "-S", SOURCE, "-B", folder,
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11}", *options,
    )  # fmt: skip


def build(folder: Path) -> None:
    run(Path(sysconfig.get_path("scripts")) / "cmake", "--build", folder, "--parallel", "2")


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_builds_without_and_with_what_is_optional(tmp_path: Path) -> None:
    without = configure(tmp_path, *(f"-DBYTEPS_WITH_{part}=OFF" for part in PARTS))
    assert "RDMA: compiled in" not in without
    build(tmp_path)
    libraries = run("ldd", tmp_path / "byteps-server")
    for absent in ("libpython", "libcuda", "libtorch", "libibverbs", "libnccl"):
        assert absent not in libraries

    on = [f"-DBYTEPS_WITH_{part}=ON" for part in PARTS]
    output = configure(tmp_path, *on)
    assert "RDMA: compiled in" in output
    build(tmp_path)
    # RDMA and CUDA are found when they are asked for, never before.
    module = next(tmp_path.glob("c_lib*" + importlib.machinery.EXTENSION_SUFFIXES[0]))
    for built in (tmp_path / "byteps-server", module):
        libraries = run("ldd", built)
        for absent in ("libpython", "libcuda", "libtorch", "libibverbs", "librdmacm", "libnccl"):
            assert absent not in libraries
