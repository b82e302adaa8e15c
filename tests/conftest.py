"""Common parts of all tests: a folder per run, logs of failed tests, a python that has imported
torch, and a rule for skips.

A test may skip only through `@pytest.mark.requires("gpu", ...)`. Under CI every other skip, and a
module that skips itself, fails the session, so that no test suite is skipped silently.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

if TYPE_CHECKING:  # the tests of this file run a copy of it alone
    from tests.multiproc.cluster import Nursery

TAIL_LINES = 100
_LATE_S = 120.0
"""Seconds after a test's own limit until faulthandler ends the process, as in pyproject.toml."""
BROKEN_INVARIANT = "the invariant '"
"""Start of the message of a broken invariant (base/invariant.h)."""

# Tests run in parallel: torch's threads would spin and take cores from other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell makes its background jobs ignore SIGINT, and the tests' children would inherit this. No
# shell script can undo it, so the tests could not interrupt scripts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _holds_any(folder: str) -> bool:
    return Path(folder).is_dir() and any(Path(folder).iterdir())


def _has(*programs: str) -> bool:
    return all(shutil.which(program) is not None for program in programs)


def _succeeds(script: str, *arguments: str) -> bool:
    """Run a script of the repository and return whether it succeeds. What it installs stays
    installed."""
    path = Path(__file__).resolve().parents[1] / script
    command = [str(path), *arguments]
    return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode == 0


def _can_switch() -> bool:
    """Tell whether network namespaces and TAP devices exist, for tests/netkit/switch.py."""
    probe = "import sys, switch; sys.exit(not switch.available())"
    folder = Path(__file__).parent / "netkit"
    command = [sys.executable, "-c", probe]
    return subprocess.run(command, cwd=folder, timeout=100, check=False).returncode == 0


def _has_checkout(name: str) -> bool:
    """Return whether there is a checkout with this upstream's commit, at a named place or fetched
    before. Tests use no network."""
    from byteps.patching.series import load_lock

    from scripts.patchkit.tree import cache_root

    (upstream,) = (each for each in load_lock(Path(__file__).parents[1]) if each.name == name)
    cached = cache_root() / "checkouts" / upstream.commit
    return bool(os.environ.get(upstream.variable)) or cached.is_dir()


REQUIREMENTS: dict[str, Callable[[], bool]] = {
    "gpu": lambda: Path("/dev/nvidiactl").exists(),
    "nvcc": lambda: shutil.which("nvcc") is not None,
    "rdma": lambda: _holds_any("/sys/class/infiniband"),
    "root": lambda: os.geteuid() == 0,
    "sshd": lambda: (
        _has("ssh", "ssh-keygen")
        and (Path("/usr/sbin/sshd").exists() or _has("apt-get", "dpkg-deb"))
    ),
    "clang": lambda: _succeeds("scripts/tools.sh", "clang"),
    "valgrind": lambda: _succeeds("scripts/tools.sh", "valgrind"),
    "slurm": lambda: all(
        shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        for program in ("slurmctld", "slurmd", "srun", "munged")
    ),
    "megatron-main": lambda: _has_checkout("megatron-main"),
    "megatron-0.18": lambda: _has_checkout("megatron-0.18"),
    "arm64": lambda: _has("qemu-aarch64-static", "aarch64-linux-gnu-g++"),
    "tap": lambda: _has("ip") and _can_switch(),
    "images": lambda: _has("buildah", "mmdebstrap", "qemu-aarch64-static", "podman", "crun"),
}
"""Checks by the names that `requires` accepts."""

_unexcused: list[str] = []
_stated: list[str] = []


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Empty folder for files of the test's processes.

    When the test fails, its report has the last lines of every *.log file in the folder, at any
    depth.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The nursery of the session, so that torch is imported only once."""
    from tests.multiproc.cluster import Nursery

    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> str:
    """A python that need not import torch (warm_python.py). It ends with the nursery."""
    from tests import warm_python as warm
    from tests.multiproc.cluster import START_S, wait_for_file

    folder = tmp_path_factory.mktemp("warm")
    path, address = warm.install(folder)
    server = nursery.start(
        "warm python", "warm:serve_address", os.environ, folder, {"address": address}
    )
    wait_for_file(folder / "mark.listens.0", START_S, [server])
    return str(path)


@pytest.fixture
def warm_ranks(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the ranks that the test's programs start."""
    monkeypatch.setenv("PYTHON_EXEC", warm_python)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all test modules without garbage collection, which would take half of the time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def _keep_limit(item: pytest.Item) -> None:
    """Keep a test's own time limit, because faulthandler_timeout would end this process earlier."""
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return
    limit = float(mark.args[0] if mark.args else mark.kwargs["timeout"])
    usual = float(item.config.getini("faulthandler_timeout") or 0)
    if limit > usual > 0:
        file = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit + _LATE_S, file=file, exit=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _keep_limit(item)
    for mark in item.iter_markers("requires"):
        for name in mark.args:
            if name not in REQUIREMENTS:
                raise pytest.UsageError(
                    f"{item.nodeid}: requires({name!r}) is none of {', '.join(REQUIREMENTS)}"
                )
            if not REQUIREMENTS[name]():
                item.user_properties.append(("requires", name))
                pytest.skip(f"needs {name}, which this machine does not have")


def _broken_invariants(folder: Path) -> list[str]:
    """Find messages about broken invariants in the logs. No test may pass with such a message."""
    return [
        f"{log.relative_to(folder)}: {line}"
        for log in sorted(folder.rglob("*.log"))
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if BROKEN_INVARIANT in line
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    folder = getattr(item, "funcargs", {}).get("run_dir")
    if report.when == "call" and report.passed and folder is not None:
        broken = _broken_invariants(folder)
        if broken and item.get_closest_marker("breaks_invariant") is None:
            report.outcome = "failed"
            report.longrepr = "\n".join(["an invariant was broken:", *broken])
    if report.failed and folder is not None:
        for log in sorted(folder.rglob("*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            title = f"last lines of {log.relative_to(folder)} ({len(lines)} lines)"
            report.sections.append((title, "\n".join(lines[-TAIL_LINES:])))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    needed = [value for key, value in report.user_properties if key == "requires"]
    if needed:
        _stated.append(f"{report.nodeid}: needs {needed[0]}")
    else:
        _unexcused.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _unexcused.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _unexcused and os.environ.get("CI") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _stated:
        terminalreporter.section("not run on this machine")
        for line in _stated:
            terminalreporter.line(line)
    if _unexcused and os.environ.get("CI"):
        terminalreporter.section("skipped without requires(): an error under CI", red=True)
        for line in _unexcused:
            terminalreporter.line(line, red=True)
