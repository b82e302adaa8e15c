"""Works of c10d that are completed only through their futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from byteps.torch.c10d import work
from byteps.torch.c10d.work import Line, ServerWork

LIMIT_S = 20.0


class _Rank:
    """A rank with a sum in flight in each of two groups; ranks of a group meet when they
    settle it."""

    def __init__(self, meetings: list[threading.Barrier]) -> None:
        self.lines = [Line() for _ in meetings]
        works = [
            ServerWork([torch.ones(1)], [handle], partial(meeting.wait, LIMIT_S), line)
            for handle, (meeting, line) in enumerate(zip(meetings, self.lines, strict=True))
        ]
        self.futures = [work.get_future() for work in works]


@pytest.fixture
def at_end(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Callbacks that the completion thread gets when operations have ended."""
    calls: list[Callable[[], None]] = []

    def call_at_end(handle: int, then: Callable[[], None]) -> bool:
        calls.append(then)
        return True

    monkeypatch.setattr(work.completions, "call_at_end", call_at_end)
    return calls


def test_sums_that_come_in_another_order_on_each_rank_of_a_host(
    at_end: list[Callable[[], None]],
) -> None:
    meetings = [threading.Barrier(2), threading.Barrier(2)]
    ranks = [_Rank(meetings), _Rank(meetings)]
    first, second = at_end[:2], at_end[2:]

    def complete(ends: list[Callable[[], None]]) -> None:
        for then in ends:
            then()

    threads = [
        threading.Thread(target=complete, args=(ends,), daemon=True)
        for ends in (first, second[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for rank in ranks:
        assert all(torch.equal(future.wait()[0], torch.ones(1)) for future in rank.futures)
        for line in rank.lines:
            line.stop(waits=True)
