# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Writes and reads checkpoints of the optimizer on the servers.

Their format is that of Megatron's distributed optimizer with
``--dist-ckpt-optim-fully-reshardable``: the fp32 values and the moments of each parameter, in the
parameter's shape. So each of the two optimizers can resume from a checkpoint of the other, even in
another layout.

A rank reads and saves the elements that it would own in the distributed optimizer: a range of each
bucket, and so ranges of parameters. A checkpoint stores boxes of the parameters' global tensors.
Together they cover each tensor once. The saved tensors are copies, so they may be written while
training goes on. One rank of each group loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...dist_checkpointing.dict_utils import nested_values
from ...dist_checkpointing.mapping import (
    ReplicaId,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from ...dist_checkpointing.utils import extract_sharded_tensors_and_factories
from ...optimizer.optimizer import param_group_identifier_keys

if TYPE_CHECKING:
    from byteps.torch.server_bucket import ServerBucket


Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedBox:
    """Adjacent elements of a parameter that form a box of a global tensor."""

    begin: int
    end: int
    sharded: ShardedTensor
    """Position of the box in the global tensor. It has no values."""

    def holding(self, values: torch.Tensor) -> ShardedTensor:
        """Return the box with a copy of these values."""
        return replace(self.sharded, data=values.reshape(self.sharded.local_shape).clone())


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield offset and size of each box of elements `begin` to `end`, in order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # All elements are inside a single row.
        for offset, size in boxes(shape[1:], begin - last * row, end - last * row):
            yield (last, *offset), (1, *size)
        return
    if begin < first * row:
        for offset, size in boxes(shape[1:], begin - (first - 1) * row, row):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        for offset, size in boxes(shape[1:], 0, end - last * row):
            yield (last, *offset), (1, *size)


def own_replica(replica: ReplicaId, copy: int = 0) -> ReplicaId:
    """Return the replica id for the rank of the data-parallel group that saves, or for a further
    `copy` on another rank. Megatron puts the data-parallel rank last."""
    return copy if isinstance(replica, int) else (*replica[:-1], copy)


def is_saved(model_parameter: ShardedTensor | ShardedTensorFactory) -> bool:
    """Return whether ranks of this data-parallel group save the parameter. Otherwise ranks of
    another group do."""
    return is_main_replica(own_replica(model_parameter.replica_id))


def with_values(
    model_parameter: ShardedTensor | ShardedTensorFactory,
    key: str,
    values: torch.Tensor,
    *,
    copy: int = 0,
) -> ShardedTensor | ShardedTensorFactory:
    """Return fp32 values of a whole parameter, sharded like the parameter. One rank saves them, and
    other ranks hold a further `copy`."""
    kind = {} if isinstance(model_parameter, ShardedTensorFactory) else {"dtype": values.dtype}
    replica = own_replica(model_parameter.replica_id, copy)
    return replace(model_parameter, key=key, data=values, replica_id=replica, **kind)


def saved_boxes(
    model_parameter: ShardedTensor | ShardedTensorFactory, key: str, begin: int, end: int
) -> list[SavedBox] | None:
    """Return the boxes of elements `begin` to `end` of a parameter.

    Args:
        model_parameter: the parameter's entry in the model's sharded state.
        key: key of the global tensor, or of its factory.

    Returns:
        the boxes, or None if a factory's parts are not contiguous in the parameter.
    """
    blank = torch.empty(model_parameter.data.shape, device="meta")
    whole = with_values(model_parameter, key, blank)
    parts = [whole]
    if isinstance(whole, ShardedTensorFactory):
        parts = list(nested_values([whole.build()]))
        if not all(p.data._base is blank and p.data.is_contiguous() for p in parts):
            return None
    saved_parts = []
    for part in parts:
        first = part.data.storage_offset()
        last = first + part.data.numel()
        at = max(begin, first)
        for offset, size in boxes(part.local_shape, at - first, min(end, last) - first):
            until = at + math.prod(size)
            saved_parts.append(SavedBox(begin=at, end=until, sharded=_boxed(part, offset, size)))
            at = until
    return saved_parts


def _boxed(part: ShardedTensor, offset: Shape, size: Shape) -> ShardedTensor:
    """Return a box of a part. The parts form no grid, because neighbours may have other sizes."""
    before = part.prepend_axis_num
    moves = (*(0 for _ in range(before)), *offset)
    return replace(
        part,
        data=None,
        # Megatron writes parts without a grid unchanged, so their shapes need all axes.
        local_shape=(*(1 for _ in range(before)), *size),
        prepend_axis_num=0,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, moves, strict=True)),
        axis_fragmentations=None,
    )


