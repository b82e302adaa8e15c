"""A group of ranks that is told to leave its devices, and to come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_byteps_ray.dispatch import Group, Mesh
from megatron_byteps_ray.offload import DeviceState, Offloads
from megatron_byteps_ray.pool import Pool
from tests.layouts.platforms import CPU, CUDA
from tests.layouts.under_ray.pools import environment_on

RANKS, WIDTH, STEPS = 2, 64, 4


class Trainer(Offloads):
    """Two ranks that train through BytePS, in bf16 with the distributed optimizer."""

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
        """Of the parameters, and of the optimizer's state."""
        state = torch.nn.ParameterList([t.clone() for t in self.device_state._states()])
        return self._how.checksum(self._module) + self._how.checksum(state)

    def held(self) -> dict[str, int]:
        """Bytes: of the state, and on the device since before the model, 0 without one."""
        return {"state": self.device_state.held_bytes(), "device": self._allocated() - self._before}

    def parameters_are_there(self) -> bool:
        return all(p.untyped_storage().nbytes() > 0 for p in self._module.parameters())


def _train(*, away: bool) -> list[list[str]]:
    """The checksums of all ranks after each step; ``away``: with nothing on devices in between."""
    on_gpus = torch.cuda.device_count() >= RANKS
    group = Group.start(
        Trainer,
        Mesh(data=RANKS),
        cpus=0.25,
        gpus=float(on_gpus),
        environment={
            **environment_on(CUDA if on_gpus else CPU),
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
            # First a part: gradients alone.
            gradients = call("offload", parameters=False, optimizer=False)
            assert call("parameters_are_there") == [True] * RANKS
            assert call("checksum") == seen[-1]
            rest = call("offload")
            assert call("parameters_are_there") == [False] * RANKS
            gone = call("held")
            for before, after, *freed in zip(there, gone, gradients, rest, strict=True):
                assert (after["state"], sum(freed)) == (0, before["state"])
                assert after["device"] <= before["device"] / 20
            assert call("offload") == [0] * RANKS
            assert call("reload") == [one["state"] for one in there]
            assert call("held") == there
            assert call("checksum") == seen[-1]
        return seen
    finally:
        group.close()


def test_ranks_leave_their_devices_and_come_back(pool: Pool) -> None:
    del pool  # whose cluster has room for them
    whole = _train(away=False)
    assert len({own for step in whole for own in step}) > STEPS
    assert _train(away=True) == whole


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_plain_modules_leave_too(kind: type) -> None:
    """In fp32, where the optimizer's parameters are the model's: each is moved once."""
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
