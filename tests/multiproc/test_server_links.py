"""Servers that have links with each other exchange values, also with one that takes a lost one's place."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests import native

LIMIT_S = 240


@pytest.mark.parametrize("env", [{}, {"BYTEPS_TLS": "1"}], ids=["plain", "encrypted"])
@pytest.mark.parametrize("servers", [2, 3, 4])
def test_neighbors_exchange_values(servers: int, env: dict[str, str]) -> None:
    program = native.build("server_ring") / "server_ring"
    secret = {"BYTEPS_SECRET": "what the nodes of this test know"}
    ended = subprocess.run(
        [program, str(servers)],
        env={**os.environ, **secret, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("all have answered: 1") == 3
