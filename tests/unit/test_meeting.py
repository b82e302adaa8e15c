"""Ranks meet in a store that still has entries of processes from before a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from byteps.launcher.meeting import AbsentError, meet
from byteps.torch.c10d.reductions import _exchange
from byteps.torch.world import RankFacts

LIMIT_S = 60.0
"""Limit in seconds, against hangs."""


def met(
    store: dist.Store, members: Sequence[int], size: int, limit_s: float = LIMIT_S
) -> list[str]:
    """Return the prefixes that these members get. Each member comes when the one before it
    waits."""
    with ThreadPoolExecutor(size) as pool:
        deadline = time.monotonic() + limit_s
        come = [pool.submit(meet, store, "name", member, size, deadline) for member in members]
        return [future.result() for future in come]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_life_has_keys_of_its_own(order: tuple[int, ...]) -> None:
    store = dist.HashStore()
    lives = [met(store, order, 3) for _ in range(4)]
    assert all(len(set(prefixes)) == 1 for prefixes in lives)
    assert len({prefixes[0] for prefixes in lives}) == 4


def test_a_first_member_that_comes_long_after_the_others() -> None:
    """The other members find an old entry of the first member, and must not take it."""
    store = dist.HashStore()
    [old, *_] = met(store, (0, 1, 2), 3)
    with ThreadPoolExecutor(3) as pool:
        deadline = time.monotonic() + LIMIT_S
        waiting = [pool.submit(meet, store, "name", member, 3, deadline) for member in (1, 2)]
        await_keys(lambda: len({store.get(f"byteps/name/nonce/{m}") for m in (1, 2)}) == 2)
        assert not any(future.done() for future in waiting)
        new = meet(store, "name", 0, 3, deadline)
        assert {future.result() for future in waiting} == {new} != {old}


def await_keys(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_member_of_the_last_life_does_not_count() -> None:
    """A nonce from before the restart is still there. The error names the members that came, and
    those that did not."""
    store = dist.HashStore()
    met(store, (0, 1, 2), 3)
    prefixes: list[str] = []
    other = threading.Thread(
        target=lambda: prefixes.append(meet(store, "name", 1, 3, time.monotonic() + LIMIT_S))
    )
    other.start()
    with pytest.raises(AbsentError) as raised:
        meet(store, "name", 0, 3, time.monotonic() + 1.0)
    other.join(LIMIT_S)
    assert raised.value.members == [2]
    assert prefixes == [raised.value.prefix]


def test_a_meeting_without_its_first_member_fails() -> None:
    store = dist.HashStore()
    met(store, (0, 1), 2)
    with pytest.raises(AbsentError) as raised:
        meet(store, "name", 1, 2, time.monotonic() + 0.2)
    assert raised.value.members == [0]


def test_a_member_alone_waits_for_nobody() -> None:
    assert meet(dist.HashStore(), "name", 0, 1, time.monotonic()).startswith("byteps/name/")


class _LateStore:
    """A store to which messages of ranks take a while."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        if "/told/" in key and value and not key.endswith("/0"):
            time.sleep(0.2)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_hosts_are_read_once_all_ranks_have_told_theirs() -> None:
    store, deadline = _LateStore(), time.monotonic() + LIMIT_S
    facts = [RankFacts(host, 0.0, -1, 0, True, [], []) for host in ("a", "b", "c")]

    def exchange(rank: int) -> tuple[Sequence[RankFacts], str]:
        return _exchange(store, rank, 3, facts[rank], deadline)

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(exchange, range(3)))
    assert [names for names, _ in answers] == [facts] * 3
    assert len({nonce for _, nonce in answers}) == 1
