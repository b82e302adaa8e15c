"""Servers that have links with each other exchange values, also with one that has come later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import native
from tests.multiproc.cluster import clean_environment

LIMIT_S = 240
BACKUPS = {
    "BYTEPS_BACKUP_STATE": "1",
    "BYTEPS_REPLACE_SERVERS_S": "60",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
}


@pytest.mark.parametrize("env", [{}, {"BYTEPS_TLS": "1"}], ids=["plain", "encrypted"])
@pytest.mark.parametrize("servers", [2, 3, 4])
def test_neighbors_exchange_values(run_dir: Path, servers: int, env: dict[str, str]) -> None:
    program = native.build("server_ring") / "server_ring"
    ended = subprocess.run(
        [program, str(servers)],
        env={**clean_environment(run_dir), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("all have answered: 1") == 3


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"BYTEPS_REPLACE_SERVERS_S": "0"}, "set BYTEPS_REPLACE_SERVERS_S, too"),
        ({"DMLC_NUM_SERVER": "1"}, "needs two servers at least: DMLC_NUM_SERVER"),
        ({"BYTEPS_KEEP": "1"}, "does not go with BYTEPS_KEEP (--keep): unset one of them"),
        ({"DMLC_ENABLE_RDMA": "ibverbs"}, "does not go with DMLC_ENABLE_RDMA: unset one of them"),
    ],
    ids=["unreplaced", "alone", "kept", "rdma"],
)
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_what_it_does_not_go_with(run_dir: Path, role: str, env: dict[str, str], why: str) -> None:
    program = native.build("byteps-server") / "byteps-server"
    ended = subprocess.run(
        [program, "--role", role],
        env={**clean_environment(run_dir), **BACKUPS, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "BYTEPS_BACKUP_STATE" in ended.stderr
    assert why in ended.stderr
