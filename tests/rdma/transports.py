"""The transports of tests, and the guest in which RDMA tests run.

The guest runs pytest on a list of tests. Its conftest.py writes pytest's reports to a file that
both sides see; this side reads the file and passes the reports to its own pytest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cluster import LOOPBACK
from tests.multiproc.nursery import PRELOAD
from tests.rdma.vm.guest import Guest, address_of, compiled
from tests.rdma.vm.kernel import VmError

REPOSITORY = Path(__file__).resolve().parents[2]
REPORTS = "reports.jsonl"
REPORTS_VARIABLE = "MEGATRON_BYTEPS_RDMA_REPORTS"
ADDRESS_VARIABLE = "MEGATRON_BYTEPS_RDMA_ADDRESS"
"""Variable with an address of an RDMA device of this machine: RDMA tests run here, without
a guest."""

TEST_S = 560
"""Time limit of a test in the guest, in seconds."""
SILENCE_S = 580.0
"""Time without output after which the guest counts as dead: just below pytest's own limit of a
test."""


class Writer:
    """Pytest plugin in the guest, which writes the reports of its tests to a file."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps({"report": data}) + "\n")
        self._file.flush()


class RemoteRun:
    """A guest that runs tests in order, seen from the host."""

    def __init__(self, folder: Path, tests: Sequence[str]) -> None:
        self.broken: str | None = None
        self._records: list[dict[str, Any]] = []
        self._offset = 0
        self._rest = b""
        self._file = folder / REPORTS
        folder.mkdir(parents=True)
        (folder / "tests").write_text("\n".join(tests) + "\n", encoding="utf-8")
        pytest_command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--rootdir", str(REPOSITORY), "--basetemp", "/tmp/pytest", "-o", f"timeout={TEST_S}"),
            f"@{folder / 'tests'}",
        ]
        env = {
            REPORTS_VARIABLE: str(self._file),
            ADDRESS_VARIABLE: address_of(1),
            "PATH": os.environ["PATH"],
            **compiled(("pytest", *PRELOAD), [REPOSITORY / "tests/multiproc"]),
        }
        in_repository = ["/bin/bash", "-c", 'cd "$1" && shift && exec "$@"', "-", str(REPOSITORY)]
        self._guest = Guest(folder, [*in_repository, *pytest_command], env=env)

    def reports(self, test: str) -> list[dict[str, Any]]:
        """Get the reports of a test's setup, call and teardown. Raises VmError if the guest fails;
        then all later calls raise it, too."""
        if self.broken is not None:
            raise VmError(self.broken)
        read: list[dict[str, Any]] = []
        deadline = time.monotonic() + SILENCE_S
        while not (read and read[-1].get("when") == "teardown"):
            record = self._next(deadline, test)
            report = record.get("report")
            if report is not None and report["nodeid"] == test:
                read.append(report)
        return read

    def _next(self, deadline: float, test: str) -> dict[str, Any]:
        while not self._records:
            ended = not self._guest.running
            self._read()
            if self._records:
                break
            if ended or time.monotonic() > deadline:
                how = "ended" if ended else f"said nothing for {SILENCE_S:g} s"
                self.broken = f"the guest {how} before {test} was done, in an earlier test"
                words = self._guest.last_words()
                raise VmError(f"the guest {how} before {test} was done\n{words}")
            time.sleep(0.05)
        return self._records.pop(0)

    def _read(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            piece = file.read()
        self._offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._records += [json.loads(line) for line in lines]

    def close(self) -> None:
        self._guest.close()


@dataclass(frozen=True)
class Transport:
    name: str
    host: str
    """The address at which all processes of a test listen."""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def is_rdma(self) -> bool:
        return self.name != "tcp"

    @property
    def has_data_plane(self) -> bool:
        return self.is_rdma and self.env.get("BYTEPS_RDMA_DATA_PLANE") != "0"


def make(name: str) -> Transport:
    """Make a transport by its name in TRANSPORTS."""
    if name == "tcp":
        return Transport(name, LOOPBACK)
    host = "fd77::1" if name == "rdma-ipv6" else os.environ.get(ADDRESS_VARIABLE, "10.77.0.1")
    env = {"DMLC_ENABLE_RDMA": "ibverbs", "DMLC_NODE_HOST": host}
    return Transport(name, host, {**env, **VARIANTS[name]})


VARIANTS: dict[str, dict[str, str]] = {
    "rdma": {},
    "rdma-one-plane": {"BYTEPS_RDMA_DATA_PLANE": "0"},
    "rdma-3-endpoints": {"BYTEPS_CONNECTIONS": "3"},
    "rdma-busy-poll": {"BYTEPS_RDMA_BUSY_POLL": "1"},
    # Smallest possible queues: an error in waiting for credit shows here.
    "rdma-shallow": {
        "BYTEPS_RDMA_START_DEPTH": "4",
        "BYTEPS_RDMA_RX_DEPTH": "8",
        "BYTEPS_RDMA_WINDOW_BYTES": "16384",
        "BYTEPS_RDMA_RECEIVE_WINDOW_BYTES": "0",  # one value at a time
    },
    "rdma-ipv6": {},
    # Each value's memory is registered for its message, by a thread on which nothing waits.
    "rdma-no-pool": {"BYTEPS_RDMA_POOL_BYTES": "0"},
}
TRANSPORTS = ("tcp", *VARIANTS)
