"""Runs tests marked `on_rdma` in a guest that has RDMA, and reports them here; see transports.py.

On a machine with an RDMA device, MEGATRON_BYTEPS_RDMA_ADDRESS=<an address of the device> runs them
on the machine itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests import native
from tests.multiproc.cluster import Cluster, Nursery
from tests.multiproc.conftest import make_cluster
from tests.native import FOLDER, BuildError
from tests.rdma.transports import (
    ADDRESS_VARIABLE,
    REPORTS_VARIABLE,
    RemoteRun,
    Transport,
    Writer,
    make,
)
from tests.rdma.vm.guest import missing_tool
from tests.rdma.vm.kernel import VmError

__all__ = ["make_cluster"]


# Marks by transport. Transports other than "tcp" and "rdma" are RDMA with another setting.
_MARKS = {
    "tcp": [],
    "rdma": [pytest.mark.on_rdma],
    "others": [pytest.mark.on_rdma, pytest.mark.thorough],
}
PROGRAMS = ("byteps-server", "connection_test", "sum_worker")
"""Programs that test_transport.py runs."""
SOURCE = Path(__file__).parent / "meddle.cc"
OVERLAY = SOURCE.parents[2] / "byteps"
PS_LITE = SOURCE.parents[2] / "build/byteps/3rdparty/ps-lite/include"
SOURCES = [SOURCE, OVERLAY / "byteps/net/rdma/wire.cc"]
LIBRARY = FOLDER / "meddle.so"
"""Library of meddle.cc for LD_PRELOAD: it injects RDMA faults in a test's process.

It does nothing to a process whose environment does not ask for faults.
"""
_REMOTE = pytest.StashKey[list[str]]()
_RUN = pytest.StashKey[RemoteRun | str]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests marked `@pytest.mark.transports("tcp", "rdma", ...)` by transport."""
    mark = metafunc.definition.get_closest_marker("transports")
    if mark is not None:
        metafunc.parametrize(
            "transport",
            [
                pytest.param(name, marks=_MARKS.get(name, _MARKS["others"]), id=name)
                for name in mark.args
            ],
            indirect=True,
        )


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Fork workers from a single nursery: in the guest its start takes more than a minute.

    In the guest, faults can be injected in its workers by environment variables; see meddle.cc.
    """
    in_guest = ADDRESS_VARIABLE in os.environ
    env = {"LD_PRELOAD": str(LIBRARY)} if in_guest and LIBRARY.exists() else {}
    made = Nursery(tmp_path_factory.mktemp("nursery"), env=env)
    yield made
    made.close()


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Transport:
    return make(request.param)


@pytest.fixture
def make_over(
    make_cluster: Callable[..., Cluster], transport: Transport
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters whose processes talk over the transport."""

    def make_it(*, env: dict[str, str] | None = None, **settings: Any) -> Cluster:
        full = {**transport.env, **(env or {})}
        return make_cluster(host=transport.host, env=full, **settings)

    yield make_it


def _runs_in_guest(item: pytest.Item) -> bool:
    return item.get_closest_marker("on_rdma") is not None and ADDRESS_VARIABLE not in os.environ


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the guest's tests to the end, so that the guest has this machine's cores for itself."""
    remote = [item for item in items if _runs_in_guest(item)]
    items[:] = [item for item in items if not _runs_in_guest(item)] + remote
    config.stash[_REMOTE] = [item.nodeid for item in remote]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _runs_in_guest(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _remote_reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The rest follows pytest's own protocol: it leaves the scopes that the next test is not in.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _remote_reports(item: pytest.Item) -> Iterator[pytest.TestReport]:
    lacking = missing_tool()
    if lacking is not None:
        # This is not requires(), because under CI the skip is a failure.
        where = (str(item.path), 0, f"Skipped: {lacking}")
        yield _report(item, "skipped", where)
        return
    try:
        for data in _remote_run(item).reports(item.nodeid):
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            assert isinstance(report, pytest.TestReport)
            # a skip's place, which JSON turned from a tuple into a list
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)
            yield report
    except VmError as error:
        yield _report(item, "failed", f"the virtual machine: {error}")


def _report(item: pytest.Item, outcome: Any, longrepr: Any) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, "call")


def _remote_run(item: pytest.Item) -> RemoteRun:
    """Return the session's guest. The first test that needs the guest starts it, and it then runs
    all of these tests."""
    config = item.config
    if _RUN not in config.stash:
        # Outside fixtures, pytest has no public way to the factory.
        factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
        tests = config.stash[_REMOTE]
        try:
            build_meddle()
            # Compiling in the guest is impossible, or would take minutes.
            if any("test_transport.py" in test for test in tests):
                native.build(*PROGRAMS)
            run = RemoteRun(factory.mktemp("guest") / "shared", tests)
            config.stash[_RUN] = run
            config.add_cleanup(run.close)
        except (VmError, native.BuildError) as error:
            config.stash[_RUN] = str(error)
    guest_run = config.stash[_RUN]
    if isinstance(guest_run, str):
        raise VmError(guest_run)
    return guest_run


def build_meddle() -> Path:
    """Compile the library. Raises BuildError."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    part = LIBRARY.with_suffix(".part")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{OVERLAY}", "-isystem", str(PS_LITE), *map(str, SOURCES), "-o", str(part)]
    # A linker may drop libraries whose symbols are only looked up by name.
    command += ["-Wl,--no-as-needed", "-ldl", "-libverbs", "-lrdmacm"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if ended.returncode != 0:
        raise BuildError(f"{SOURCE.name} does not compile:\n{ended.stderr}")
    part.rename(LIBRARY)
    return LIBRARY


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(REPORTS_VARIABLE)
    if path is not None:
        config.pluginmanager.register(Writer(config, Path(path)))
