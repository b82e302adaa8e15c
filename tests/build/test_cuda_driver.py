"""byteps/device over a driver that is found at run time: a fake one, an old one, and none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "byteps"
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 500.0
CXX = (os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-Wall", "-Wextra")


def compiled(*words: str | Path) -> None:
    subprocess.run([*CXX, *map(str, words)], check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "device_program"
    sources = [OVERLAY / "byteps/device/cuda.cc", OVERLAY / "byteps/device/cuda_api.cc"]
    compiled(
        "-I", OVERLAY,
        PROGRAMS / "device_program.cc", *sources,
        "-o", path, "-ldl", "-pthread",
    )  # fmt: skip
    return path


def driver(folder: Path, *options: str) -> Path:
    """The folder, with a libcuda.so.1 in it."""
    out = folder / "libcuda.so.1"
    compiled("-fPIC", "-shared", *options, PROGRAMS / "fake_driver.cc", "-o", out)
    return folder


def run(program: Path, drivers: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program],
        env={**os.environ, "LD_LIBRARY_PATH": str(drivers), **env},
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


def test_copies_and_what_they_leave(program: Path, tmp_path: Path) -> None:
    done = run(program, driver(tmp_path))
    assert done.returncode == 0, done.stdout
    out_of_memory, no_such_device = done.stdout.splitlines()
    assert "pinning 2199023255552 bytes of host memory" in out_of_memory
    assert "out of memory" in out_of_memory
    assert "(CUDA_ERROR_OUT_OF_MEMORY)" in out_of_memory
    assert "cuDeviceGet" in no_such_device


def test_a_driver_that_lacks_a_function(program: Path, tmp_path: Path) -> None:
    done = run(program, driver(tmp_path, "-DWITHOUT_COPIES"))
    assert done.returncode == 1
    assert "libcuda.so.1 has no cuMemcpyDtoHAsync_v2" in done.stdout
    assert "too old" in done.stdout


def test_a_driver_without_a_gpu(program: Path, tmp_path: Path) -> None:
    done = run(program, driver(tmp_path), FAKE_NO_GPU="1")
    assert done.returncode == 1
    assert "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)" in done.stdout


def test_no_driver(program: Path, tmp_path: Path) -> None:
    # Not a library: what a machine with a real driver has is hidden by it.
    (tmp_path / "libcuda.so.1").write_text("none")
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert "need the NVIDIA driver's library" in done.stdout