SHARDING = "fully_reshardable"
"""Name of this format in the metadata of Megatron's checkpoints."""
_PREFIX = "optimizer.state"


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless the metadata name this format."""
    form = (metadata or {}).get("distrib_optim_sharding_type", "none of the distributed optimizer")
    if form != SHARDING:
        raise ValueError(
            f"--dpu-optimizer cannot load the optimizer of this checkpoint: its form is {form!r}. "
            "Save it with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable or with "
            "--dpu-optimizer, or leave it out with --no-load-optim"
        )


def put_metadata(metadata: dict[str, Any]) -> None:
    """Put this format into the metadata of a checkpoint that is about to be saved."""
    metadata["distrib_optim_sharding_type"] = SHARDING
    metadata["distrib_optim_fully_reshardable_mem_efficient"] = False


def sharded_state(
    buckets: Sequence[ServerBucket],
    param_groups: Sequence[Mapping[str, Any]],
    model_state: Any,
    *,
    slots: Sequence[str],
    steps: int,
    is_loading: bool,
) -> dict[str, Any]:
    """Return this rank's part of the state of buckets, in the form of Megatron's checkpoints.

    Args:
        buckets: the dense buckets or the expert buckets.
        param_groups: parameter groups of these buckets.
        model_state: the model's sharded state, which has an entry for each parameter.
        slots: names of the values that servers keep of a parameter.
        steps: number of steps made.
        is_loading: whether to return tensors to load into, on one rank of each group. Otherwise the
            tensors hold the servers' values.

    Raises:
        byteps.torch.BytePSError: a server is lost.
    """
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    sharded = {id(tensor.data): tensor for tensor in nested_values(tensors)}
    state = {}
    for number, bucket in enumerate(buckets):
        part = _whole(bucket, sharded, slots) if is_loading else _owned(bucket, sharded, slots)
        state.update({f"{number}.{name}": value for name, value in part.items()})
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"step": steps}
        for group in param_groups
    ]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": state,
        "param_state_sharding_type": SHARDING,
    }


def _whole(
    bucket: ServerBucket, sharded: Mapping[int, Any], slots: Sequence[str]
) -> dict[str, ShardedBase]:
    """Return memory for whole parameters if this rank loads them into the servers."""
    if not bucket.is_first:
        return {}
    return {
        f"{index}.{name}": with_values(
            sharded[id(parameter)],
            f"{_PREFIX}.{name}.{sharded[id(parameter)].key}",
            torch.empty(parameter.shape),
            copy=bucket.local,
        )
        for index, (_, parameter) in enumerate(bucket.places)
        for name in slots
    }


def _owned(
    bucket: ServerBucket, sharded: Mapping[int, Any], slots: Sequence[str]
) -> dict[str, ShardedBase]:
    """Return the values of a bucket that this rank saves."""
    places = [
        (index, first, parameter, sharded[id(parameter)])
        for index, (first, parameter) in enumerate(bucket.places)
        if is_saved(sharded[id(parameter)])
    ]
    saved: dict[str, ShardedBase] = {}
    for slot, name in enumerate(slots):
        for index, first, parameter, model_parameter in places:
            key = f"{_PREFIX}.{name}.{model_parameter.key}"
            if saved_boxes(model_parameter, key, 0, 0) is not None:
                continue
            # A parameter that cannot be cut is saved as a whole by the rank that has its first
            # element.
            has_first = any(begin <= first < end for begin, end in bucket.owned)
            whole = bucket.gather(slot, first, first + parameter.numel(), wanted=has_first)
            if whole is not None:
                values = whole.view(parameter.shape)
                saved[f"{index}.{name}"] = with_values(model_parameter, key, values)
        for begin, end in bucket.owned:
            cut = [
                (f"{index}.{name}", first, box)
                for index, first, parameter, model_parameter in places
                if first < end and begin < first + parameter.numel()
                for box in saved_boxes(
                    model_parameter,
                    f"{_PREFIX}.{name}.{model_parameter.key}",
                    max(begin, first) - first,
                    min(end, first + parameter.numel()) - first,
                )
                or ()
            ]
            values = bucket.read(slot, begin, end) if cut else torch.empty(0)
            for short, first, box in cut:
                at = first + box.begin
                part = values[at - begin : at - begin + box.end - box.begin]
                saved[f"{short}.{at}"] = box.holding(part)
    return saved


_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys of a parameter group from which its schedule is computed."""
_KEPT = "keeps_rates"


