"""A replica of a Megatron job dies and comes back. The other replicas go on, and all end with the
same parameters."""

from __future__ import annotations

import json
import os
import re
import signal
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byteps.torch.members import Choice
from megatron.core.distributed.dpu_reduce import hooks, replica_changes

from bench.replicas import failures
from scripts import prepare_data

TINY = (
    *("--layers", "2", "--hidden", "128", "--batch", "2", "--sequence", "64", "--steps", "60"),
    *("--timeout", "500", "--max-bytes", "200000", "--pace", "0"),
)
SERVERS = ("--dpu-optimizer", "--clip-grad", "0.5")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16")
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (("--replicas", "3"), ()),
    "sharded": (("--replicas", "2", "--ranks", "2"), (*SHARDED, "--overlap-param-gather")),
    "tensor": (
        ("--replicas", "2", "--ranks", "2", "--model-ranks", "2"),
        ("--tensor-model-parallel-size", "2"),
    ),
    "servers": (("--replicas", "3"), SERVERS),
    "servers, sharded": (("--replicas", "2", "--ranks", "2"), (*SERVERS, *SHARDED)),
    "servers, tensor": (
        ("--replicas", "2", "--ranks", "2", "--model-ranks", "2"),
        ("--tensor-model-parallel-size", "2", *SERVERS),
    ),
    "servers, int8": (
        ("--replicas", "2"),
        (*SERVERS, "--bf16", "--dpu-reduce-wire-dtype", "int8"),
    ),
    "outer steps": (
        ("--replicas", "3", "--ranks", "1", "--every", "3"),
        ("--use-distributed-optimizer",),
    ),
}
HOLD_S = 3.0
"""Seconds between two steps of replicas that wait for another replica to come back."""


class DieAndReturn:
    """Kills a replica after some steps, restarts it, and ends the job some steps later."""

    def __init__(self, after: int, who: int = 1, loaded: int = 0) -> None:
        """`loaded`: number of steps of the checkpoint from which the job resumes."""
        self.after, self.who, self.loaded = after, who, loaded
        self.allowed, self.at = 0, 0.0
        self.killed: failures.Life | None = None
        self.second: failures.Life | None = None

    def __call__(self, job: failures.Job, now: float) -> None:
        others = [life for life in job.lives if life.replica != self.who]
        done = min(len(life.ends) for life in others)
        if self.killed is None:
            self.allow(job, self.loaded + self.after)
            if done == self.after and len(job.lives[self.who].ends) == self.after:
                self.killed = job.lives[self.who]
                job.kill(self.killed)
                self.second = job.start(self.who)
            return
        assert self.second is not None
        if "has joined after iteration" in self.second.text:
            self.allow(job, job.options.steps)
        elif self.loaded + done == self.allowed and now - self.at > HOLD_S:
            self.allow(job, self.allowed + 1)
            self.at = now

    def allow(self, job: failures.Job, steps: int) -> None:
        if steps != self.allowed:
            self.allowed = steps
            job.allow(steps)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data.prepare([], tmp_path_factory.mktemp("text"), 200_000).prefix


