"""Groups of ranks: division of arguments, joined results, failures; moving state off devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import ray
import torch

from megatron_byteps_ray import dispatch, strategies
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.dispatch import DispatchError, Group, Mesh, RankLost
from megatron_byteps_ray.offload import DeviceState, Offloads
from megatron_byteps_ray.strategies import Arguments, Place
from tests.layouts.job import CPU, CUDA
from tests.layouts.under_ray.modes import environment_on

_LATE_S = 4.0


def _through(mesh: Mesh, by: str, *values: Any, **named: Any) -> tuple[list[Any], Any]:
    """Get each rank's part of the first argument, and the parts joined again."""
    how = dispatch.strategy(by)
    cut = [own.values()[0] for own in how.cut(mesh, Arguments(values, named))]
    return cut, how.join(mesh, cut)


def test_the_mesh_is_numbered_as_megatron_does() -> None:
    mesh = Mesh(tensor=2, context=3, data=2, pipeline=2)
    assert mesh.size == 24
    assert mesh.place(0) == Place(tensor=0, context=0, data=0, pipeline=0)
    assert mesh.place(1) == Place(tensor=1, context=0, data=0, pipeline=0)
    assert mesh.place(2).context == 1 and mesh.place(6).data == 1 and mesh.place(12).pipeline == 1
    assert len(set(mesh.places())) == 24
    with pytest.raises(ValueError, match="size 'data' must be 1 or more, not 0"):
        Mesh(data=0)


@pytest.mark.parametrize(
    "batch",
    [
        list(range(6)),
        torch.arange(12).view(6, 2),
        {"a": numpy.arange(12).reshape(6, 2), "b": [10, 11, 12, 13, 14, 15]},
    ],
    ids=["list", "tensor", "dict"],
)
def test_data_is_cut_over_data_ranks_alone(batch: Any) -> None:
    mesh = Mesh(data=3, tensor=2, pipeline=2)
    cut, joined = _through(mesh, "data", batch)
    assert str(joined) == str(batch)
    for place, own in zip(mesh.places(), cut, strict=True):
        first = own["b"] if isinstance(own, dict) else own
        assert len(first) == 2
        if isinstance(own, list):
            assert own == [2 * place.data, 2 * place.data + 1]


@pytest.mark.parametrize("context", [1, 2, 3])
def test_sequences_are_cut_as_megatron_does(context: int) -> None:
    mesh = Mesh(data=2, context=context, tensor=2)
    batch = torch.arange(2 * 12 * 2).view(2, 12, 2)
    cut, joined = _through(mesh, "sequence", tokens=batch)
    assert joined.equal(batch)
    rank = next(n for n, p in enumerate(mesh.places()) if (p.data, p.context) == (1, context - 1))
    # The last context rank has the two middle chunks of the second row.
    size = 12 // context
    middle = (12 - size) // 2
    assert cut[rank].equal(batch[1:, middle : middle + size])


def test_parts_of_the_model_and_same_values() -> None:
    mesh = Mesh(data=2, tensor=2, pipeline=2)
    cut, joined = _through(mesh, "model", ["p0t0", "p0t1", "p1t0", "p1t1"])
    assert cut == ["p0t0", "p0t1"] * 2 + ["p1t0", "p1t1"] * 2
    assert joined == ["p0t0", "p0t1", "p1t0", "p1t1"]
    assert _through(mesh, "same", {"x": torch.ones(2)})[1]["x"].equal(torch.ones(2))
    with pytest.raises(ValueError, match="rank 1 returned another value than rank 0"):
        dispatch.strategy("same").join(Mesh(data=2), [torch.zeros(2), torch.ones(2)])


