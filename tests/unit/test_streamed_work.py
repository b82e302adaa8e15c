"""When an all-reduce that streams wait for is queued, and how long its tensors are kept.

On GPUs: tests/gpu/test_streams.py. Here streams are lists of what they were given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from byteps.torch import c_lib
from byteps.torch.c10d import streamed_work
from byteps.torch.c10d.streamed_work import StreamedWork


class Event:
    come = False

    def query(self) -> bool:
        return self.come


class Stream:
    def __init__(self, device: object = None) -> None:
        self.given: list[object] = []

    def record_event(self) -> Event:
        self.given.append(event := Event())
        return event

    def wait_event(self, event: Event) -> None:
        self.given.append(event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The current stream, and that on which sums land."""
    known: dict[str, Any] = {"current": Stream()}

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, known["current"] = known["current"], stream
        yield
        known["current"] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: known["current"])
    monkeypatch.setattr(streamed_work, "_streams", {})
    monkeypatch.setattr(streamed_work, "_landing", type(streamed_work._landing)())
    monkeypatch.setattr(c_lib, "check", lambda: None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return known


def test_what_nobody_waits_for_is_queued_all_the_same(streams: dict[str, Any]) -> None:
    given: list[str] = []
    StreamedWork([torch.ones(1)], lambda: given.append("received"))
    assert given == ["received"]
    (landing,) = streamed_work._streams.values()
    assert len(landing.given) == 1  # type: ignore[attr-defined]
    assert streams["current"].given == []


def test_with_one_queue_of_the_device_the_first_who_waits_queues_it(
    streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    given: list[str] = []
    work = StreamedWork([torch.ones(1)], lambda: given.append("received"))
    assert given == []
    work.wait()
    work.wait()
    assert given == ["received"]
    assert len(streams["current"].given) == 2


def test_tensors_are_kept_until_they_have_landed(
    streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [StreamedWork([torch.ones(1)], lambda: None, [torch.ones(2)]) for _ in range(3)]
    events = [event for event, _ in streamed_work._landing]
    assert [len(tensors) for _, tensors in streamed_work._landing] == [2, 2, 2]
    for event in events[:2]:
        event.come = True  # type: ignore[attr-defined]
    assert [work.is_completed() for work in works] == [True, True, False]
    StreamedWork([torch.ones(1)], lambda: None)
    assert next(event for event, _ in streamed_work._landing) is events[2]
    landing = [event for event, _ in streamed_work._landing]
    monkeypatch.setattr(c_lib, "check", lambda: setattr(landing.pop(0), "come", True))
    with pytest.raises(IndexError):  # it looks once more when all have landed
        streamed_work.await_all()
    assert not streamed_work._landing
    assert all(work.is_completed() for work in works)


def test_the_next_call_hears_of_a_failure(
    streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = StreamedWork([torch.ones(1)], lambda: None)

    def fail() -> None:
        raise c_lib.BytePSError("worker 1 was lost")

    monkeypatch.setattr(c_lib, "check", fail)
    for call in (work.wait, work.result, streamed_work.await_all):
        with pytest.raises(c_lib.BytePSError, match="worker 1 was lost"):
            call()
    assert "worker 1" in str(work.exception())


def test_without_streams_there_is_nothing_to_await(
    streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_lib, "check", lambda: pytest.fail("the job was looked at"))
    streamed_work.await_all()
