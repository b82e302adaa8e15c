#!/usr/bin/env python3
"""Builds the C++ programs of the tests in one folder: all of them before a whole `make test`.

A test calls :func:`build` for its programs; programs that are up to date are left alone. A build
with a sanitizer has its own folder and uses clang, which `scripts/tools.sh clang` installs.
:func:`made_once` makes things once per session, and :class:`SumJob` is a job of such programs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import progress
from scripts.children import Late, Spawned, captured, last_lines

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

SOURCE = REPOSITORY / "build/byteps"
FOLDER = REPOSITORY / "build/cmake-tests"
PROGRAMS = {
    "byteps-server": "the scheduler and the servers, as the wheel has it",
    "connection_test": "both ends of TCP connections, and a relay that damages what they say",
    "scheduler_without_recovery": "a scheduler that ends the job at the first loss",
    "simulate": "whole jobs, in threads and time that a seed decides",
    "sum_worker": "a worker without Python, which checks every sum",
    "swarm": "thousands of nodes in one process, for a scheduler",
    "tls_test": "encrypted connections, without a job",
    "unit_test": "each part alone, with a channel and a GPU that tests play",
}
SANITIZED = {
    "address": ("connection_test", "unit_test", "sum_worker", "byteps-server", "fuzzers"),
    "thread": ("connection_test", "unit_test", "sum_worker", "byteps-server"),
}
"""Programs by the sanitizers with which they can be built."""
BUILD_LIMIT_S = 3600
"""Limit in seconds, for a machine with other builds at the same time."""


class BuildError(Exception):
    """Raised if the build failed. The text has the compiler's last lines."""


def build(*programs: str, sanitize: str = "") -> Path:
    """Compile these programs if they changed, and return their folder.

    Args:
        programs: Names in PROGRAMS or SANITIZED.
        sanitize: A key of SANITIZED, or "" for none.

    Raises:
        BuildError: A tool is missing, or the compiler fails.
    """
    unknown = set(programs) - set(SANITIZED[sanitize] if sanitize else PROGRAMS)
    if unknown:
        raise ValueError(f"no programs of the tests: {sorted(unknown)}")
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = str(scripts / "cmake") if (scripts / "cmake").exists() else shutil.which("cmake")
    if cmake is None or not SOURCE.is_dir():
        raise BuildError(f"cmake or {SOURCE} is not there: run 'make setup'")
    folder = FOLDER
    compiler = os.environ.get("CXX", "g++")
    options: list[str] = []
    if sanitize:
        folder = FOLDER.with_name(f"cmake-{sanitize}")
        compiler = _run(REPOSITORY / "scripts/tools.sh", "clang").split()[-1]
        options = [f"-DBYTEPS_SANITIZE={sanitize}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        # RDMA does not run in these builds. In one of them clang checks its locks (base/mutex.h).
        options += [f"-DBYTEPS_WITH_RDMA={'AUTO' if sanitize == 'thread' else 'OFF'}"]
    with _alone_in(folder):
        configure = [
            # The build begins afresh, because the folder may be from a checkout that was moved.
            *(cmake, "--fresh", "-G", "Ninja", "-S", str(SOURCE), "-B", str(folder)),
            *("-DBYTEPS_BUILD_TESTS=ON", "-DBYTEPS_BUILD_PYTHON=OFF", *options),
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            # The compiler has the same name as in the wheel's build, because ccache depends on it.
            f"-DCMAKE_CXX_COMPILER={compiler}",
            *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
        ]
        # This takes seconds; after a change of cmake's files ninja repeats it.
        configured = folder / "configured"
        if not configured.exists() or configured.read_text() != "\n".join(configure):
            _run(*configure)
            configured.write_text("\n".join(configure))
        compile_all: list[str | Path] = [cmake, "--build", folder, "--parallel", "2"]
        compile_all += ["--target", *programs]
        log = folder / "build.log"
        try:
            status = progress.run(
                f"building {folder.name}", compile_all, log, timeout_s=BUILD_LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"'{cmake} --build' still ran after {BUILD_LIMIT_S} s") from error
        if status != 0:
            said = log.read_text(errors="replace")[-8000:]
            raise BuildError(f"'{cmake} --build' failed:\n{said}")
        if not sanitize:
            _write_compile_commands(folder / "compile_commands.json")
    return folder


def _write_compile_commands(made: Path) -> None:
    """Write build/compile_commands.json for clangd, with the paths of the edited files."""
    written, overlay = REPOSITORY / "build" / made.name, REPOSITORY / SOURCE.name
    if written.exists() and written.stat().st_mtime > made.stat().st_mtime:
        return
    entries = json.loads(made.read_text())
    for entry in entries:
        source = overlay / Path(entry["file"]).relative_to(SOURCE)
        if source.exists():
            entry["command"] = entry["command"].replace(entry["file"], str(source))
            entry["file"] = str(source)
        entry["command"] = entry["command"].replace(f" -I{SOURCE} ", f" -I{overlay} -I{SOURCE} ")
    written.write_text(json.dumps(entries, indent=1))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder. Of parallel tests, one builds there, and the others wait."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    try:
        ended = captured(words, BUILD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"'{' '.join(words[:2])}' still ran after {BUILD_LIMIT_S} s") from error
    if ended.returncode != 0:
        said = f"{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
        raise BuildError(f"'{' '.join(words[:2])}' failed:\n{said}")
    return ended.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--sanitize", choices=SANITIZED, default="", help="build with this")
    options = parser.parse_args()
    every = SANITIZED[options.sanitize] if options.sanitize else tuple(PROGRAMS)
    try:
        print(build(*(options.programs or every), sanitize=options.sanitize))
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Get a folder of this name, filled by the first process of the session that asks."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the parent folder of all workers' folders
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder


LIMIT_S = 240.0
"""Limit in seconds, for a busy machine, and a guest with an emulated CPU."""
BYTES = 1 << 20
"""Bytes of each of a worker's two tensors."""


class SumJob:
    """A job of native programs in which every worker checks every sum.

    Processes are stored by title. The creator ends the job with `finish` or `kill`.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        """
        Create the job without processes.

        Args:
            programs: Folder of byteps-server and sum_worker.
            folder: Folder for the processes' files.
        """
        self._programs = programs
        self._folder = folder
        self.processes: dict[str, Spawned] = {}

    def server_command(self, role: str) -> list[str]:
        """Make the command of a scheduler or a server."""
        return [str(self._programs / "byteps-server"), "--role", role]

    def worker_command(self, rounds: int) -> list[str]:
        """Make the command of a worker that pauses after each round."""
        program = str(self._programs / "sum_worker")
        sizes = ["--rounds", str(rounds), "--bytes", str(BYTES)]
        return [program, "--pause-ms", "5", "--tensors", "2", *sizes]

    def spawn(self, title: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.processes[title] = Spawned(title, list(command), dict(env), self._folder)

    def demand_running(self) -> None:
        """Check that no process has ended."""
        for process in self.processes.values():
            assert process.running, process.text

    def finish(self) -> None:
        """Check that all sums were right, and that every process ended well."""
        deadline = time.monotonic() + LIMIT_S
        for title, process in self.processes.items():
            try:
                assert process.wait(deadline - time.monotonic()) == 0, last_lines(process.log)
            except Late as error:
                raise AssertionError(f"{title}: {error}") from None

    def kill(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes.values():
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