@pytest.mark.parametrize(
    ("by", "values", "text"),
    [
        ("data", ([1, 2, 3],), "3 rows cannot be cut evenly over 2 data ranks"),
        ("data", ([1, 2], [1, 2, 3, 4]), "batches of different lengths"),
        ("data", (7,), "no batch: int"),
        ("data", ("text",), "no batch: str"),
        ("data", ({"a": [1, 2], "b": [1]},), "no batch: dict"),
        ("sequence", (torch.zeros(2, 6),), "a second axis that 4 chunks divide"),
        ("sequence", ([1, 2],), "a second axis"),
        ("model", ([1, 2],), "a list with 1 items"),
        ("nonsense", ([1, 2],), "no strategy 'nonsense'; there are: all same data"),
    ],
)
def test_what_cannot_be_cut_is_refused(by: str, values: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        strategies.validate(dispatch.strategy(by), Mesh(data=2, context=2), Arguments(values))


@pytest.mark.parametrize("by", ["all", "data", "sequence", "model"])
def test_ranks_that_get_the_same_are_sent_it_once(by: str) -> None:
    mesh = Mesh(data=2, tensor=2, context=2)
    value = ["t0", "t1"] if by == "model" else torch.arange(16).view(2, 8)
    cut = dispatch.strategy(by).cut(mesh, Arguments((value,)))
    expected = {"all": 1, "data": 2, "sequence": 4, "model": 2}[by]
    assert (len(cut), len({id(own) for own in cut})) == (8, expected)


class Rank:
    """Class of the ranks in these tests."""

    def __init__(self, factor: int) -> None:
        torch.distributed.init_process_group("gloo")
        self._factor = factor

    def scaled(self, values: Sequence[int]) -> list[int]:
        return [self._factor * value for value in values]

    def total(self, values: torch.Tensor) -> float:
        total = values.sum()
        torch.distributed.all_reduce(total)
        return total.item()

    def rank(self) -> str:
        return os.environ["RANK"]

    def state(self, value: int | None = None) -> int:
        self._state = getattr(self, "_state", 0) if value is None else value
        return self._state

    def end_once(self, flag: str) -> int:
        """End rank 1, unless it has ended before."""
        if os.environ["RANK"] == "1" and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(1)
        return self._state

    def fail(self, how: str) -> None:
        if torch.distributed.get_rank() == 1:
            if how == "raise":
                raise RuntimeError("a fault")
            if how == "exit":
                os._exit(1)
            time.sleep(_LATE_S)


@pytest.fixture(scope="module")
def group(pool: Pool) -> Iterator[Group]:
    del pool  # the group takes the rest of its cluster
    group = Group.start(Rank, Mesh(data=2), factor=3, cpus=0.5)
    yield group
    group.close()


class _Reversed:
    """A strategy of a user: ranks get the arguments in reverse order."""

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        return list(reversed(dispatch.strategy("data").cut(mesh, arguments)))

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        return dispatch.strategy("data").join(mesh, list(reversed(results)))


class _AllRows(_Reversed):
    """A strategy that gives all rows to each rank and joins all results."""

    def cut(self, mesh: Mesh, arguments: Arguments) -> list[Arguments]:
        return [arguments] * mesh.size


def test_calls(group: Group) -> None:
    assert group.call("scaled", [1, 2, 3, 4]) == [3, 6, 9, 12]
    assert group.call("rank", by="all") == ["0", "1"]
    # Ranks talk to each other during this call.
    assert group.call("total", torch.arange(4.0), by="same") == 12.0
    if "reversed" not in strategies._STRATEGIES:
        dispatch.register("reversed", _Reversed())
    assert group.call("scaled", [1, 2, 3, 4], by="reversed") == [3, 6, 9, 12]
    with pytest.raises(ValueError, match="there is a strategy 'reversed' already"):
        dispatch.register("reversed", _Reversed())
    with pytest.raises(TypeError, match=r"the strategy 'none' has no method cut\(mesh, \.\.\.\)"):
        dispatch.register("none", object())  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match="rank: rank 1 returned another value than rank 0"):
        group.call("rank", by="same")

    def none_above_ten(result: list[int]) -> None:
        if max(result) > 10:
            raise ArithmeticError(f"{max(result)} is above ten")

    with pytest.raises(ArithmeticError, match="12 is above ten"):
        group.call("scaled", [1, 2, 3, 4], check=none_above_ten)


def test_batches_that_ranks_do_not_divide_are_padded(group: Group) -> None:
    assert group.call("scaled", [1, 2, 3], pad=True) == [3, 6, 9]
    assert group.call("scaled", [1, 2, 3, 4], pad=True) == [3, 6, 9, 12]
    with pytest.raises(ValueError, match=r"3 rows cannot be cut evenly .* pad=True"):
        group.call("scaled", [1, 2, 3])
    with pytest.raises(ValueError, match="a batch without rows"):
        group.call("scaled", [], pad=True)
    if "all rows" not in strategies._STRATEGIES:
        dispatch.register("all rows", _AllRows())
    with pytest.raises(DispatchError, match="scaled: the result has 8 rows for 4"):
        group.call("scaled", [1, 2, 3], by="all rows", pad=True)


def test_object_references_are_fetched_by_ranks(group: Group) -> None:
    values = ray.put([1, 2, 3, 4])
    assert group.call("scaled", values, by="same") == [3, 6, 9, 12]
    assert group.call("scaled", values=values) == [3, 6, 9, 12]
    first = group.start_call("scaled", values, by="all")
    # Results of ranks go to ranks again without passing through this process.
    assert group.call("scaled", first.refs[1], by="same") == [9, 18, 27, 36]


def test_a_call_does_not_wait(group: Group) -> None:
    slow = group.start_call("fail", "sleep", by="all")
    after = group.start_call("scaled", [1, 2])
    with pytest.raises(RankLost, match=r"scaled: no answer within 0.5 s of ranks 1"):
        after.result(0.5)
    assert after.result() == [3, 6]
    assert slow.result() == [None, None]


def test_what_several_ranks_get_is_put_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[Any] = []
    put = ray.put

    def counted(value: Any) -> Any:
        puts.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    group.call("scaled", [1, 2], by="all")
    assert puts == [(([1, 2],), {})]
    group.call("scaled", [1, 2])  # a part for each rank
    assert len(puts) == 1


