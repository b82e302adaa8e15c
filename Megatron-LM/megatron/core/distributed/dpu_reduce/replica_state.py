# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Training state that a joining replica takes from another replica.

Each rank takes the state from the rank with the same index in the other replica. The first message
is a dictionary with the schedule, the loss scale and the random state. Then come tensors, bit for
bit: parameters, buffers, the optimizer's parameters and moments, and with ``--dpu-outer`` the outer
parameters and momentum.

With ``--dpu-optimizer``, replica 0 loads the initial state into the servers. A joining replica
pulls the parameters from the servers, and needs no moments. From another replica it takes the
number of the last step, and how many steps before it were clipped.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import bytepslib, job, outer_steps

if TYPE_CHECKING:
    from .server_optimizer import ServerOptimizer


def demand_loaded() -> None:
    """Check that replica 0 has loaded the servers' initial state. All ranks of all replicas call
    this after loading. Late replicas do not, because the servers have a state already.

    Raises:
        byteps.torch.BytePSError: replica 0 was lost before it had loaded everything.
    """
    if job.replicas() == 1 or bytepslib.members.is_late():
        return
    came = torch.zeros(job.replicas(), dtype=torch.float64)
    came[job.replica()] = 1
    if not job.sum_over_replicas(came, "loaded", always=True)[0]:
        raise bytepslib.byteps.BytePSError(
            "--dpu-optimizer: replica 0 was lost before it had given the servers the parameters "
            "and the optimizer's state: start the job again"
        )


def kept_by_servers(optimizers: Iterable[Any]) -> Iterator[ServerOptimizer]:
    """Yield the optimizers whose state is on the servers."""
    for optimizer in optimizers:
        if hasattr(optimizer, "facts_of_steps"):
            yield optimizer


_COUNTED = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "iteration",
    "num_floating_point_operations_so_far",
)
"""Arguments of Megatron that change during training."""


