"""Choice of the replica that saves a checkpoint, decided by scripted sums: no job runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed.dpu_reduce import saves
from megatron.training import training

Sums = list[tuple[str, list[float]]]


class Others:
    """Answers the sums of replica 1 of 2 with scripted values of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums: Sums = []
        self.saved: list[str] = []
        self.missing: list[set[int]] = []
        for name, value in (("replicas", 2), ("replica", 1)):
            monkeypatch.setattr(saves.job, name, lambda value=value: value)
        monkeypatch.setattr(saves.job, "sum_over_replicas", self.answer)
        monkeypatch.setattr(saves.job, "most_inside", list)
        monkeypatch.setattr(saves.job, "replicas_are_alike", lambda model: True)
        monkeypatch.setattr(saves.outer_steps, "before_save", lambda: None)
        monkeypatch.setattr(saves.outer_steps, "save", lambda *args: self.saved.append("outer"))
        monkeypatch.setattr(saves.lost_samples, "take_missing", lambda: {0})
        monkeypatch.setattr(
            saves.lost_samples, "tell", lambda args, missing, present: self.missing.append(missing)
        )
        monkeypatch.setattr(saves.bytepslib.members, "take_missing", set)
        monkeypatch.setattr(saves, "_begun", None)

    def answer(self, own: torch.Tensor, what: str, *, always: bool) -> torch.Tensor:
        name, total = self.sums.pop(0)
        assert what == f"save/{name}" and always
        return own.copy_(torch.tensor(total))

    def save(self, *sums: tuple[str, list[float]], **args: Any) -> list[str]:
        """Save, while the sums over replicas have these results in this order. All results must be
        used. Return what was saved."""
        self.sums, self.saved = list(sums), []
        saves.save_once(
            lambda: self.saved.append("model"), Namespace(**args), [], 6, stays=sums[0][1][3] > 0
        )
        assert not self.sums
        return self.saved


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(monkeypatch)


MINE = ["outer", "model"]
# Whether replicas 0 and 1 are present, and whether they stay. If one is missing, the other's
# values count twice.
BOTH = [1.0, 1.0, 1.0, 1.0]
ALONE = [0.0, 2.0, 0.0, 2.0]
FIRST_LEAVES = [1.0, 1.0, 0.0, 1.0]
BOTH_LEAVE = [1.0, 1.0, 0.0, 0.0]


def test_the_first_that_is_there_and_stays_saves(others: Others) -> None:
    """If the first replica is absent, the next one saves, even if the first was lost in the last
    step and no other replica knows yet."""
    assert others.save(("here", BOTH), ("saved", [1.0, 1.0])) == []
    assert others.save(("here", ALONE), ("saved", [0.0, 2.0])) == MINE
    assert others.save(("here", FIRST_LEAVES), ("saved", [1.0, 1.0])) == MINE
    assert others.save(("here", BOTH_LEAVE), ("saved", [1.0, 1.0])) == []
    assert others.missing == [{0}] * 4


def test_another_one_saves_if_the_first_is_lost_while_it_does(others: Others) -> None:
    lost = [("here", BOTH), ("saved", [0.0, 2.0])]
    assert others.save(*lost, ("here", ALONE), ("saved", [0.0, 2.0])) == MINE
    assert others.missing == [{0}, set()], "the samples of a step are lost once"


def test_a_rank_that_lacks_it_has_all_of_its_replica_try_again(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica was lost between two sums that ranks make concurrently."""
    answers = iter([[0, 0, 0, 0], [1, 0], [1, 0, 1, 0], [1, 0]])
    monkeypatch.setattr(saves.job, "most_inside", lambda facts: next(answers))
    assert (
        others.save(
            ("here", BOTH), ("saved", [1.0, 1.0]), *[("here", ALONE), ("saved", [0.0, 2.0])]
        )
        == MINE
    )


def test_what_is_written_in_the_background_is_asked_for_at_the_end(
    others: Others, tmp_path: Path
) -> None:
    """All replicas must agree, because the replica that wrote the checkpoint may have been lost
    before or after it wrote."""
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    given = {"async_save": True, "save": str(tmp_path)}

    def ends(written: list[float]) -> None:
        others.save(("here", BOTH), ("saved", [1.0, 1.0]), **given)
        others.sums = [("written", written)]
        saves.demand_written()
        assert not others.sums
        saves.demand_written()  # The checkpoint is saved only once.

    tracker.write_text("4")
    ends([1.0, 1.0])
    with pytest.raises(RuntimeError, match=r"replica 0 was lost while it wrote .* iteration 6 "):
        ends([0.0, 2.0])
    tracker.write_text("6")
    ends([0.0, 2.0])


def test_without_replicas_a_signal_is_looked_for_as_megatron_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron looks in a list of as many values as ranks, and makes no tensor of it."""

    def no_tensor(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor is made of the signals")

    args = Namespace(exit_signal_handler=True, save=None, exit_duration_in_mins=None)
    args.exit_interval = args.phase_transition_iterations = None
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "get_timers", lambda: None)
    monkeypatch.setattr(training, "print_datetime", lambda text: None)
    monkeypatch.setattr(training.torch, "tensor", no_tensor)
    for received in ([0] * 8, [0] * 7 + [1]):
        handler = Namespace(signals_received=lambda received=received: received)
        monkeypatch.setattr(training, "get_signal_handler", lambda handler=handler: handler)
        ends = training.checkpoint_and_decide_exit(None, None, None, 1, 0.0, None, None)
        assert ends == any(received)
