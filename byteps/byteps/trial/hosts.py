"""Keeps the launches on several hosts in step: each launch begins when the previous one has ended
on all hosts.

The process on rank 0's host is the leader. After each launch the other processes tell it how the
launch ended on their host. It answers when the launch has ended on all hosts. Otherwise a launcher
could connect to the previous launch's process, which still listens.
"""

from __future__ import annotations

import threading
import time

from byteps.trial.reports import Desk, Message, ask

_LIMIT_S = 120.0
"""Time, in seconds, for the launchers on all hosts to end once the ranks have reported."""


class TrialError(Exception):
    """The comparison cannot continue. The last line of the text has the reason."""


class Hosts:
    """The processes that launch ranks, one per host. Each has such an object."""

    def __init__(self, steps: int, skipped: int) -> None:
        self._changed = threading.Condition()
        self._report: Message | None = None
        self._short = 0
        self._others: dict[tuple[int, str], str] = {}
        """On the leader: the error of each launch on other hosts ("": none). Keys: launch number,
        and token of the process on that host."""
        self._own: dict[int, str] = {}
        """On the leader: the error of each launch on any host ("": none), by launch number. It is
        set when the launch has ended on all hosts."""
        self.desk = Desk(self._answer, steps, skipped)

    def report(self) -> Message:
        """Return the report of the ranks of the launch that has just ended.

        Raises:
            TrialError: no rank has reported enough steps.
        """
        with self._changed:
            report, self._report = self._report, None
            short, self._short = self._short, 0
        if report is not None:
            return report
        settings = self.desk.settings
        if short:
            raise TrialError(
                f"the job ended by itself after {short} steps, and {settings.skipped} + "
                f"{settings.steps} were wanted: take fewer (--steps), or a longer job"
            )
        raise TrialError(
            "no rank reported a step. Ranks do so if the wheel of byteps is installed for their "
            "Python, torch loads its plugins (TORCH_DEVICE_BACKEND_AUTOLOAD is not 0), the "
            "launcher passes the environment on (mpirun: -x BYTEPS_TRIAL), and a torch optimizer "
            "or Megatron's training loop makes steps"
        )

    def end_launch(self, number: int, report: Message | None, failure: str) -> None:
        """Wait until a launch has ended on all hosts.

        Args:
            report: report of this launch. If it has none, that of an earlier launch.
            failure: reason why the launch failed on this host; empty if it did not.

        Raises:
            TrialError: the launch failed on another host.
        """
        if report is None or len(report["firsts"]) == 1:
            return
        token = self.desk.settings.token
        if report["leader"]["token"] == token:
            others = set(report["firsts"]) - {token}
            problem = self._gather(number, others, failure)
        else:
            problem = self._ask_leader(number, report["leader"], failure)
        if problem and not failure:
            raise TrialError(problem)

    def _gather(self, number: int, others: set[str], failure: str) -> str:
        """On the leader: wait for the messages of all other processes; return the first failure, or
        ""."""
        deadline = time.monotonic() + _LIMIT_S

        def missing() -> set[str]:
            return others - {token for launch, token in self._others if launch == number}

        with self._changed:
            # The wait is ended by messages of all others; deadline: _LIMIT_S.
            self._changed.wait_for(lambda: not missing(), deadline - time.monotonic())
            messages = [self._others.get((number, token), "") for token in others]
            problem = failure or next(filter(None, messages), "")
            if not problem and missing():
                problem = (
                    f"launch {number} ended here, and {len(missing())} of {len(others)} other "
                    f"hosts did not say in {_LIMIT_S:g} s that it has ended there"
                )
            self._own[number] = problem
            self._changed.notify_all()
        return problem

    def _ask_leader(self, number: int, leader: Message, failure: str) -> str:
        message = {"ended": number, "failed": failure, "from": self.desk.settings.token}
        try:
            answer = ask(leader["hosts"], leader["port"], leader["token"], message, 2 * _LIMIT_S)
        except OSError as error:
            return f"after launch {number} rank 0's host does not answer: {error}"
        return str(answer["problem"])

    def _answer(self, message: Message) -> Message:
        with self._changed:
            if "report" in message:
                self._report = message["report"]
            elif "steps" in message:
                self._short = max(self._short, int(message["steps"]))
            elif "ended" in message:
                number = int(message["ended"])
                failed = str(message["failed"])
                lines, end, why = failed.rpartition("\n")
                self._others[number, message["from"]] = (
                    failed and f"{lines}{end}another host: {why}"
                )
                self._changed.notify_all()
                # The wait is ended by the leader's own launch; deadline: _LIMIT_S.
                if not self._changed.wait_for(lambda: number in self._own, 2 * _LIMIT_S):
                    return {"problem": f"launch {number} has not ended on rank 0's host"}
                return {"problem": self._own[number]}
            return {"problem": ""}
