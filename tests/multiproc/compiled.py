"""Builds the C++ programs that try a transport, or a scheduler, without the engine above."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "build/byteps"
FOLDER = REPOSITORY / "build/cmake-tests"
BUILD_S = 580


class BuildError(Exception):
    """It could not be built; the text has the compiler's last words."""


def _run(*command: str | Path) -> None:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=BUILD_S,
        check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        raise BuildError(f"'{command[0]}' failed:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")


def build(target: str) -> Path:
    """Compiles what has changed; the folder stays. Raises BuildError.

    Args:
        target: a target of ``byteps/CMakeLists.txt`` that is made with BYTEPS_BUILD_TESTS.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = str(scripts / "cmake") if (scripts / "cmake").exists() else shutil.which("cmake")
    if cmake is None or not SOURCE.is_dir():
        raise BuildError(f"cmake or {SOURCE} is not there: run 'make setup'")
    _run(
        *(cmake, "-G", "Ninja", "-S", SOURCE, "-B", FOLDER),
        *("-DBYTEPS_BUILD_TESTS=ON", "-DBYTEPS_BUILD_PYTHON=OFF", "-DBYTEPS_WITH_CUDA=OFF"),
        *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    _run(cmake, "--build", FOLDER, "--target", target, "--parallel", "2")
    return FOLDER / target
