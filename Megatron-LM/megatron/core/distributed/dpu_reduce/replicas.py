# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Replica jobs: several Megatron jobs train one model, and meet only at the servers.

Each replica has a torch.distributed world of its own, of which all parallel groups are. What
Megatron does over the data-parallel ranks it does inside the replica, and then this package over
replicas: gradients by their bucket's operation, a few numbers by :func:`sum_`.

Workers of replica r are the BytePS ranks from r times the replica's world size on. So a rank's
peers, which hold the same parameters, are those of its own place in each replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib

if TYPE_CHECKING:
    from argparse import Namespace

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket

_count = 1
_peers: tuple[int, ...] = ()
"""One object, by which the engine knows the group again."""
_each_step = True
"""Whether replicas sum the gradients of each step; otherwise each steps by itself."""
_present: tuple[bool, ...] = ()
"""Which replicas the last sum over all of them was made of, by number; the same on all of them."""
_scaled: list[_ParamAndGradBucket] = []
"""Those whose gradients are divided by the number of replicas too."""


def of(args: Namespace) -> int:
    """How many replicas train the model, by the arguments and the environment.

    Raises:
        byteps.torch.BytePSError: BYTEPS_REPLICA is not NUMBER/COUNT.
    """
    if not getattr(args, "use_dpu_reduce", False):
        return 1
    return bytepslib.session.replicas()


def number() -> int:
    """Which of them this is."""
    return bytepslib.session.replica()


def begin() -> None:
    """BytePS has started."""
    global _count, _each_step, _peers, _present
    session = bytepslib.session
    _count, _each_step = session.replicas(), True
    _present = (True,) * _count
    size = session.size() // _count
    _peers = tuple(range(session.rank() % size, session.size(), size))


def forget() -> None:
    """BytePS was left."""
    global _count, _each_step
    _count, _each_step = 1, True
    _scaled.clear()


def count() -> int:
    """How many train the model. 1 where BytePS was not started."""
    return _count


def present() -> tuple[bool, ...]:
    """Which replicas take part, as all of them have last found together."""
    return _present


def set_present(now: Sequence[bool]) -> None:
    """All replicas have found together which of them take part."""
    global _present
    _present = tuple(now)


def is_first() -> bool:
    """Whether this replica is the first that takes part: it does what one does for all."""
    return number() == _present.index(True)


def sum_gradients() -> bool:
    """Whether the gradients of this step are summed over replicas."""
    return _each_step


def leave_each_other() -> None:
    """From the next step on each replica steps by itself."""
    global _each_step
    if not _each_step:
        return
    _each_step = False
    for bucket in _scaled:
        bucket.gradient_scaling_factor *= _count


def divide_gradients(ddp: DistributedDataParallel, buckets: Sequence[_ParamAndGradBucket]) -> None:
    """Have Megatron divide gradients by the data-parallel ranks of all replicas, where it divides
    before it sums. Otherwise the sum is an average already, or the tokens of all are counted."""
    if _count == 1 or ddp.config.calculate_per_token_loss or ddp.ddp_config.average_in_collective:
        return
    for bucket in buckets:
        bucket.gradient_scaling_factor /= _count
    _scaled.extend(buckets)


def peers() -> tuple[int, ...]:
    """BytePS ranks of this rank's place in each replica."""
    return _peers


def sum_(tensor: torch.Tensor, what: str, *, always: bool = False) -> torch.Tensor:
    """Sum a few numbers over replicas, in place, where gradients are summed over them too.

    Args:
        tensor: of any type; numbers up to 2**53 are summed exactly.
        what: names the sum: ranks of one place call with the same in the same order.
        always: also where each replica steps by itself.

    Returns:
        the tensor.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    if _count > 1 and (always or _each_step):
        total = tensor.detach().to("cpu", torch.float64).reshape(-1)
        bytepslib.byteps.push_pull_inplace(
            total, average=False, name=f"replicas/{what}/{total.numel()}", group=peers()
        )
        tensor.copy_(total.view(tensor.shape).to(tensor.dtype))
    return tensor


def all_want(wanted: bool, what: str) -> bool:
    """Whether all replicas that are there want something; see :func:`sum_`."""
    wishes = sum_(torch.tensor([float(wanted)]), what, always=True)
    # Scaled, where some are missing: less by more than one if any of the others does not want it.
    return bool(wishes.item() > _count - 0.5)


def agreed(value: Any) -> Any:
    """A number that each replica has computed from the same gradients: the mean, the same bits in
    all of them, whatever order their collectives add in. A tensor is changed in place."""
    if _count == 1 or not _each_step:
        return value
    if isinstance(value, torch.Tensor):
        mean = value.double()
        return value.copy_(sum_(mean, "norm") / _count)
    mean = torch.tensor([float(value)], dtype=torch.float64)
    return (sum_(mean, "norm") / _count).item()


def are_alike(model: Sequence[torch.nn.Module]) -> bool:
    """Whether this rank and its peers have the same parameters. All ranks of all replicas call
    this.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    return bytepslib.alike.are_alike(parameters, "replicas/parameters", peers())