def keep_rates(state: Any) -> None:
    """Mark a state so that an optimizer takes its rates from it, not from the arguments
    (``--use-checkpoint-opt_param-scheduler``)."""
    if not isinstance(state, dict):
        return
    if state.get("param_state_sharding_type") == SHARDING:
        state[_KEPT] = True
        return
    for part in state.values():
        keep_rates(part)


def take_rates(groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """If `keep_rates` has marked the state, copy the rates of matching parameter groups from it.

    Raises:
        ValueError: the numbers of matching groups differ.
    """
    if not state.get(_KEPT):
        return
    keys = [key for key in param_group_identifier_keys if key not in _RATES]

    def by_kind(param_groups: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
        kinds: dict[Any, list[dict[str, Any]]] = {}
        for group in param_groups:
            kind = tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)
            kinds.setdefault(kind, []).append(group)
        return kinds

    saved = by_kind(state["optimizer"]["param_groups"])
    for kind, own in by_kind(groups).items():
        theirs = saved.get(kind, [])
        if len(theirs) != len(own):
            raise ValueError(
                "--use-checkpoint-opt_param-scheduler cannot take the learning rates from the "
                f"checkpoint, which has {len(theirs)} parameter groups of the kind "
                f"{dict(zip(keys, kind, strict=True))}. This job has {len(own)}. Leave out the "
                "flag, and give the rates as arguments of this job"
            )
        for group, saved_group in zip(own, theirs, strict=True):
            group.update({key: saved_group[key] for key in _RATES if key in saved_group})


def load(
    buckets: Sequence[ServerBucket], state: Mapping[str, Any], slots: Sequence[str]
) -> int | None:
    """Load a state into the servers, from one rank of each group. Return the state's number of
    steps, or None if no parameter group has the number.

    Raises:
        byteps.torch.BytePSError: a server refuses or is lost.
        ValueError: parameter groups made different numbers of steps.
    """
    check_metadata({"distrib_optim_sharding_type": state.get("param_state_sharding_type")})
    steps = {int(g["step"] or 0) for g in state["optimizer"]["param_groups"] if "step" in g}
    if len(steps) > 1:
        raise ValueError(
            f"--dpu-optimizer: parameter groups made different numbers of steps: {sorted(steps)}"
        )
    for number, bucket in enumerate(buckets):
        if not bucket.is_first:
            continue
        values = state["param_state"]
        for slot, name in enumerate(slots):
            bucket.load(
                slot,
                {
                    parameter: values[f"{number}.{index}.{name}"]
                    for index, (_, parameter) in enumerate(bucket.places)
                },
            )
    return steps.pop() if steps else None