def die_and_return(prefix: Path, layout: str, *megatron: str) -> tuple[failures.Job, DieAndReturn]:
    words, arguments = LAYOUTS[layout]
    options = failures.parse([*TINY, *words, "--", *arguments, *megatron])
    options.steps_file = True
    watch = DieAndReturn(after=4)
    return failures.train(options, prefix, watch), watch


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_dies_and_comes_back(prefix: Path, tmp_path: Path, layout: str) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "1000")
    job, watch = die_and_return(prefix, layout, *save)
    assert watch.second is not None
    lives = [life for life in job.lives if not life.killed]
    assert len({life.record.checksum for life in lives}) == 1, "replicas have parted"
    assert all(life.record.checksum for life in lives)
    first = lives[0]
    (lost,) = re.findall(r"from iteration (\d+) on without replica 1", first.text)
    assert 4 <= int(lost) <= 7, "in the control round of the fourth one at the earliest"
    (joined,) = re.findall(r"replica 1 has joined after iteration (\d+)", first.text)
    losses_of = {step.iteration: step.loss for step in watch.second.record.steps}
    assert min(losses_of) == int(joined) + 1, "its first step is the one after"
    assert max(losses_of) == 60
    written: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "dpu_lost_samples.jsonl").read_text().splitlines()
    ]
    assert all(entry["replicas"] == [1] for entry in written)
    iterations = [entry["iteration"] for entry in written]
    assert iterations[0] == int(lost) and iterations[-1] <= int(joined)
    (took,) = re.findall(
        r"took ([\d.]+) MB per rank from replica \d(?: and ([\d.]+) MB from the servers)?",
        watch.second.text,
    )
    assert (float(took[0]) < 0.1 and float(took[1]) > 0.5) == layout.startswith("servers")
    batch = job.options.batch * job.options.replicas * job.options.ranks // job.options.model_ranks
    for entry in written:
        assert entry["samples"] == batch * job.options.every
        assert entry["first_sample"] + entry["samples"] == entry["iteration"] * batch


class DieInAStep:
    """Kills the replica `who` in the middle of a step, when it has pushed a part of its gradients:
    `wait_s` seconds, the least time of its passes, after the end of its step number `after`."""

    def __init__(self, after: int, wait_s: float, who: int = 1) -> None:
        self.after, self.wait_s, self.who = after, wait_s, who

    def __call__(self, job: failures.Job, now: float) -> None:
        dying = job.lives[self.who]
        if dying.killed or len(dying.ends) < self.after:
            return
        if now - dying.ends[self.after - 1] > self.wait_s:
            job.kill(dying)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [SERVERS, ()], ids=["servers", "plain"])
def test_the_first_one_comes_back_to_a_job_that_began_with_a_checkpoint(
    prefix: Path, tmp_path: Path, optimizer: tuple[str, ...]
) -> None:
    """Replica 0 dies and comes back in a job that began with a checkpoint. It loads the checkpoint,
    as at the start, and then takes the state of the other replica. At the start it also sent the
    checkpoint's state to the servers; now it does not."""
    words, arguments = ("--replicas", "2"), (*optimizer, "--ckpt-format", "torch_dist")
    save = ("--save", str(tmp_path), "--save-interval", "4")
    options = failures.parse([*TINY, *words, "--steps", "4", "--", *arguments, *save])
    failures.train(options, prefix, lambda job, now: None)
    load = ("--load", str(tmp_path), "--override-opt_param-scheduler")
    options = failures.parse([*TINY, *words, "--", *arguments, *load])
    options.steps_file = True
    watch = DieAndReturn(after=4, who=0, loaded=4)
    job = failures.train(options, prefix, watch)
    assert watch.second is not None
    first = job.lives[1]
    (joined,) = re.findall(r"replica 0 has joined after iteration (\d+)", first.text)
    assert int(joined) > 8
    lives = [life for life in job.lives if not life.killed]
    assert len({life.record.checksum for life in lives}) == 1, "replicas have parted"
    losses = {step.iteration: step.loss for step in first.record.steps}
    for step in watch.second.record.steps:
        assert step.loss == losses[step.iteration]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["plain", "sharded", "servers", "outer steps"])
def test_the_first_one_dies_in_the_last_step_before_a_save(
    prefix: Path, tmp_path: Path, layout: str
) -> None:
    """If replica 0 dies in the last step before a save, another replica saves everything, and ends
    well."""
    words, arguments = LAYOUTS[layout]
    save = ("--save", str(tmp_path), "--save-interval", "6")
    given = [*TINY, *words, "--steps", "6", "--pace", "1"]
    options = failures.parse([*given, "--", *arguments, *save])
    job = failures.train(options, prefix, DieInAStep(after=5, wait_s=0.7, who=0))
    first, *others = job.lives
    assert first.killed and len(first.record.steps) == 5
    assert all(rank.status == 0 for life in others for rank in life.ranks)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    outer = [path.name for path in tmp_path.glob("dpu_outer/iter_0000006/*")]
    assert outer == (["rank_00000.pt"] if options.every > 1 else [])
    assert "from iteration 6 on without replica 0" in others[0].text


