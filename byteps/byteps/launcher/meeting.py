"""Processes agree on keys of torch.distributed's store that nobody used before.

torchrun lends all lives of a job one store, so a rank that was started again finds what the last
life wrote there. TORCHELASTIC_RESTART_COUNT does not tell lives apart: each host's agent counts its
own restarts. So ranks use no key before they have agreed on a random one, which no earlier life has
seen:

1. Each member writes a random number, its nonce, at a place that all lives share.
2. The first member answers every nonce that it finds, at a place named by the nonce, with the key.
   It does so again where a nonce changes: the one it had answered was of an earlier life.
3. Each member writes what it has to say at a place named by the key.

Processes of one life may meet under one name as often as they like.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Protocol

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
        """Prefix of the keys of the present members; empty if the first member is absent."""


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
    if member == 0:
        return gather(store, name, size, deadline)[0]
    return tell(store, name, member, "", deadline)


def tell(store: Store, name: str, member: int, text: str, deadline: float) -> str:
    """Meet as another member than the first one, which gets `text`. See `meet`."""
    place, nonce = f"byteps/{name}", secrets.token_hex(8)
    answer = f"{place}/answer/{nonce}"
    store.set(f"{place}/nonce/{member}", nonce)
    if not wait_for(store, [answer], deadline):
        raise AbsentError([0], "")
    prefix = store.get(answer).decode()
    store.set(f"{prefix}/told/{member}", text)
    return prefix


def gather(store: Store, name: str, size: int, deadline: float) -> tuple[str, list[str]]:
    """Meet as the first member: the prefix, and what each other one tells. See `meet`."""
    place = f"byteps/{name}"
    prefix = f"{place}/{secrets.token_hex(8)}"
    unseen = [f"{place}/nonce/{member}" for member in range(1, size)]
    told = [f"{prefix}/told/{member}" for member in range(1, size)]
    seen: list[str] = []
    answered: set[bytes] = set()
    pause = FIRST_LOOK_S
    while told:
        before, unseen = unseen, []
        for key in before:
            (seen if store.check([key]) else unseen).append(key)
        # To answer a nonce of an earlier life, too, does no harm: nobody reads it.
        for nonce in set(store.multi_get(seen) if seen else ()) - answered:
            store.set(f"{place}/answer/{nonce.decode()}", prefix)
            answered.add(nonce)
        if not unseen and store.check(told):
            return prefix, [text.decode() for text in store.multi_get(told)]
        if time.monotonic() > deadline:
            absent = [member for member, key in enumerate(told, 1) if not store.check([key])]
            raise AbsentError(absent, prefix)
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK_S)
    return prefix, []


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
