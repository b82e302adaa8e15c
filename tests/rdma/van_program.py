"""Builds van_test, the program that tries a transport without the engine above it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "build/byteps"
FOLDER = REPOSITORY / "build/cmake-van-test"
PROGRAM = FOLDER / "van_test"


class BuildError(Exception):
    """It could not be built; the text has the compiler's last words."""


def _run(*command: str | Path) -> None:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=280, check=False
    )
    if ended.returncode != 0:
        raise BuildError(f"'{command[0]}' failed:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")


def build_van_test() -> Path:
    """Compiles what has changed; the folder stays. Raises BuildError."""
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = str(scripts / "cmake") if (scripts / "cmake").exists() else shutil.which("cmake")
    if cmake is None or not SOURCE.is_dir():
        raise BuildError(f"cmake or {SOURCE} is not there: run 'make setup'")
    _run(
        *(cmake, "-G", "Ninja", "-S", SOURCE, "-B", FOLDER),
        *("-DBYTEPS_BUILD_TESTS=ON", "-DBYTEPS_BUILD_PYTHON=OFF", "-DBYTEPS_WITH_CUDA=OFF"),
        *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    _run(cmake, "--build", FOLDER, "--target", "van_test", "--parallel", "2")
    return PROGRAM