class Leave:
    """Sends SIGTERM to the last rank of a replica and to its data loaders, in a given step."""

    def __init__(self, who: int, after: int) -> None:
        self.who, self.after, self.done = who, after, False
        self.leaver: failures.Life | None = None

    def __call__(self, job: failures.Job, now: float) -> None:
        if self.done:
            return
        job.allow(self.after)
        if all(len(life.ends) == self.after for life in job.lives):
            self.leaver = job.lives[self.who]
            # A killed process need not end with status 0.
            self.leaver.killed = self.done = True
            # Ranks are ended in the way of torchrun.
            os.killpg(self.leaver.ranks[-1].pid, signal.SIGTERM)
            job.allow(job.options.steps)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "who", "delay"),
    [
        pytest.param("plain", 0, 0, id="it would save the next checkpoint"),
        pytest.param("sharded", 1, 0, id="sharded"),
        pytest.param("outer steps", 1, 1, id="outer steps"),
    ],
)
def test_a_replica_that_is_told_to_end_leaves(
    prefix: Path, tmp_path: Path, layout: str, who: int, delay: int
) -> None:
    """The replica leaves after its current step, which all replicas have made. So the others lose
    nothing."""
    words, arguments = LAYOUTS[layout]
    save = ("--save", str(tmp_path), "--save-interval", "6")
    given = [*TINY, *words, "--steps", "12"]
    options = failures.parse([*given, "--", *arguments, *save])
    options.steps_file, options.delay = True, delay
    watch = Leave(who, after=4)
    job = failures.train(options, prefix, watch)
    assert watch.leaver is not None
    assert [rank.status for rank in watch.leaver.ranks] == [143] * options.ranks, watch.leaver.text
    (iteration,) = re.findall(r"SIGTERM\), and leaves after iteration (\d+)", watch.leaver.text)
    last = int(iteration)
    # A step's record is written before the ranks agree on the step, so the signal may come between
    # the two. With outer steps, the replica leaves at the step of the next exchange.
    assert last in ((4, 5) if options.every == 1 else (6,))
    assert len(watch.leaver.record.steps) == last
    others = [life for life in job.lives if life is not watch.leaver]
    first = others[0]
    assert f"replica {who} was told to end, and leaves after iteration {last};" in first.text
    lost = re.findall(rf"from iteration (\d+) on without replica {who}:", first.text)
    assert lost == [str(last + options.every)]
    assert len({life.record.checksum for life in others}) == 1, "replicas have parted"
    for life in others:
        assert len(life.record.steps) == 12
    if options.every == 1:
        losses = [[step.loss for step in life.record.steps[:last]] for life in job.lives]
        assert all(loss == losses[0] for loss in losses), "its last step was made by all of them"
    written = [
        json.loads(line) for line in (tmp_path / "dpu_lost_samples.jsonl").read_text().splitlines()
    ]
    assert written[0]["iteration"] == last + options.every
    assert all(entry["replicas"] == [who] for entry in written)
    assert (tmp_path / "iter_0000006").is_dir() and (tmp_path / "iter_0000012").is_dir()


