"""Ranks find their places on their hosts where the launcher tells none that can be."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from byteps.torch import hosts

Told = tuple[str, str]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "LOCAL_RANK", "BYTEPS_HOST_ID"):
        # Set and deleted, so that what the test leaves goes too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(hosts, "_found", (None, None))
    monkeypatch.setattr(hosts, "host_name", lambda: "mine")


def _find(rank: int, others: Sequence[Told]) -> tuple[str | None, str | None]:
    """The place that a rank finds which the launcher told 0; `others` is what each rank told, with
    its own place left out."""

    def exchange(mine: Told) -> list[Told]:
        return [*others[:rank], mine, *others[rank:]]

    hosts.find_place(rank, exchange)
    return os.environ.get("BYTEPS_LOCAL_RANK"), os.environ.get("BYTEPS_LOCAL_SIZE")


@pytest.mark.parametrize("told", ["0", ""])
def test_ranks_that_are_all_said_to_be_alone(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if told:
        monkeypatch.setenv("LOCAL_RANK", told)
    assert _find(2, [("mine", told), ("other", told), ("other", told)]) == ("1", "2")


def test_a_launcher_that_tells_places_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _find(1, [("mine", "0"), ("other", "0"), ("other", "1")]) == (None, None)


def test_a_place_that_some_rank_was_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _find(1, [("mine", "named")]) == (None, None)
    monkeypatch.setenv("BYTEPS_LOCAL_RANK", "7")
    assert _find(1, [("mine", "0")]) == ("7", None)


def test_a_later_job_of_the_process_finds_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _find(1, [("mine", "0")]) == ("1", "2")
    assert _find(0, [("mine", "0"), ("mine", "0")]) == ("0", "3")
