# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Checkpoints of an optimizer that is on the servers.

They are those of Megatron's distributed optimizer with ``--dist-ckpt-optim-fully-reshardable``: for
each parameter of the model there are the fp32 value and the moments, cut as the parameter is. So
either of the two optimizers goes on where the other one stopped, in another layout too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...dist_checkpointing.dict_utils import nested_values
from ...dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from ...dist_checkpointing.utils import extract_sharded_tensors_and_factories
from .server_buckets import ServerBucket

SHARDING = "fully_reshardable"
"""As Megatron's metadata of a checkpoint calls this form."""
_PREFIX = "optimizer.state"


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raises ValueError unless it says that a checkpoint is, or shall be, of this form."""
    form = (metadata or {}).get("distrib_optim_sharding_type", "none of the distributed optimizer")
    if form != SHARDING:
        raise ValueError(
            f"--dpu-optimizer cannot load the optimizer of this checkpoint: its form is {form!r}. "
            "Save it with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable or with "
            "--dpu-optimizer, or leave it out with --no-load-optim"
        )


def sharded_state(
    buckets: Sequence[ServerBucket],
    param_groups: Sequence[Mapping[str, Any]],
    model_state: Any,
    *,
    slots: Sequence[str],
    steps: int,
    is_loading: bool,
) -> dict[str, Any]:
    """The state of some buckets, as Megatron's checkpoints want it.

    Args:
        buckets: dense or expert ones.
        param_groups: theirs.
        model_state: the model's own sharded state, of which each parameter's is a part.
        slots: what servers keep of a parameter.
        steps: that were made.
        is_loading: tensors are there to be written to; else they hold what the servers have.

    Raises:
        byteps.torch.BytePSError: a server is lost.
    """
    found, _ = extract_sharded_tensors_and_factories(model_state)
    sharded = {id(one.data): one for one in nested_values(found)}
    state: dict[int, dict[str, Any]] = {}
    for bucket in buckets:
        values = [
            {parameter: torch.empty(parameter.shape) for _, parameter in bucket.places}
            if is_loading
            else bucket.read(slot)
            for slot in range(len(slots))
        ]
        for _, parameter in bucket.places:
            model_parameter = sharded[id(parameter)]
            state[len(state)] = {
                name: make_sharded_optimizer_tensor(
                    model_parameter, of_slot[parameter], prefix=f"{_PREFIX}.{name}"
                )
                for name, of_slot in zip(slots, values, strict=True)
            }
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"step": steps}
        for group in param_groups
    ]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": state,
        "param_state_sharding_type": SHARDING,
    }


def load(
    buckets: Sequence[ServerBucket], state: Mapping[str, Any], slots: Sequence[str]
) -> int | None:
    """Give the servers what was loaded, from one rank of each group, and return how many steps it
    has; None where there is no group that says so.

    Raises:
        byteps.torch.BytePSError: a server refuses or is lost.
        ValueError: parameter groups made different numbers of steps.
    """
    check_metadata({"distrib_optim_sharding_type": state.get("param_state_sharding_type")})
    steps = {int(g["step"] or 0) for g in state["optimizer"]["param_groups"] if "step" in g}
    if len(steps) > 1:
        raise ValueError(f"--dpu-optimizer: parameter groups made {sorted(steps)} steps")
    place = 0
    for bucket in buckets:
        states = {}
        for _, parameter in bucket.places:
            states[parameter] = state["param_state"][place]
            place += 1
        if not bucket.is_first:
            continue
        for slot, name in enumerate(slots):
            bucket.load(slot, {parameter: one[name] for parameter, one in states.items()})
    return steps.pop() if steps else None
