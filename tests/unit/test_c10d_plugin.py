"""Backends of torch.distributed that a process group has, by name."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.c10d_plugin import Asked


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cuda:nccl", {"cuda": "nccl"}),
        ("cpu:gloo,cuda:gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("cuda:nccl,cpu:gloo", {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_all_spellings_of_gloo_and_nccl_are_carried(name: str, backends: dict[str, str]) -> None:
    asked = Asked.of(name)
    assert asked.backends == backends
    assert asked.is_carried


def test_a_group_that_names_no_backend_is_carried() -> None:
    assert Asked.of(dist.Backend.UNDEFINED).is_carried


@pytest.mark.parametrize("name", ["fake", "ucc", "cpu:gloo,cuda:ucc"])
def test_others_are_not_and_a_line_says_so(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Asked.of(name).is_carried
    monkeypatch.setattr(c10d_plugin, "_told", set())
    made: list[str] = []

    def make(backend: str) -> tuple[None, None]:
        made.append(backend)
        return None, None

    carrying = c10d_plugin._carrying(make)
    with caplog.at_level(logging.WARNING):
        carrying(name)
        carrying(name)
    assert made == [name, name]
    assert [record.getMessage().count(name) for record in caplog.records] == [1]


def test_a_misspelt_switch_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of hooks without the switch are right: hooks read them."""
    monkeypatch.delenv("BYTEPS_C10D", raising=False)
    monkeypatch.setenv("BYTEPS_C10D_WIRE_DTYPE", "int8")
    c10d_plugin.autoload()
    assert not caplog.records
    monkeypatch.setenv("BYTEPS_C10", "1")
    c10d_plugin.autoload()
    assert caplog.messages == ["there is no variable BYTEPS_C10: did you mean BYTEPS_C10D?"]