def test_a_replica_that_was_asked_is_not_told_to_end_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal between the two meetings of a step counts in the next step. If it counted only in
    the second meeting, all replicas could leave, and none would save."""
    notice = SimpleNamespace(received=False)
    said: list[bool] = []

    def choose(name: str, peers: list[int], leaves: bool) -> Choice:
        said.append(leaves)
        return Choice(joiner=-1, ready_epoch=0, present=(True, True), leaving=(leaves, False))

    def all_want(wanted: bool, what: str) -> bool:
        notice.received = True  # All other replicas get the signal now.
        return False

    def leave(iteration: int) -> None:
        said.append(iteration == 2)

    monkeypatch.setattr(replica_changes, "_notice", notice)
    monkeypatch.setattr(replica_changes.job, "most_inside", list)
    monkeypatch.setattr(replica_changes.lost_samples, "take_missing", set)
    monkeypatch.setattr(replica_changes.lost_samples, "tell", lambda args, missing, present: None)
    monkeypatch.setattr(replica_changes, "_leaves", False)
    monkeypatch.setattr(replica_changes, "leave", leave)
    for name, value in (("all_want", all_want), ("replicas", lambda: 2), ("peers", lambda: [0, 1])):
        monkeypatch.setattr(replica_changes.job, name, value)
    monkeypatch.setattr(replica_changes.outer_steps, "meets", lambda args: True)
    monkeypatch.setattr(replica_changes.bytepslib.members, "choose", choose)
    monkeypatch.setattr(replica_changes.torch.distributed, "get_rank", lambda: 0)
    args = Namespace(consumed_train_samples=0, train_iters=10)
    for iteration in (1, 2):
        assert not hooks.told_to_end(args, [0, 0])
        hooks.iteration_ended(args, [], None, None, iteration, 0.0)
    assert said == [False, True, True]


@pytest.mark.thorough
def test_replicas_that_are_all_told_to_end_save_a_checkpoint(prefix: Path, tmp_path: Path) -> None:
    """The last replicas save a checkpoint, and end well."""

    class TellAll(Leave):
        def __call__(self, job: failures.Job, now: float) -> None:
            super().__call__(job, now)
            if self.done:
                for life in job.lives:
                    if life is not self.leaver and not life.killed:
                        life.killed = True
                        life.ranks[0].send(signal.SIGTERM)

    save = ("--save", str(tmp_path), "--save-interval", "1000")
    options = failures.parse([*TINY, *LAYOUTS["plain"][0], "--", *save])
    options.steps_file = True
    job = failures.train(options, prefix, TellAll(0, after=4))
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (4, 5, 6), "some may have been told after their step, or before its end"
    assert all(life.ranks[0].status in (0, 143) for life in job.lives)
    assert any(life.ranks[0].status == 0 for life in job.lives)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["plain", "tensor"])
def test_a_slow_one_leaves_out_steps(prefix: Path, tmp_path: Path, layout: str) -> None:
    """A slow replica stays in the job, and exchanges the result of fewer steps."""
    given, megatron = LAYOUTS[layout]
    words = [*TINY, *given, "--every", "6", "--steps", "24", "--slow", "3", "--pace", "0.3"]
    words += ["--quorum", f"{int(given[1]) - 1}@40"]
    arguments = ("--use-distributed-optimizer", "--save", str(tmp_path), "--save-interval", "1000")
    options = failures.parse([*words, "--", *megatron, *arguments])
    job = failures.train(options, prefix, lambda job, now: None)
    last = options.replicas - 1
    assert len(job.lives) == options.replicas
    assert not any("without replica" in life.text for life in job.lives)
    assert len({life.record.checksum for life in job.lives}) == 1, "replicas have parted"
    slow = job.lives[last]
    left_out = [
        (int(first), int(until), int(samples))
        for first, until, samples in re.findall(
            rf"replica {last} left out iterations (\d+) to (\d+), (\d+) samples: it is slower ",
            slow.text,
        )
    ]
    assert left_out, slow.text
    for first, until, samples in left_out:
        assert until % 6 == 0, "until the exchange"
        assert samples == (until - first + 1) * options.batch
    assert all("left out" not in life.text for life in job.lives[:last])
    written = [
        json.loads(line) for line in (tmp_path / "dpu_lost_samples.jsonl").read_text().splitlines()
    ]
    assert [entry["iteration"] for entry in written] == [until for _, until, _ in left_out]
    assert all(entry["replicas"] == [last] for entry in written)
