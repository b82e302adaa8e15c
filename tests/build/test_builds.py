"""Builds: with and without optional parts, for GPU drivers, with locks checked, for arm64."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.children import captured
from tests.images.containers import needs
from tests.multiproc.cluster import Cluster, Nursery, Spawned

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "byteps"
PARTS = ("RDMA",)
"""Optional parts of a build."""


def run(*command: str | Path) -> str:
    """Returns the command's output. If the command fails, the test fails with that output."""
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
    return run(
        tools / "cmake", "-G", "Ninja", "-S", SOURCE, "-B", folder,
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
        *options,
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
    # The libraries of RDMA and CUDA are loaded when they are needed, never before.
    module = tmp_path / "c_lib.abi3.so"
    for built in (tmp_path / "byteps-server", module):
        libraries = run("ldd", built)
        for absent in ("libpython", "libcuda", "libtorch", "libibverbs", "librdmacm", "libnccl"):
            assert absent not in libraries


# byteps/device over a driver that is found at run time: a fake one, an old one, and none.


OVERLAY = ROOT / "byteps"
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 500.0
CXX = (os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-Wall", "-Wextra")


def compiled(*words: str | Path) -> None:
    subprocess.run([*CXX, *map(str, words)], check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "device_program"
    compiled(
        "-I", OVERLAY,
        PROGRAMS / "device_program.cc",
        OVERLAY / "byteps/device/cuda.cc", OVERLAY / "byteps/device/cuda_api.cc",
        "-o", path, "-ldl", "-pthread",
    )  # fmt: skip
    return path


def driver(folder: Path, *options: str) -> Path:
    """Compiles a libcuda.so.1 into the folder; returns the folder."""
    out = folder / "libcuda.so.1"
    options = ("-DFAKE_DRIVER", *options)
    compiled("-fPIC", "-shared", *options, PROGRAMS / "device_program.cc", "-o", out)
    return folder


def run_program(program: Path, drivers: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return captured([program], LIMIT_S, env={**os.environ, "LD_LIBRARY_PATH": str(drivers), **env})


def test_copies_and_what_they_leave(program: Path, tmp_path: Path) -> None:
    done = run_program(program, driver(tmp_path))
    assert done.returncode == 0, done.stdout
    out_of_memory, no_such_device = done.stdout.splitlines()
    assert "pinning 2199023255552 bytes of host memory" in out_of_memory
    assert "out of memory" in out_of_memory
    assert "(CUDA_ERROR_OUT_OF_MEMORY)" in out_of_memory
    assert "cuDeviceGet" in no_such_device


def test_a_driver_that_lacks_a_function(program: Path, tmp_path: Path) -> None:
    done = run_program(program, driver(tmp_path, "-DWITHOUT_COPIES"))
    assert done.returncode == 1
    assert "libcuda.so.1 has no cuMemcpyDtoHAsync_v2" in done.stdout
    assert "too old" in done.stdout


def test_a_driver_without_a_gpu(program: Path, tmp_path: Path) -> None:
    done = run_program(program, driver(tmp_path), FAKE_NO_GPU="1")
    assert done.returncode == 1
    assert "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)" in done.stdout


def test_no_driver(program: Path, tmp_path: Path) -> None:
    # This file is no library. It hides a real driver of this machine.
    (tmp_path / "libcuda.so.1").write_text("none")
    done = run_program(program, tmp_path)
    assert done.returncode == 1
    assert "need the NVIDIA driver's library" in done.stdout


# Clang checks which lock guards what: see base/mutex.h.


SNIPPET = Path(__file__).parent / "programs" / "guarded.cc"
HEADER = ROOT / "byteps/byteps/base/mutex.h"
MISTAKES = (
    r"reading variable 'count_' requires holding mutex 'mu_'",
    r"writing variable 'count_' requires holding mutex 'mu_'",
    r"calling function 'AddHere' requires holding mutex 'mu_'",
    r"reading variable 'count_' requires holding mutex 'mu_'",
    r"mutex 'mu_' is still held at the end of function",
    r"writing variable 'shared_' requires holding mutex 'shared_mu_' exclusively",
    r"calling function 'Wait.*' requires holding mutex 'mu_'",
)
"""Patterns of clang's warnings, in the order in which SNIPPET causes them."""
UNSEEN = re.compile(
    r"std::(mutex|shared_mutex|recursive_mutex|condition_variable|lock_guard|unique_lock|"
    r"shared_lock|scoped_lock)\b"
)


def _compile(*more: str) -> subprocess.CompletedProcess[str]:
    clang = subprocess.run(
        [ROOT / "scripts/tools.sh", "clang"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout.split()[-1]
    options = ["-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety"]
    options += [*more, f"-I{HEADER.parents[2]}"]
    return captured([clang, *options, str(SNIPPET)], 120)


@pytest.mark.requires("clang")
def test_what_takes_its_locks_is_accepted() -> None:
    compiled = _compile()
    assert (compiled.returncode, compiled.stderr) == (0, "")


@pytest.mark.requires("clang")
def test_forgotten_locks_are_errors() -> None:
    compiled = _compile("-DMISTAKES")
    assert compiled.returncode != 0
    errors = [line for line in compiled.stderr.splitlines() if " error: " in line]
    errors.sort(key=lambda line: int(line.split(":")[1]))
    assert len(errors) == len(MISTAKES), compiled.stderr
    for error, mistake in zip(errors, MISTAKES, strict=True):
        assert re.search(mistake, error), error
        assert "-Wthread-safety" in error


def test_all_builds_by_clang_are_checked() -> None:
    text = (ROOT / "byteps/CMakeLists.txt").read_text()
    assert "add_compile_options(-Wthread-safety -Werror=thread-safety)" in text


def test_no_lock_goes_unseen() -> None:
    """Our own locks are used everywhere, since clang cannot check locks of the standard library."""
    sources = [path for path in (ROOT / "byteps").rglob("*") if path.suffix in (".h", ".cc")]
    assert HEADER in sources
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        if path != HEADER and "tests" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNSEEN.search(line)
    ]
    assert not lines, "use base/mutex.h instead"


# The arm64 server, cross-compiled, as the server of x86-64 workers, on an emulated CPU.


QEMU = "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"
"""Folder of arm64's C library of Debian's cross-compiler."""
CPUS = {"cortex-a53": "armv8.0", "cortex-a76": "fp16 and no bf16", "max": "all that there is"}
PARTITION = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of byteps-server in the shipped archive."""
    folder = tmp_path_factory.mktemp("arm64")
    done = captured(
        [ROOT / "scripts/wheel.sh", "--server-only", "--arch", "aarch64", "--out", folder], 1500
    )
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("byteps-server-*-linux-aarch64.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (program,) = folder.glob("byteps-server-*/bin/byteps-server")
    return program


def emulated(program: Path, cpu: str) -> list[str]:
    return [QEMU, "-cpu", cpu, "-L", LIBRARIES, str(program)]


class ArmCluster(Cluster):
    """A cluster whose servers run under an emulator of an arm64 CPU. The scheduler and the workers
    run natively, on this machine's CPU.
    """

    command: list[str]

    def start_server(self) -> Spawned:
        title = f"server {len(self.servers)}"
        command = [*self.command, "--role", "server"]
        server = Spawned(title, command, self.node_environment(), self.folder)
        self.servers.append(server)
        return server


@pytest.fixture(params=CPUS)
def cluster(
    request: pytest.FixtureRequest,
    server: Path,
    nursery: Nursery,
    run_dir: Path,
) -> Iterator[ArmCluster]:
    env = {"BYTEPS_PARTITION_BYTES": str(PARTITION), "BYTEPS_OP_TIMEOUT_S": "60"}
    with ArmCluster(run_dir / "cluster", nursery, workers=2, servers=2, env=env) as made:
        made.command = emulated(server, request.param)
        yield made


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_arm64_server_needs_only_the_c_library(server: Path) -> None:
    elf = needs(server)
    assert elf.machine == "aarch64"
    assert platform.machine() == "x86_64", "elsewhere this would be no cross-compilation"
    elf.demand_portable()


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.parametrize("cpu", CPUS)
def test_the_arm64_server_chooses_kernels_by_the_cpu(server: Path, cpu: str) -> None:
    said = subprocess.run(
        [*emulated(server, cpu), "--features"], capture_output=True, text=True, check=True
    ).stdout
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["additions"] == "armv8-a"
    # RDMA is compiled in, but this machine has no arm64 libibverbs to load.
    assert lines["rdma"].startswith("no: ") and "libibverbs.so.1" in lines["rdma"]


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_right_sums_in_every_dtype(cluster: ArmCluster) -> None:
    cluster.run("sums:every_dtype", timeout_s=600, partition_bytes=PARTITION)


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_blocks_of_few_bits_are_those_of_x86(cluster: ArmCluster) -> None:
    """The workers run on this machine's CPU, and compare sums with a reference to the bit."""
    cluster.set_env({"BYTEPS_DETERMINISTIC": "1", "BYTEPS_PARTITION_BYTES": "270336"})
    cluster.run("few_bits:sums", timeout_s=600)
