"""Subcommands of megatron-byteps that start processes, or that ask processes for their state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.children import captured
from tests.multiproc.cluster import START_S, clean_environment
from tests.multiproc.scripted import GOOD

WHOLE_S = 240


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(folder), **variables}
    return captured([sys.executable, "-m", "byteps.cli", *words], WHOLE_S, env=env)


@pytest.mark.parametrize("role", list(GOOD))
def test_roles_are_the_scripts(run_dir: Path, role: str) -> None:
    said = run(run_dir, role, "--dry-run", *GOOD[role])
    assert said.returncode == 0, said.stderr
    does = "byteps.launcher.leaving" if role == "worker" else f"byteps-server --role {role}"
    assert does in said.stdout
    said = run(run_dir, role, "--nonsense")
    assert said.returncode == 2
    assert f"megatron-byteps {role}: unknown setting: --nonsense" in said.stderr
    assert f"Try 'megatron-byteps {role} -h'" in said.stderr


def test_status_of_a_cluster_that_is_not_there(run_dir: Path) -> None:
    said = captured(
        [sys.executable, "-m", "byteps.cli", "cluster", "status", "127.0.0.1:9"],
        START_S,
        env=clean_environment(run_dir),
    )
    assert said.returncode == 1
    assert "megatron-byteps cluster status: no scheduler shows its status" in said.stderr
    assert run(run_dir, "cluster", "stat").returncode == 2


def test_doctor(run_dir: Path) -> None:
    env = clean_environment(run_dir)
    env.pop("BYTEPS_SECRET", None)
    said = captured(
        [sys.executable, "-m", "byteps.cli", "doctor", "--hosts", "4", "--ranks", "2"],
        WHOLE_S,
        env=env,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    lines = said.stdout.splitlines()
    assert {line[:6] for line in lines} <= {"ok    ", "note  ", "      "}
    for text in ("torch 2.", "byteps-server", "embedded mode", "it can listen at", "NICs: "):
        assert text in said.stdout, text
    assert "2 ranks on each of 4 hosts" in said.stdout
    assert "would start 1 server on each" in said.stdout
    bytes_alone = "by bytes over the NICs, not measured"
    assert f"in fp32: NCCL or gloo (servers would be 1.00 x as fast, {bytes_alone})" in said.stdout
    assert (
        f"in int8: servers, node-first (1.97 x as fast as the collective, {bytes_alone})"
        in said.stdout
    )


def test_doctor_finds_what_is_wrong(run_dir: Path) -> None:
    done = run(run_dir, "doctor", BYTEPS_PARTITION_BYTE="4096")
    assert done.returncode == 1
    (wrong,) = [line for line in done.stdout.splitlines() if line.startswith("WRONG ")]
    assert "did you mean BYTEPS_PARTITION_BYTES?" in wrong
    faults = {"BYTEPS_SECRET_FILE": "/nowhere", "BYTEPS_C10D_WIRE_DTYPE": "int3"}
    done = run(run_dir, "doctor", **faults)
    assert done.returncode == 1
    assert "--new-secret FILE' makes one" in done.stdout
    assert done.stdout.count("WRONG BYTEPS_C10D_WIRE_DTYPE='int3'") == 1, done.stdout
    assert "note  BYTEPS_C10D_WIRE_DTYPE without BYTEPS_C10D=1: nothing" in done.stdout


def test_bench(run_dir: Path) -> None:
    done = run(run_dir, "bench", "--sizes", "4KiB", "1MiB", "--iters", "2", "--wire", "int8")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any("2 ranks, 1 servers, cpu" in line for line in lines)
    rows = [line.split() for line in lines if line.split()[:1] in (["4096"], ["1048576"])]
    assert [row[-1] for row in rows] == ["0", "0"]
