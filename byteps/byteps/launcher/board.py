"""Board: the ranks of a job that starts tell rank 0 something here, and read its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from byteps.launcher.meeting import AbsentError, Store, gather, tell, wait_for
from byteps.launcher.places import byteps_error

GRACE_S = 2.0
"""Time for which the others wait longer than rank 0, which says why it gives up."""

Message = dict[str, Any]
"""Plain types: it travels as JSON."""
Answer = Callable[[list[Message]], list[Message]]


@dataclass(frozen=True, kw_only=True)
class Board:
    """A part of torch.distributed's store.

    Whatever keeps rank 0 from answering is the answer to all, so that every rank fails at once,
    with the cause. Each reads what is for itself alone: a large job reads few bytes.
    """

    store: Store
    rank: int
    size: int
    timeout_s: float
    deadline: float
    """On the clock of time.monotonic()."""

    def ask(self, mine: Message, answer: Answer) -> Message:
        """Tell `mine`, and return the answer for this rank; all ranks call this.

        Args:
            answer: called on rank 0 with what each rank told, in the order of ranks; returns what
                each is answered.

        Raises:
            BytePSError: a rank did not come, or `answer` raised; the text says which, and why.
        """
        try:
            return self._answer_all(mine, answer) if self.rank == 0 else self._read(mine)
        except RuntimeError as error:
            if isinstance(error, type(byteps_error(""))):
                raise
            # torch's DistStoreError is one.
            raise byteps_error(f"BytePS: torch.distributed's store failed: {error}") from error

    def _answer_all(self, mine: Message, answer: Answer) -> Message:
        prefix = ""
        try:
            prefix, told = gather(self.store, "start", self.size, self.deadline)
            answers = answer([mine, *map(json.loads, told)])
        except Exception as error:
            found = error
            if isinstance(error, AbsentError):
                prefix = error.prefix
                found = byteps_error(
                    f"BytePS: ranks {error.members} of {self.size} did not start BytePS within "
                    f"{self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S). Set BYTEPS_C10D, or what else "
                    "starts it, on all hosts, and DMLC_PS_ROOT_URI on all of them or on none"
                )
            if prefix:
                self._write(prefix, [{"error": str(found)}] * self.size)
            raise found from None
        self._write(prefix, answers)
        return answers[0]

    def _write(self, prefix: str, answers: list[Message]) -> None:
        for rank in range(1, self.size):
            self.store.set(f"{prefix}/answer/{rank}", json.dumps(answers[rank]))

    def _read(self, mine: Message) -> Message:
        until = self.deadline + GRACE_S
        answer: Message | None = None
        try:
            prefix = tell(self.store, "start", self.rank, json.dumps(mine), until)
            key = f"{prefix}/answer/{self.rank}"
            if wait_for(self.store, [key], until):
                answer = json.loads(self.store.get(key))
        except AbsentError:
            pass
        if answer is None:
            raise byteps_error(
                f"BytePS: rank 0 did not answer within {self.timeout_s:g} s "
                "(BYTEPS_START_TIMEOUT_S): did it call bps.init(), and is DMLC_PS_ROOT_URI set on "
                "all ranks or on none?"
            )
        if "error" in answer:
            raise byteps_error(f"BytePS, rank 0: {answer['error']}")
        return answer
