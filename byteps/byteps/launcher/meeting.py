"""Agreement of ranks on keys in torch.distributed's store that no process has used before.

torchrun gives a restarted job the same store, so restarted ranks find keys that earlier processes
have written. TORCHELASTIC_RESTART_COUNT cannot tell restarts apart, because each host's agent
counts its own. So ranks first agree on a random key, which no earlier process knows:

1. Each member writes a random number, its nonce, under a fixed key.
2. The first member answers every nonce that it finds: it writes the random key under a key named by
   the nonce. If a nonce changes, the earlier nonce was that of an ended process, and the first
   member answers again.
3. Each member writes its message under the random key.

The same processes may meet under the same name any number of times.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Protocol

FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.1
"""Shortest and longest pause, in seconds, between two looks of the first member for other members'
nonces."""


class Store(Protocol):
    """Methods of torch.distributed's key-value store that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AbsentError(RuntimeError):
    """Some members did not call `meet` in time."""

    def __init__(self, members: list[int], prefix: str) -> None:
        super().__init__(f"members {members} did not come in time")
        self.members = members
        self.prefix = prefix
        """Prefix of the keys of the present members; empty if the first member is absent."""


def meet(store: Store, name: str, member: int, size: int, deadline: float) -> str:
    """Return a prefix of keys that only the processes that meet now use.

    All `size` members call this, each with its own number. The first member returns when all others
    have the prefix. Each other member returns as soon as it has the prefix.

    Args:
        name: name of the purpose, the same on all members.
        deadline: a time.monotonic().

    Raises:
        AbsentError: members did not come in time. The first member raises it with the numbers of
            the absent members, any other member with the number of the first.
        RuntimeError: the store failed; torch raises a DistStoreError.
    """
    if member == 0:
        return gather(store, name, size, deadline)[0]
    return tell(store, name, member, "", deadline)


def tell(store: Store, name: str, member: int, text: str, deadline: float) -> str:
    """Meet as any member but the first; the first member gets `text`. See `meet`."""
    meeting, nonce = f"byteps/{name}", secrets.token_hex(8)
    answer = f"{meeting}/answer/{nonce}"
    store.set(f"{meeting}/nonce/{member}", nonce)
    if not wait_for(store, [answer], deadline):
        raise AbsentError([0], "")
    prefix = store.get(answer).decode()
    store.set(f"{prefix}/told/{member}", text)
    return prefix


def gather(store: Store, name: str, size: int, deadline: float) -> tuple[str, list[str]]:
    """Meet as the first member. Return the prefix, and the texts of the other members. See
    `meet`."""
    meeting = f"byteps/{name}"
    prefix = f"{meeting}/{secrets.token_hex(8)}"
    unseen = [f"{meeting}/nonce/{member}" for member in range(1, size)]
    keys = [f"{prefix}/told/{member}" for member in range(1, size)]
    seen: list[str] = []
    answered: set[bytes] = set()
    pause = FIRST_LOOK_S
    while keys:
        before, unseen = unseen, []
        for key in before:
            (seen if store.check([key]) else unseen).append(key)
        # Answers to nonces of ended processes do no harm, because nobody reads them.
        for nonce in set(store.multi_get(seen) if seen else ()) - answered:
            store.set(f"{meeting}/answer/{nonce.decode()}", prefix)
            answered.add(nonce)
        if not unseen and store.check(keys):
            return prefix, [text.decode() for text in store.multi_get(keys)]
        if time.monotonic() > deadline:
            absent = [member for member, key in enumerate(keys, 1) if not store.check([key])]
            raise AbsentError(absent, prefix)
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK_S)
    return prefix, []


def wait_for(store: Store, keys: list[str], deadline: float) -> bool:
    """Wait until all keys exist, or until `deadline` (a time.monotonic()). Return whether they
    exist.

    Raises:
        RuntimeError: the store failed.
    """
    left = max(0.001, deadline - time.monotonic())
    try:
        # The wait is ended by the keys' arrival; deadline: the caller's.
        store.wait(keys, timedelta(seconds=left))
    except RuntimeError:  # DistStoreError is a RuntimeError
        if time.monotonic() >= deadline - 0.05:
            return False
        raise
    return True