class State:
    """Training state of this rank. The rank gives it to another rank, or takes it from one."""

    def __init__(
        self, args: Namespace, model: Sequence[Any], optimizer: Any, scheduler: Any
    ) -> None:
        self._args, self._model, self._scheduler = args, model, scheduler
        self._optimizer = optimizer
        self._optimizers = list(outer_steps.inner(optimizer))
        self._on_servers = list(kept_by_servers(self._optimizers))
        self.megabytes = 0.0
        """Number of megabytes sent to or received from the other replica."""
        self.megabytes_of_servers = 0.0
        """Number of megabytes that came from the servers."""

    def give(self, rank: int, name: str, iteration: int, operations: float) -> None:
        """Send the state to the rank with the same index in the joining replica.

        Args:
            name: name of the exchange, the same on both ranks.
            iteration: number of completed iterations.
            operations: floating-point operations of all completed iterations.

        Raises:
            byteps.torch.BytePSError: a server was lost.
        """
        transfer, own_rank = bytepslib.members, bytepslib.byteps.rank()
        args = self._args
        facts = {
            "counted": {what: getattr(args, what, 0) for what in _COUNTED},
            "optimizers": [_facts_of(optimizer) for optimizer in self._optimizers],
            "servers": [optimizer.facts_of_steps() for optimizer in self._on_servers],
            "scheduler": self._scheduler.state_dict(),
            "scaler": _scaler(self._optimizers),
            "random": _random_state(),
            "outer": outer_steps.done(),
        }
        facts["counted"] |= {
            "iteration": iteration,
            "num_floating_point_operations_so_far": operations,
        }
        transfer.give_facts(facts, to=rank, rank=own_rank, name=f"{name}/facts")
        tensors = self._tensors()
        self._count(tensors)
        transfer.give_tensors(tensors, to=rank, rank=own_rank, name=f"{name}/state")
        rounds = {"rounds": bytepslib.members.rounds()}
        transfer.give_facts(rounds, to=rank, rank=own_rank, name=f"{name}/rounds")

    def take(self, rank: int, name: str) -> None:
        """Receive the state from the rank with the same index in another replica.

        Raises:
            byteps.torch.BytePSError: that replica or a server was lost.
        """
        transfer, own_rank = bytepslib.members, bytepslib.byteps.rank()
        facts = transfer.take_facts(giver=rank, rank=own_rank, name=f"{name}/facts")
        for what, value in facts["counted"].items():
            setattr(self._args, what, value)
        for optimizer, given in zip(self._optimizers, facts["optimizers"], strict=True):
            _make_room(optimizer, given)
        # load_state_dict adds the loaded steps to num_steps, which may come from a checkpoint.
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(facts["scheduler"])
        if facts["scaler"] is not None:
            self._optimizers[0].grad_scaler.load_state_dict(facts["scaler"])
        outer_steps.joined(self._args, self._model, self._optimizer, facts["outer"])
        tensors = self._tensors()
        self._count(tensors)
        transfer.take_tensors(tensors, giver=rank, rank=own_rank, name=f"{name}/state")
        rounds = transfer.take_facts(giver=rank, rank=own_rank, name=f"{name}/rounds")
        bytepslib.members.set_rounds(rounds["rounds"])
        self.megabytes_of_servers = sum(
            optimizer.join(given)
            for optimizer, given in zip(self._on_servers, facts["servers"], strict=True)
        )
        from ...num_microbatches_calculator import update_num_microbatches

        update_num_microbatches(self._args.consumed_train_samples, verbose=False)
        _set_random_state(facts["random"])

    def _count(self, tensors: Sequence[torch.Tensor]) -> None:
        self.megabytes = sum(t.numel() * t.element_size() for t in tensors) / 1e6

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors to transfer, in the same order on both ranks."""
        served = {id(p) for optimizer in self._on_servers for p in optimizer.served()}
        tensors = [
            tensor.data
            for chunk in self._model
            for named in (chunk.named_parameters(), chunk.named_buffers())
            for _, tensor in named
            if id(tensor) not in served
        ]
        for optimizer in self._optimizers:
            if optimizer in self._on_servers:
                continue
            for parameter in outer_steps.stepped(optimizer):
                tensors.append(parameter.data)
                state = optimizer.optimizer.state.get(parameter, {})
                tensors += [
                    state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)
                ]
        return [*tensors, *outer_steps.tensors()]


def _facts_of(optimizer: Any) -> dict[str, Any]:
    """Return the numbers in the optimizer's groups, and descriptions of its state's tensors."""
    groups = [
        {key: value for key, value in group.items() if isinstance(value, int | float | bool | str)}
        for group in optimizer.optimizer.param_groups
    ]
    states = []
    for parameter in outer_steps.stepped(optimizer):
        state = optimizer.optimizer.state.get(parameter, {})
        states.append({key: _described(value, parameter) for key, value in state.items()})
    return {"groups": groups, "states": states}


def _described(value: Any, parameter: torch.Tensor) -> Any:
    """Return the type, shape and device of a tensor. Return any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    return {
        "dtype": value.dtype,
        "shape": list(value.shape),
        "near": value.device.type == parameter.device.type,
    }


def _make_room(optimizer: Any, given: dict[str, Any]) -> None:
    """Set the hyperparameters of an optimizer's parameter groups. Allocate the described state
    tensors."""
    for group, numbers in zip(optimizer.optimizer.param_groups, given["groups"], strict=True):
        group.update(numbers)
    for parameter, described in zip(outer_steps.stepped(optimizer), given["states"], strict=True):
        state = optimizer.optimizer.state[parameter] if described else {}
        for key, what in described.items():
            if "value" in what:
                state[key] = what["value"]
                continue
            device = parameter.device if what["near"] else torch.device("cpu")
            state[key] = torch.empty(what["shape"], dtype=what["dtype"], device=device)


def _scaler(optimizers: Sequence[Any]) -> dict[str, Any] | None:
    """Return the state of the loss scaler, which all optimizers share."""
    scaler = getattr(optimizers[0], "grad_scaler", None) if optimizers else None
    return None if scaler is None else scaler.state_dict()


def _random_state() -> dict[str, Any]:
    from ...tensor_parallel import get_cuda_rng_tracker

    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(numbers), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
        state["tracker"] = dict(get_cuda_rng_tracker().get_states())
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    from ...tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states(state["tracker"])
