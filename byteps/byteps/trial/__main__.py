"""Runs a few steps of a job, plain and through servers: ``megatron-byteps try -h``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from byteps.trial import command, verdict
from byteps.trial.child import Command
from byteps.trial.hosts import Hosts, TrialError
from byteps.trial.reports import VARIABLE, Message
from byteps.trial.verdict import Side

_DESCRIPTION = """\
Runs a job for a few steps plain (NCCL or gloo) and through BytePS's servers, interleaved, and says
which to keep. Start it with the job's own launch line, on every host on which that is started.
Examples:

  megatron-byteps try -- torchrun --nnodes 4 --nproc-per-node 8 ... pretrain_gpt.py ...
  megatron-byteps try -- torchrun --nnodes 4 --nproc-per-node 8 ... train.py
  megatron-byteps try -- srun ... python train.py

Nothing of the script changes: ranks time their own steps, and end after the last one. Megatron gets
--dpu-preset own-hosts, unless the line has flags of BytePS, and saves no checkpoint; any other
script BYTEPS_C10D=1. What a script writes in its first steps, it writes here too.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-byteps try",
        usage="%(prog)s [options] -- COMMAND",
        description=_DESCRIPTION,
        epilog="Exit status: 0 it has an answer; 1 a launch failed; 2 bad use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N",
        help="timed per launch, at least 1 (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", type=int, default=3, metavar="N",
        help="steps before these, at least 1 (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--launches", type=int, default=2, metavar="N",
        help="of each kind, at least 2 (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--wire", choices=command.WIRES, default="int8",
        help="type in which gradients travel, if the line does not say; same: as they are reduced "
        "(default: int8)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S",
        help="a launch that takes longer fails (default: 1800)",
    )  # fmt: skip
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="the job's launch line")
    return parser


class _Trial:
    """Launches of the trial on this host."""

    def __init__(self, options: argparse.Namespace, folder: Path, hosts: Hosts) -> None:
        self._options, self._folder, self._hosts = options, folder, hosts
        self._last: Message | None = None

    def run(self) -> None:
        """Make all launches, and print the findings. Raises TrialError."""
        options, words = self._options, self._options.command
        first = command.plain(words)
        sides: tuple[list[Message], list[Message]] = ([], [])
        for number in range(2 * options.launches):
            ours = number % 2
            launch = first
            if ours:
                launch = command.through_servers(
                    words, os.environ, options.wire, is_megatron=sides[0][0]["is_megatron"]
                )
            name = "BytePS" if ours else "plain"
            report = self._launch(number + 1, name, launch)
            if fault := verdict.fault(report, is_plain=not ours):
                raise TrialError(fault)
            print(f"  {name}: {verdict.launch_text(report)}", flush=True)
            sides[ours].append(report)
        plain, through = Side(name="plain", reports=sides[0]), Side(name="BytePS", reports=sides[1])
        at = plain.reports[0]
        types = command.types_text(launch, is_megatron=at["is_megatron"])
        print(
            f"\n{at['ranks']} ranks on {at['hosts']} host{'s' * (at['hosts'] > 1)}, "
            f"{options.launches} launches of each, "
            f"{options.steps} steps after {options.skip}:\n\n"
            f"{verdict.table(plain, through, options.skip + options.steps)}\n\n"
            f"Answer: {verdict.answer(plain, through, self._added(launch, at), types)}"
        )
        if faster := verdict.faster_plain(at):
            print(faster)

    def _added(self, ours: command.Launch, report: Message) -> str:
        if report["is_megatron"]:
            added = command.flags_for(self._options.command, self._options.wire)
            return " ".join(added) or "your line as it is"
        return ours.added

    def _launch(self, number: int, name: str, launch: command.Launch) -> Message:
        of = f"launch {number} of {2 * self._options.launches}"
        print(f"{of}: {name}: {shlex.join(launch.words)}", flush=True)
        log = self._folder / f"launch-{number}.log"
        env = {**os.environ, VARIABLE: self._hosts.desk.settings.text(number)}
        failure, report = "", None
        try:
            with Command(launch, env, log) as running:
                status = running.wait(self._options.timeout)
            if status is None:
                failure = f"ran for {self._options.timeout:g} s (--timeout)"
            else:
                failure = running.failure()
        except RuntimeError as error:
            raise TrialError(str(error)) from None
        try:
            if not failure:
                report = self._hosts.report()
        except TrialError as error:
            failure = f"failed: {error}"
        self._last = report or self._last
        if failure:
            failure = f"launch {number} ({name}) {failure}; the output of its ranks is in {log}"
            failure = f"{running.own_error()}\n{failure}"
        self._hosts.end_launch(number, self._last, failure)
        if report is None:
            raise TrialError(failure)
        return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.steps, options.skip) < 1 or options.launches < 2 or not options.timeout > 0:
        parser.error("--steps and --skip are at least 1, --launches 2, --timeout above 0")
    signal.signal(signal.SIGTERM, _end)
    folder = Path(tempfile.mkdtemp(prefix="byteps-trial-"))
    hosts = Hosts(options.steps, options.skip)
    try:
        with hosts.desk:
            _Trial(options, folder, hosts).run()
    except TrialError as error:  # the launches' logs are kept
        lines, end, why = str(error).rpartition("\n")
        print(f"{lines}{end}{parser.prog}: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
