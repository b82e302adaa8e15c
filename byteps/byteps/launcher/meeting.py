"""How the ranks of a job agree on something: through torch.distributed's store.

Here is the one place where keys for that store are made. torchrun lends all lives of a job one
store, so a rank that was started again finds what the last life wrote there.
TORCHELASTIC_RESTART_COUNT does not tell lives apart: each host's agent counts its own restarts. So
ranks use no key before they have agreed on a random one, which no earlier life has seen:

1. Each member writes a random number, its nonce, at a place that all lives share.
2. The first member answers every nonce that it finds, at a place named by the nonce, with the key.
   It does so again where a nonce changes: the one it had answered was of an earlier life.
3. Each member says that it has the key, at a place named by the key.

Processes of one life may meet under one name as often as they like.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from byteps.launcher.places import byteps_error

FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.1
"""The first member looks for nonces as often as this, and more and more rarely."""


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AbsentError(RuntimeError):
    """Members did not come in time."""

    def __init__(self, members: list[int], prefix: str) -> None:
        super().__init__(f"members {members} did not come in time")
        self.members = members
        self.prefix = prefix
        """Of the keys that those who came use; empty where the first member is absent."""


def meet(store: Store, name: str, member: int, size: int, deadline: float) -> str:
    """Return the prefix of keys that the processes which meet now have for themselves.

    All `size` members call this, each with its number. The first one returns when all others have
    the prefix, the others as soon as they have it themselves.

    Args:
        name: of what they meet for, the same on all.
        deadline: of time.monotonic().

    Raises:
        AbsentError: the first member names the others that did not come; others that one.
        RuntimeError: the store failed, which is a DistStoreError.
    """
    place = f"byteps/{name}"
    if member == 0:
        return _lead(store, place, size, deadline)
    nonce = secrets.token_hex(8)
    answer = f"{place}/answer/{nonce}"
    store.set(f"{place}/nonce/{member}", nonce)
    if not wait_for(store, [answer], deadline):
        raise AbsentError([0], "")
    prefix = store.get(answer).decode()
    store.set(f"{prefix}/has/{member}", "")
    return prefix


def _lead(store: Store, place: str, size: int, deadline: float) -> str:
    prefix = f"{place}/{secrets.token_hex(8)}"
    unseen = [f"{place}/nonce/{member}" for member in range(1, size)]
    have = [f"{prefix}/has/{member}" for member in range(1, size)]
    seen: list[str] = []
    answered: set[bytes] = set()
    pause = FIRST_LOOK_S
    while have:
        before, unseen = unseen, []
        for key in before:
            (seen if store.check([key]) else unseen).append(key)
        # To answer a nonce of an earlier life, too, does no harm: nobody reads it.
        for nonce in set(store.multi_get(seen) if seen else ()) - answered:
            store.set(f"{place}/answer/{nonce.decode()}", prefix)
            answered.add(nonce)
        if not unseen and store.check(have):
            break
        if time.monotonic() > deadline:
            absent = [member for member, key in enumerate(have, 1) if not store.check([key])]
            raise AbsentError(absent, prefix)
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK_S)
    return prefix


def wait_for(store: Store, keys: list[str], deadline: float) -> bool:
    """Whether all keys were there before `deadline`, of time.monotonic().

    Raises:
        RuntimeError: the store failed.
    """
    left = max(0.001, deadline - time.monotonic())
    try:
        # Ended by the keys; deadline: the caller's.
        store.wait(keys, timedelta(seconds=left))
    except RuntimeError:  # DistStoreError is one
        if time.monotonic() >= deadline - 0.05:
            return False
        raise
    return True


# What all ranks tell rank 0, and its answers.


GRACE_S = 2.0
"""For which the others wait longer than rank 0."""

T = TypeVar("T")
Message = dict[str, Any]
"""Plain types: it travels as JSON."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """Where the ranks of a job that starts tell rank 0 something, and read its answers.

    Whatever keeps rank 0 from answering is the answer to all, so that every rank fails at once,
    with the cause. Each reads what is for itself alone: a large job reads few bytes.
    """

    store: Store
    rank: int
    size: int
    timeout_s: float
    deadline: float
    """On the clock of time.monotonic()."""

    def ask(self, mine: Message, answer: Callable[[list[Message]], list[Message]]) -> Message:
        """Tell `mine`, and return the answer for this rank; all ranks call this.

        Args:
            answer: called on rank 0 with what each rank told, in the order of ranks; returns what
                each is answered.

        Raises:
            BytePSError: a rank did not come, or `answer` raised; the text says which, and why.
        """
        prefix = self._meet()
        self._use(lambda: self.store.set(f"{prefix}/told/{self.rank}", json.dumps(mine)))
        if self.rank == 0:
            try:
                answers = answer(self._told(prefix))
            except Exception as error:
                self._answer_all(prefix, [_error_of(error)] * self.size)
                raise
            self._answer_all(prefix, answers)
            return answers[0]
        return self._answer(prefix)

    @property
    def _until(self) -> float:
        # Rank 0 gives up at its own deadline and says so; leave it the time to.
        return self.deadline if self.rank == 0 else self.deadline + GRACE_S

    def _use(self, call: Callable[[], T]) -> T:
        """Call what uses the store, whose failure is an error of ours."""
        try:
            return call()
        except AbsentError:
            raise
        except RuntimeError as error:  # DistStoreError is one
            raise byteps_error(f"BytePS: torch.distributed's store failed: {error}") from error

    def _meet(self) -> str:
        try:
            return self._use(lambda: meet(self.store, "start", self.rank, self.size, self._until))
        except AbsentError as error:
            if self.rank != 0:
                raise self._no_answer() from None
            absent = byteps_error(
                f"BytePS: ranks {error.members} of {self.size} did not call bps.init() within "
                f"{self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S), or did not look for the others: "
                "set DMLC_PS_ROOT_URI on all ranks or on none"
            )
            self._answer_all(error.prefix, [_error_of(absent)] * self.size)
            raise absent from None

    def _no_answer(self) -> RuntimeError:
        return byteps_error(
            f"BytePS: rank 0 did not answer within {self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S): "
            "did it call bps.init(), and is DMLC_PS_ROOT_URI set on all ranks or on none?"
        )

    def _await(self, keys: list[str], deadline: float) -> bool:
        return self._use(lambda: wait_for(self.store, keys, deadline))

    def _answer(self, prefix: str) -> Message:
        key = f"{prefix}/answer/{self.rank}"
        if not self._await([key], self._until):
            raise self._no_answer()
        answer: Message = json.loads(self._use(lambda: self.store.get(key)))
        if "error" in answer:
            raise byteps_error(f"BytePS, rank 0: {answer['error']}")
        return answer

    def _told(self, prefix: str) -> list[Message]:
        keys = [f"{prefix}/told/{rank}" for rank in range(self.size)]
        if not self._await(keys, self.deadline):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise byteps_error(
                f"BytePS: ranks {missing} of {self.size} ended, or said nothing more, within "
                f"{self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S)"
            )
        return [json.loads(text) for text in self._use(lambda: self.store.multi_get(keys))]

    def _answer_all(self, prefix: str, answers: list[Message]) -> None:
        for rank, answer in enumerate(answers):
            self.store.set(f"{prefix}/answer/{rank}", json.dumps(answer))


def _error_of(error: Exception) -> Message:
    return {"error": str(error)}
