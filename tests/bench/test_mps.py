"""bench/kit/mps.py, with a service that the test plays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.kit.mps import together
from bench.kit.plan import Case, Plan, Topology
from scripts import gpus

SERVICE = """#!/bin/sh
# As the real one: -f serves until it is told to quit; without a word it takes a command.
state="$CUDA_MPS_PIPE_DIRECTORY/state"
if [ "$1" = -f ]; then
  {start}
  echo $$ > "$state"
  while [ "$(cat "$state")" != quit ]; do sleep 0.05; done
  echo ended >> "{told}"
else
  read -r command
  [ -e "$state" ] || exit 1
  echo "$command" >> "{told}"
  if [ "$command" = quit ]; then echo quit > "$state"; fi
fi
"""


def plan_of(workers: int, device: str = "cuda") -> Plan:
    case = Case(size=1024, dtype="float32", iters=1, warmup=0)
    topology = Topology(workers=workers, servers=1)
    return Plan(cases=(case,), topology=topology, backends=("byteps",), device=device)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a service on PATH writes what it is told; the machine has two GPUs."""
    return install(tmp_path, monkeypatch)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, start: str = ":") -> Path:
    told = folder / "told"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(SERVICE.format(told=told, start=start))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return told


def test_ranks_that_share_gpus_have_the_service_while_they_need_it(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with together(plan_of(4)):
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "state").exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not folder.exists()
    assert told.read_text().split() == ["get_server_list", "quit", "ended"]
    assert "4 ranks share 2 GPUs, at once" in capsys.readouterr().err


def test_it_ends_with_an_error_too(told: Path) -> None:
    with pytest.raises(RuntimeError, match="a rank failed"), together(plan_of(4)):
        raise RuntimeError("a rank failed")
    assert told.read_text().split()[-1] == "ended"


def test_the_users_own_service_is_left_alone(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    with together(plan_of(4)):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps" and not told.exists()


def test_ranks_take_turns_where_the_service_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, start="echo no permission; exit 1")
    with together(plan_of(4)):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    said = capsys.readouterr().err
    assert "4 ranks share 2 GPUs, one after the other" in said and "no permission" in said
