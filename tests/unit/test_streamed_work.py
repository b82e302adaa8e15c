"""When an all-reduce that streams wait for is queued, and how long its tensors are kept.

On GPUs: tests/gpu/test_streams.py. Here streams are lists of what they were given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from byteps.torch import c_lib
from byteps.torch.c10d import streamed_work
from byteps.torch.c10d.streamed_work import StreamedWork

type Given = list[Landing]
"""What a stream was given."""


class Landing:
    come = False

    def query(self) -> bool:
        return self.come

    def wait(self, stream: Given) -> None:
        stream.append(self)


class Stream:
    def __init__(self, device: object = None) -> None:
        self.given: Given = []


def land(stream: Any) -> Any:
    stream.given.append(landing := Landing())
    return landing


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Given:
    """The current stream. There is none yet on which sums land."""
    given: Given = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streamed_work, "current_stream", lambda device: given)
    monkeypatch.setattr(streamed_work, "_streams", {})
    monkeypatch.setattr(streamed_work, "_landing", type(streamed_work._landing)())
    monkeypatch.setattr(c_lib, "check", lambda: None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return given


def test_what_nobody_waits_for_is_queued_all_the_same(current: Given) -> None:
    StreamedWork([torch.ones(1)], land)
    (stream,) = streamed_work._streams.values()
    assert len(stream.given) == 1  # type: ignore[attr-defined]
    assert current == []


def test_with_one_queue_of_the_device_the_first_who_waits_queues_it(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    work = StreamedWork([torch.ones(1)], land)
    assert not streamed_work._streams
    work.wait()
    work.wait()
    (stream,) = streamed_work._streams.values()
    assert current == stream.given * 2  # type: ignore[attr-defined]
    assert len(current) == 2


def test_tensors_are_kept_until_they_have_landed(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [StreamedWork([torch.ones(1)], land, [torch.ones(2)]) for _ in range(3)]
    moments: list[Any] = [moment for moment, _ in streamed_work._landing]
    assert [len(tensors) for _, tensors in streamed_work._landing] == [2, 2, 2]
    for moment in moments[:2]:
        moment.come = True
    assert [work.is_completed() for work in works] == [True, True, False]
    StreamedWork([torch.ones(1)], land)
    assert next(moment for moment, _ in streamed_work._landing) is moments[2]
    landing = [moment for moment, _ in streamed_work._landing]
    monkeypatch.setattr(c_lib, "check", lambda: setattr(landing.pop(0), "come", True))
    with pytest.raises(IndexError):  # it looks once more when all have landed
        streamed_work.await_all()
    assert not streamed_work._landing
    assert all(work.is_completed() for work in works)


def test_the_next_call_hears_of_a_failure(current: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    work = StreamedWork([torch.ones(1)], land)

    def fail() -> None:
        raise c_lib.BytePSError("worker 1 was lost")

    monkeypatch.setattr(c_lib, "check", fail)
    for call in (work.wait, work.result, streamed_work.await_all):
        with pytest.raises(c_lib.BytePSError, match="worker 1 was lost"):
            call()
    assert "worker 1" in str(work.exception())


def test_without_streams_there_is_nothing_to_await(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_lib, "check", lambda: pytest.fail("the job was looked at"))
    streamed_work.await_all()
