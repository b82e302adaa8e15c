"""CUDA streams of our own, without a GPU: their assignment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from byteps.torch import c_lib, streams

SOURCES = Path(__file__).parents[2] / "byteps" / "byteps" / "torch"


def test_a_purpose_has_one_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(device: int) -> int:
        made.append(device)
        return 1000 + len(made)

    def external(handle: int, device: Any) -> tuple[int, int]:
        return handle, device.index

    monkeypatch.setattr(c_lib, "make_stream", make)
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(streams, "_made", {})
    used = [
        streams.stream_for(purpose, torch.device(device))
        for _ in range(40)
        for purpose in ("landing", "futures")
        for device in ("cuda:0", "cuda:1", "cuda")
    ]
    assert set(used) == {(1001, 0), (1002, 1), (1003, 0), (1004, 1)}
    assert made == [0, 1, 0, 1]


def test_nothing_takes_a_stream_of_torchs_pool() -> None:
    """The pool's 32 streams are shared with the program."""
    for path in SOURCES.rglob("*.py"):
        if path.name != "streams.py":
            assert not re.search(r"cuda\.Stream\((?!\))", path.read_text()), path
