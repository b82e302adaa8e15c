"""The lines of docs/use/rl.md on a user's own command line, on two Ray nodes, with scheduler and
server outside. The nodes are emulated hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_report, rl_task
from scripts.trainkit.rl_settings import ENVIRONMENTS, EXTENSION, Settings

from .test_pieces import documented

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a rank's place each."""
    from ray.cluster_utils import Cluster

    variables = {**ENVIRONMENTS["cpu"], "BYTEPS_AUTH": "0", "PYTHONWARNINGS": "ignore"}
    made = Cluster()
    for host in ("first", "second"):
        made.add_node(
            num_cpus=9,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=100 << 20,
            env_vars={**variables, "BYTEPS_HOST_ID": host},
        )
    yield made.address
    made.shutdown()


def start(folder: Path, script: str, *arguments: str) -> Spawned:
    environment = {**os.environ, "BYTEPS_AUTH": "0"}
    return Spawned(script, [str(ROOT / "scripts" / script), *arguments], environment, folder)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a scheduler, with a server, for two workers."""
    counts = ("--workers", "2", "--servers", "1")
    file = tmp_path / "port"
    listens = ("--host", "127.0.0.1", "--port", "0", "--port-file", str(file))
    processes = [start(tmp_path, "scheduler.sh", *listens, *counts)]
    try:
        while not file.exists() or not file.read_text().endswith("\n"):
            assert processes[0].running, last_lines(tmp_path / "scheduler.sh.log")
        host, port = file.read_text().split()
        processes.append(start(tmp_path, "server.sh", "--scheduler", f"{host}:{port}", *counts))
        yield host, port
    finally:
        end_all(processes, 10.0)


def recipe(host: str, port: str) -> list[str]:
    """The documented lines, with this scheduler's values."""
    values = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": f"'{port}'"}
    values |= {"DMLC_NUM_WORKER": "'2'", "DMLC_NUM_SERVER": "'1'"}
    lines = []
    for line in documented()[0]:
        name, _, value = line.partition("=")
        lines.append(f"{name}={values.pop(name.rpartition('.')[2], value)}")
    assert not values, f"docs/use/rl.md does not set {values}"
    return lines


@pytest.mark.timeout(1200)
def test_a_users_own_command_line(
    cluster: str, scheduler: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    settings = Settings(
        through_byteps=False,  # the recipe adds it
        model=model,
        questions=rl_task.write_questions(tmp_path / "sums.parquet"),
        folder=tmp_path / "run",
        steps=2,
    )
    settings.folder.mkdir()
    theirs = [one for one in settings.overrides() if "ray_init" not in one]
    theirs += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    theirs.append(f"+ray_kwargs.ray_init.address={cluster}")
    variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
    theirs.append(f"{variables}.VERL_FILE_LOGGER_PATH={settings.folder}/steps.jsonl")
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"]
    # What is as fast by a reduce-scatter would stay there.
    route = "+actor_rollout_ref.actor.megatron.override_ddp_config.dpu_reduce_route=flat"
    command += [*theirs, *recipe(*scheduler), route]
    assert EXTENSION in " ".join(theirs)  # all else that a CPU needs is in the environment
    environment = {**os.environ, **settings.environment()}
    process = Spawned("verl", command, environment, settings.folder, cwd=settings.folder)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    log = last_lines(settings.folder / "verl.log", 80)
    assert process.status == 0, log
    outcome = rl_report.read(settings.folder, "BytePS")
    assert [step.number for step in outcome.steps] == [1, 2], log
    assert all(0 < step.mismatch < 0.2 for step in outcome.steps)
    # Two hosts with one rank each, and the server on a machine of its own.
    assert set(outcome.backends) == {"BytePS flat"}, outcome.backends
