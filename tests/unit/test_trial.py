"""Trials of a launch line: the launches, the steps of several hosts, and the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byteps.trial import command, hosts, verdict
from byteps.trial.child import error_of, first_failure
from byteps.trial.hosts import Hosts, TrialError
from byteps.trial.meter import missing_flags
from byteps.trial.reports import LOOPBACKS, Desk, tell
from byteps.trial.verdict import Side
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from scripts.children import captured
from tests.multiproc.cluster import processes_with

MEGATRON = ("torchrun", "--nnodes", "2", "pretrain_gpt.py", "--bf16")
OURS = (
    *MEGATRON[:4],
    *("--use-dpu-reduce", "--dpu-reduce-wire-dtype=int4", "--dpu-reduce-backend", "flat"),
    *("--dpu-reduce-keep-bf16", "embedding", "4096", "--dpu-optimizer", "--bf16"),
)


def test_plain_line_has_none_of_our_flags() -> None:
    assert command.plain(OURS).words == MEGATRON
    assert command.plain(OURS).env == {"BYTEPS_C10D": "0"}


def test_line_without_our_flags_gets_the_preset() -> None:
    ours = command.through_servers(MEGATRON, {}, "int8", is_megatron=True)
    assert ours.words == (*MEGATRON, "--dpu-preset", "own-hosts")
    assert not ours.env


def test_line_with_our_flags_stays_as_it_is() -> None:
    assert command.through_servers(OURS, {}, "int8", is_megatron=True).words == OURS


def test_trial_saves_no_checkpoint() -> None:
    saving = (*MEGATRON, "--save", "ckpt", "--save-interval", "2")
    for launch in (
        command.plain(saving),
        command.through_servers(saving, {}, "int8", is_megatron=True),
    ):
        last = max(i for i, word in enumerate(launch.words) if word == "--save-interval")
        assert int(launch.words[last + 1]) > 1_000_000


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, {"BYTEPS_C10D": "1", "BYTEPS_C10D_WIRE_DTYPE": "int8"}),
        (
            {"BYTEPS_C10D_WIRE_DTYPE": "int4"},
            {"BYTEPS_C10D": "1", "BYTEPS_C10D_WIRE_DTYPE": "int4"},
        ),
        ({"BYTEPS_C10D": "1"}, {"BYTEPS_C10D": "1"}),
        (
            {"BYTEPS_C10D": "1", "BYTEPS_FSDP_DTYPES": "int4,int8"},
            {"BYTEPS_C10D": "1", "BYTEPS_FSDP_DTYPES": "int4,int8"},
        ),
    ],
)
def test_plain_script_gets_variables(env: dict[str, str], wanted: dict[str, str]) -> None:
    ours = command.through_servers(("torchrun", "train.py"), env, "int8", is_megatron=False)
    assert ours.words == ("torchrun", "train.py")
    assert ours.env == wanted


INT8 = "BytePS with gradients in int8"


@pytest.mark.parametrize(
    ("words", "env", "wanted"),
    [
        (MEGATRON, {}, "gradients in int8"),
        (OURS, {}, "gradients in int4"),
        ((*MEGATRON, "--use-dpu-reduce"), {}, "gradients in their own type"),
        ((*MEGATRON, "--dpu-preset", "own-hosts"), {}, "gradients in int8"),
        (None, {}, "gradients in int8"),
        (None, {"BYTEPS_C10D": "1"}, "gradients in their own type"),
        (None, {"BYTEPS_FSDP_DTYPES": "int4,int8"}, "gradients in int4 and parameters in int8"),
    ],
)
def test_answer_names_the_types_that_were_tried(
    words: tuple[str, ...] | None, env: dict[str, str], wanted: str
) -> None:
    is_megatron = words is not None
    ours = command.through_servers(words or ("train.py",), env, "int8", is_megatron=is_megatron)
    assert command.types_text(ours, is_megatron=is_megatron) == wanted


def _report(seconds: float, **changed: Any) -> dict[str, Any]:
    usual = {"ranks": 4, "hosts": 2, "backend": "nccl", "pushed": 1, "loss": 2.0}
    usual["lacks_fsdp"] = False
    return {**usual, "times": [seconds], **changed}


def _answer(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    return verdict.answer(
        Side(name="plain", reports=plain),
        Side(name="BytePS", reports=ours),
        "FLAGS",
        "gradients in int8",
    )


@pytest.mark.parametrize(
    ("plain", "ours", "wanted"),
    [
        (
            (1.0, 1.1),
            (0.5, 0.6),
            "keep BytePS with gradients in int8 (FLAGS): 1.91 x as fast as NCCL",
        ),
        ((1.0, 1.0), (0.99, 0.98), f"keep NCCL: {INT8} is 1.02 x as fast, which is no gain"),
        (
            (1.0, 2.0),
            (0.9, 1.5),
            f"keep NCCL: {INT8} is 1.25 x as fast, but launches of each differ",
        ),
        ((1.0, 1.0), (2.0, 2.0), f"keep NCCL: {INT8} is 0.50 x as fast, which is no gain"),
    ],
)
def test_answer_wants_a_gain_beyond_the_spread(
    plain: tuple[float, float], ours: tuple[float, float], wanted: str
) -> None:
    assert _answer(
        [_report(seconds) for seconds in plain], [_report(seconds) for seconds in ours]
    ).startswith(wanted)


def test_answer_says_why_nothing_is_gained() -> None:
    slow, fast = [_report(2.0)], [_report(1.0)]
    assert "on one host" in _answer(slow, [_report(1.0, hosts=1)])
    assert _answer(slow, [_report(1.0, pushed=0)]).endswith(
        "leaves all gradients of this job to it, too"
    )
    lacking = _answer(slow, [_report(1.0, pushed=0, lacks_fsdp=True)])
    assert "or set BYTEPS_FSDP_DTYPES=int8,int8 and try again" in lacking
    assert "No loss was seen" in _answer([_report(2.0, loss=None)], fast)
    assert "differ by +5.00 %" in _answer(slow, [_report(1.0, loss=2.1)])


def test_launch_that_is_not_what_it_was_meant_to_be_is_told() -> None:
    """A script that ignores the flags would seem to show no gain."""
    assert "did not reach the script" in verdict.fault({"joined": False}, is_plain=False)
    assert "take it out" in verdict.fault({"joined": True}, is_plain=True)
    for is_plain in (True, False):
        assert not verdict.fault({"joined": not is_plain}, is_plain=is_plain)


class _Pair:
    """Two processes that launch ranks, played by threads. The first one leads."""

    def __init__(self) -> None:
        self.all = [Hosts(1, 1), Hosts(1, 1)]
        settings = [launch.desk.settings for launch in self.all]
        self.report = {
            "firsts": {token.token: rank for rank, token in enumerate(settings)},
            "leader": {
                "token": settings[0].token,
                "port": settings[0].port,
                "hosts": ["host.invalid", *LOOPBACKS],
            },
        }

    def end(self, which: int, failure: str, raised: list[str]) -> threading.Thread:
        def run() -> None:
            try:
                self.all[which].end_launch(1, self.report, failure)
            except TrialError as error:
                raised.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_launch_ends_on_all_hosts_before_the_next() -> None:
    pair, raised = _Pair(), list[str]()
    other = pair.end(1, "", raised)
    other.join(0.2)
    assert other.is_alive()
    leader = pair.end(0, "", raised)
    leader.join(30)
    other.join(30)
    assert not leader.is_alive() and not other.is_alive() and not raised


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_on_one_host_ends_the_trial_on_the_other(failing: int) -> None:
    pair, raised = _Pair(), list[str]()
    threads = [pair.end(which, "it broke" * (which == failing), raised) for which in (0, 1)]
    for thread in threads:
        thread.join(30)
    assert len(raised) == 1 and "it broke" in raised[0]


def test_silent_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_LIMIT_S", 0.1)
    pair, raised = _Pair(), list[str]()
    pair.end(0, "", raised).join(30)
    assert "1 of 1 other hosts did not say" in raised[0]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # The first exception is the cause. The errors of the launcher and the servers add nothing.
        (
            ["step 1", "[rank1]: Traceback (most recent call last):", "[rank0]: step 2",
             "[rank1]:   File f", "[rank1]: ValueError: bad",
             "t ERROR worker 0 host child.py:1: server 0 ended",
             "Traceback (most recent call last):", "  File g", "ChildFailedError: rank 1"],
            ["[rank1]: Traceback (most recent call last):", "[rank1]:   File f",
             "[rank1]: ValueError: bad"],
        ),
        (["Traceback (most recent call last):", "  File f"], ["Traceback (most recent call last):",
                                                             "  File f"]),
        (["error: no data", "t INFO worker 0 host job.py:3: left",
          "W1130 08:54:48.1 16 torch/distributed/elastic/api.py:2] Sending process 7 SIGTERM",
          "E1130 08:54:50.2 16 torch/distributed/elastic/api.py:1] failed (exitcode: -9)",
          "Traceback (most recent call last):", "  File g", "ChildFailedError: rank 1"],
         ["error: no data"]),
    ],
    ids=["ranks", "cut", "no-traceback"],
)  # fmt: skip
def test_own_error_of_a_script_is_shown(lines: list[str], wanted: list[str]) -> None:
    assert error_of(lines) == wanted


@pytest.mark.parametrize(("status", "how"), [(-9, "by SIGKILL"), (3, "with status 3")])
def test_rank_that_ended_first_is_named(status: int, how: str) -> None:
    failures = {
        rank: ProcessFailure(local_rank=0, pid=7, exitcode=code, error_file="<N/A>")
        for rank, code in ((0, -15), (5, status))
    }
    failures[0].timestamp += 10
    text = str(ChildFailedError("train.py", failures))
    assert first_failure(f"step 1\n{text}\n") == f": rank 5 ended {how}"
    assert not first_failure("step 1\n")


FAST = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "accumulate_allreduce_grads_in_fp32": False,
}
"""Megatron's arguments that overlap all communication and send 16 bits."""


