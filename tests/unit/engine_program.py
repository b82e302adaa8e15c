"""Builds engine_test, the worker with a channel and a GPU that tests play."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "build/byteps"
FOLDER = REPOSITORY / "build/cmake-engine-test"
LIMIT_S = 1200
"""For a machine on which others build as well."""


class BuildError(Exception):
    """It could not be built; the text has the compiler's last words."""


def _run(*command: str | Path) -> None:
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode != 0:
        raise BuildError(f"'{command[0]}' failed:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")


def build_engine_test() -> Path:
    """Compiles what has changed; the folder stays. Raises BuildError."""
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = str(scripts / "cmake") if (scripts / "cmake").exists() else shutil.which("cmake")
    if cmake is None or not SOURCE.is_dir():
        raise BuildError(f"cmake or {SOURCE} is not there: run 'make setup'")
    _run(
        *(cmake, "-G", "Ninja", "-S", SOURCE, "-B", FOLDER, "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -g"),
        *("-DBYTEPS_BUILD_TESTS=ON", "-DBYTEPS_BUILD_PYTHON=OFF", "-DBYTEPS_WITH_CUDA=OFF"),
        *("-DBYTEPS_WITH_RDMA=OFF", "-DBYTEPS_WITH_PROMETHEUS=OFF"),
        *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    _run(cmake, "--build", FOLDER, "--target", "engine_test", "--parallel", "2")
    return FOLDER / "engine_test"