def test_a_group_that_lost_a_rank_is_made_anew(pool: Pool, run_dir: Path) -> None:
    del pool
    restored: list[int] = []

    def restore(group: Group) -> None:
        restored.append(group.restarts)
        group.call("state", 7, by="all")

    recovers = Group.start(Rank, Mesh(data=2), factor=1, cpus=0.5, max_restarts=1, restore=restore)
    try:
        recovers.call("state", 5, by="all")
        assert recovers.call("end_once", str(run_dir / "ended"), by="all") == [7, 7]
        assert (recovers.restarts, restored) == (1, [1])
        # Ranks of the new actors find each other.
        assert recovers.call("total", torch.arange(4.0), by="same") == 12.0
        with pytest.raises(RankLost, match="end_once: rank 1 was lost"):
            recovers.call("end_once", str(run_dir / "ended twice"), by="all")
    finally:
        recovers.close()


def test_failures_are_named(group: Group) -> None:
    with pytest.raises(DispatchError, match="fail: rank 1 raised RuntimeError: a fault"):
        group.call("fail", "raise", by="all")
    with pytest.raises(DispatchError, match=r"fail: no answer within 2 s of ranks .*1"):
        group.call("fail", "sleep", by="all", limit_s=2.0)
    with pytest.raises(DispatchError, match="fail: rank 1 was lost"):
        group.call("fail", "exit", by="all")
    with pytest.raises(ValueError, match="2 actors for a mesh of 3 ranks"):
        Group(group.actors, Mesh(data=3))


# A group of ranks that moves its state off the devices and back.


RANKS, WIDTH, STEPS = 2, 64, 4


class Trainer(Offloads):
    """A rank program that trains through BytePS, in bf16 with the distributed optimizer."""

    def __init__(self) -> None:
        from tests.layouts.gpt import offload

        self._how = offload
        self._device = offload.start()
        self._before = self._allocated()
        made = offload.model_of(WIDTH, self._device, through_byteps=True)
        self._module, self._model, self._optimizer = made
        self.device_state = DeviceState([self._model], self._optimizer)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def step(self, number: int) -> str:
        self._how.make_step(number, WIDTH, self._device, self._model, self._optimizer)
        return self.checksum()

    def checksum(self) -> str:
        """Hash the parameters and the optimizer's state."""
        state = torch.nn.ParameterList([t.clone() for t in self.device_state._states()])
        return self._how.checksum(self._module) + self._how.checksum(state)

    def held(self) -> dict[str, int]:
        """Get bytes of the state, and bytes on the device since before the model; 0 without a
        device."""
        return {"state": self.device_state.held_bytes(), "device": self._allocated() - self._before}

    def parameters_are_there(self) -> bool:
        return all(p.untyped_storage().nbytes() > 0 for p in self._module.parameters())


def _train(*, away: bool) -> list[list[str]]:
    """Get the checksums of all ranks after each step; ``away``: state is off the devices between
    steps."""
    gpus = torch.cuda.device_count()
    ranks = min(RANKS, gpus or RANKS)
    group = Group.start(
        Trainer,
        Mesh(data=ranks),
        cpus=0.25,
        gpus=float(gpus > 0),
        environment={
            **environment_on(CUDA if gpus else CPU),
            "BYTEPS_EMBEDDED_SERVERS": "1",
        },
    )

    def call(name: str, *arguments: Any, **named: Any) -> list[Any]:
        return group.call(name, *arguments, by="all", **named)

    try:
        seen = []
        for number in range(STEPS):
            seen.append(call("step", number))
            if not away:
                continue
            there = call("held")
            assert all(one["state"] > 4 * WIDTH * WIDTH for one in there)
            # A part first: gradients alone.
            gradients = call("offload", parameters=False, optimizer=False)
            assert call("parameters_are_there") == [True] * ranks
            assert call("checksum") == seen[-1]
            rest = call("offload")
            assert call("parameters_are_there") == [False] * ranks
            gone = call("held")
            for before, after, *freed in zip(there, gone, gradients, rest, strict=True):
                assert (after["state"], sum(freed)) == (0, before["state"])
                assert after["device"] <= before["device"] / 20
            assert call("offload") == [0] * ranks
            assert call("reload") == [one["state"] for one in there]
            assert call("held") == there
            assert call("checksum") == seen[-1]
        return seen
    finally:
        group.close()


def test_ranks_leave_their_devices_and_come_back(pool: Pool) -> None:
    del pool  # its cluster has room for both groups
    whole = _train(away=False)
    assert len({own for step in whole for own in step}) == STEPS * len(whole[0])
    assert _train(away=True) == whole


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_plain_modules_leave_too(kind: type) -> None:
    """In fp32 the optimizer's parameters are the model's: each is moved once."""
    first, last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4, bias=False)
    last.weight = torch.nn.Parameter(first.weight.detach().t())
    model = torch.nn.Sequential(first, last)
    optimizer = kind(model.parameters(), lr=0.1)
    state = DeviceState([model], optimizer)

    def step() -> list[torch.Tensor]:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    before = step()
    count = state.held_bytes()
    moments = 2 * 4 * (24 + 6 + 24) if kind is torch.optim.AdamW else 0
    assert count == 4 * (24 + 6) + moments
    assert state.offload(optimizer=False) == 4 * (24 + 6)
    assert state.offload() == moments
    assert state.held_bytes() == 0
    assert state.reload() == count
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    step()