@pytest.mark.parametrize(
    ("has", "ranks", "wanted"),
    [
        ({}, 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
                " --grad-reduce-in-bf16"),
        ({"optimizer": "muon", "bf16": False}, 4, "--overlap-grad-reduce"),
        (FAST, 2, ""),
        (FAST, 4, "--num-distributed-optimizer-instances 2"),
        ({**FAST, "num_distributed_optimizer_instances": 2}, 4, ""),
    ],
)  # fmt: skip
def test_plain_line_that_could_be_faster_is_told(
    has: dict[str, Any], ranks: int, wanted: str
) -> None:
    usual = dict.fromkeys(
        ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), False
    )
    usual |= {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
    instances = {"num_distributed_optimizer_instances": 1}
    arguments = SimpleNamespace(**{"optimizer": "adam", **usual, **instances, **has})
    missing = missing_flags(arguments, ranks, hosts=2)
    assert " ".join(missing) == wanted
    said = verdict.faster_plain(_report(1.0, missing=missing))
    assert (wanted in said and "may gain" in said) if wanted else not said


LEAVES_A_CHILD = """
import subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(sys.argv[1], "w").close()
"""
FAILS = f"{LEAVES_A_CHILD}sys.exit('the last line of the child')"
WAITS = f"{LEAVES_A_CHILD}time.sleep(1000)"


def _trial(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "byteps.trial", *map(str, words)]


@pytest.mark.parametrize(
    ("script", "options", "wanted"),
    [
        (FAILS, (), "  | the last line of the child\nmegatron-byteps try: launch 1 (plain) "
                    "ended with status 1; the output of its ranks is in "),
        (WAITS, ("--timeout", "0.5"), "launch 1 (plain) ran for 0.5 s (--timeout)"),
        (LEAVES_A_CHILD, (), "launch 1 (plain) failed: no rank reported a step"),
    ],
    ids=["fails", "late", "no-steps"],
)  # fmt: skip
def test_launch_that_fails_is_told_and_leaves_nothing(
    script: str, options: tuple[str, ...], wanted: str, tmp_path: Path
) -> None:
    command = _trial(*options, "--", sys.executable, "-c", script, tmp_path / "started")
    ended = captured(command, 100, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 1 and wanted in ended.stderr
    assert not processes_with("TMPDIR", str(tmp_path))


def test_trial_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = _trial("--", sys.executable, "-c", WAITS, started)
    trial = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 100
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    trial.send_signal(signal.SIGTERM)
    assert trial.wait(100) == 128 + signal.SIGTERM
    assert not processes_with("TMPDIR", str(tmp_path))


def test_command_that_cannot_start_is_told() -> None:
    ended = captured(_trial("--", "no-such-launcher"), 100)
    assert ended.returncode == 1 and "cannot start the command (no-such-launcher)" in ended.stderr


def test_end_of_a_process_waits_for_its_answers() -> None:
    """The leader ends after the last launch, but only after other hosts have its answer."""
    outlived = list[bool]()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        outlived.append(threading.current_thread().daemon)
        return message

    with Desk(answer, 1, 1) as desk:
        assert tell(desk.settings, {"number": 1}) == {"number": 1}
    assert outlived == [False]


def test_settings_travel_as_text() -> None:
    settings = Hosts(5, 2).desk.settings
    again = type(settings).of(settings.text(3))
    assert (again.steps, again.skipped, again.number) == (5, 2, 3)
    assert json.loads(settings.text(3))["token"] == settings.token
