# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Saves and loads rounding losses in checkpoints of ``--ckpt-format torch_dist``.

A checkpoint has two tensors per parameter, of the parameter's shape, and sharded like the
parameter: the mean loss of the ranks that push its gradient, and the servers' loss. Each rank goes
on with the mean, both when it saves and when it loads. So a job that continues computes the same
bits as a job that resumes. The sum of the losses over all ranks, which later steps add to the
parameter, does not change.

With ``--dpu-feedback-per-rank`` there is a tensor for each rank instead, and saving changes no
losses. A job that loads with n ranks gives rank i the sum of the losses that ranks i, i + n, i + 2n
... have saved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...dist_checkpointing.dict_utils import nested_values
from ...dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from ...dist_checkpointing.utils import extract_sharded_tensors_and_factories
from . import bytepslib, job, plan
from .server_checkpoint import own_replica, saved_boxes

if TYPE_CHECKING:
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .bucket_op import BucketOp

KEY = "dpu_feedback"
"""Key of the losses in a state, and prefix of the names of their tensors."""
_COPY = "/copy"


@dataclass(frozen=True, kw_only=True)
class _Owed:
    """Properties of a parameter's losses. They are the same on all ranks that save a part of the
    losses."""

    pushers: int
    """Number of ranks that push each element."""
    average: bool
    """Whether gradients are divided by the number of pushing ranks."""
    servers: bool
    """Whether servers keep losses too."""


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Properties of a parameter's losses in a checkpoint."""

    owed: _Owed
    tensors: int
    """Number of tensors: one per rank that pushed the parameter, or 1 for their mean."""

    def wanted(self, index: int, pushers: int) -> list[tuple[int, float]]:
        """Return the saved tensors that a rank loads, each with its factor. `index`: index of the
        rank among `pushers` ranks."""
        if self.tensors == self.owed.pushers:
            return [(number, 1.0) for number in range(index, self.tensors, pushers)]
        return [(0, self.owed.pushers / pushers)]


@dataclass(frozen=True, kw_only=True)
class _Push:
    """Tensor that this rank pushes: ranges of a bucket, laid end to end."""

    name: str
    numel: int
    parts: tuple[tuple[int, int, int], ...]
    """Ranges of the bucket. Each has the first element in the bucket, the last element plus one,
    and the first element's offset in the tensor."""
    group: tuple[int, ...]
    """Ranks that push the same elements."""
    index: int
    """Index of this rank in `group`."""
    owed: _Owed


@dataclass(frozen=True, kw_only=True)
class _Box:
    """Adjacent elements of a parameter, within a tensor that a rank pushes."""

    push: _Push
    at: int
    numel: int
    name: str
    """Name of the parameter in a checkpoint. Each layer and expert has a name of its own."""
    copy: tuple[int, ...]
    """Identifies a copy of the parameter; all numbers are 0 for the first copy. Pipeline stages may
    have copies, and their gradients are added. Tensor-parallel ranks may have copies, and their
    gradients are equal."""
    sharded: ShardedTensor
    """Position in the parameter's global tensor."""

    @functools.cached_property
    def key(self) -> str:
        """Key of the copy."""
        return self.name + (_COPY + ".".join(map(str, self.copy)) if any(self.copy) else "")

    def part_of(self, pushed: torch.Tensor) -> torch.Tensor:
        """Return the elements of the pushed tensor that are in this box."""
        return pushed[self.at : self.at + self.numel]

    def of_rank(self, key: str, rank: int, ranks: int, data: torch.Tensor) -> ShardedTensor:
        """Return the sharded tensor of this box in the losses of `ranks` ranks."""
        sharded = self.sharded
        return replace(
            sharded,
            key=f"{KEY}.{key}",
            data=data.view(1, *sharded.local_shape),
            local_shape=(1, *sharded.local_shape),
            global_shape=(ranks, *sharded.global_shape),
            global_offset=(rank, *sharded.global_offset),
        )

    def of_servers(self, key: str, data: torch.Tensor) -> ShardedTensor:
        """Return the sharded tensor of this box in the servers' losses."""
        view = data.view(self.sharded.local_shape)
        return replace(self.sharded, key=f"{KEY}.{key}.servers", data=view)


@dataclass(frozen=True, kw_only=True)
class _LoadRequest:
    """Tensor to be loaded, and the destination of its values."""

    box: _Box
    factor: float
    to_servers: bool


@dataclass(kw_only=True)
class _Loading:
    """A checkpoint that is being loaded."""

    pushes: list[_Push]
    requests: dict[str, _LoadRequest]


_loading: _Loading | None = None
"""The checkpoint that is being loaded; None if there is none, or if it has no losses."""


def save(state: dict[str, Any], *, per_rank: bool) -> None:
    """Add the losses to a state that is about to be saved. All ranks call this.

    Args:
        state: state to save, with the sharded states of the model's chunks.
        per_rank: whether to save each rank's losses. Otherwise their mean is saved, and each rank
            keeps it.

    Raises:
        byteps.torch.BytePSError: a server is lost.
    """
    boxes, owed = _agreed(*_boxes(state))
    tensors: list[ShardedTensor] = []
    if not per_rank:
        _share(list(dict.fromkeys(box.push for box in boxes)))
    for push, of_push in itertools.groupby(boxes, lambda box: box.push):
        lost = bytepslib.wire.feedback.get(push.name)
        lost = torch.zeros(push.numel, dtype=torch.bfloat16) if lost is None else lost.cpu()
        servers = None
        if push.index == 0 and push.owed.servers:
            servers = bytepslib.operations.read_feedback(push.name, push.numel)
        for box in of_push:
            # The losses are copied, because training may change them while the checkpoint is
            # written.
            if per_rank or push.index == 0:
                values, ranks = box.part_of(lost).clone(), push.owed.pushers if per_rank else 1
                tensors.append(box.of_rank(box.key, push.index, ranks, values))
            if servers is not None:
                tensors.append(box.of_servers(box.key, box.part_of(servers).clone()))
    how = {
        key: (form.pushers, form.average, form.servers, form.pushers if per_rank else 1)
        for key, form in sorted(owed.items())
    }
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    state[KEY] = {"parameters": how, "tensors": numbered}


def _share(pushes: Sequence[_Push]) -> None:
    """Set each rank's losses to the mean over all ranks that push the same elements."""
    sums = []
    for push in pushes:
        lost = bytepslib.wire.feedback.get(push.name)
        if lost is None or len(push.group) == 1:
            continue
        total = lost.detach().cpu().float()
        name = f"{push.name}/lost"
        handle = bytepslib.operations.start(
            total,
            total,
            average=True,
            name=name,
            priority=0,
            group=push.group,
            placement=None,
        )
        sums.append((push, name, lost, handle))
    for push, name, lost, handle in sums:
        lost.copy_(bytepslib.operations.synchronize(handle))
        bytepslib.names.release([name], group=push.group)


def ask(state: dict[str, Any], common: Mapping[str, Any]) -> None:
    """Add the losses of a checkpoint to a state that is about to be loaded. All ranks call this.

    Args:
        state: state to load, with the sharded states of the model's chunks.
        common: the checkpoint's common (not sharded) part.
    """
    global _loading
    _loading = None
    if KEY not in common:
        return
    saved = {
        key: _Saved(
            owed=_Owed(pushers=pushers, average=average, servers=servers), tensors=tensors_of_key
        )
        for key, (pushers, average, servers, tensors_of_key) in common[KEY]["parameters"].items()
    }
    boxes, owed = _agreed(*_boxes(state))
    requests: dict[str, _LoadRequest] = {}
    tensors: dict[str, ShardedTensor] = {}
    for box in boxes:
        for request, tensor in _wanted(box, saved, owed):
            number = str(len(requests))
            requests[number], tensors[number] = request, tensor
    state[KEY] = {"tensors": tensors}
    _loading = _Loading(pushes=list(dict.fromkeys(box.push for box in boxes)), requests=requests)


def has_feedback() -> bool:
    """Return whether gradients of this job travel with feedback."""
    return any(bucket.dpu_reduce_op.wire.feedback for bucket, _ in plan.all_buckets())


def take(state: Mapping[str, Any]) -> bool:
    """Take over the losses of the loaded checkpoint. Return whether it has any."""
    global _loading
    loading, _loading = _loading, None
    if loading is None:
        return False
    own = {push.name: torch.zeros(push.numel) for push in loading.pushes}
    servers = {name: torch.zeros_like(lost) for name, lost in own.items()}
    for number, request in loading.requests.items():
        target = (servers if request.to_servers else own)[request.box.push.name]
        values = state[KEY]["tensors"][number].view(-1).float()
        request.box.part_of(target).add_(values, alpha=request.factor)
    for push in loading.pushes:
        of_servers = servers[push.name] if push.index == 0 and push.owed.servers else None
        lost = own[push.name].to(torch.bfloat16)
        bytepslib.wire.feedback.put(push.name, lost, of_servers)
    return True


def _wanted(
    box: _Box, saved: Mapping[str, _Saved], present: Mapping[str, _Owed]
) -> Iterator[tuple[_LoadRequest, ShardedTensor]]:
    """Yield the tensors of a checkpoint that this rank loads for a box."""
    keys = [box.key] if box.key in saved else []
    if not any(box.copy):
        # Copies of pipeline stages are loaded even if the stage no longer has one. Copies of
        # tensor-parallel ranks are not, because they equal the first copy.
        copies = [key for key in saved if key.startswith(box.name + _COPY)]
        keys += [key for key in copies if key not in present and _is_of_stage(key)]
    is_alike = not keys and box.copy[0] == 0 and box.name in saved
    if is_alike:  # this tensor-parallel rank has a copy that the checkpoint lacks
        keys = [box.name]
    push, owed = box.push, box.push.owed
    weight = float(owed.pushers if owed.average else 1)
    for key in keys:
        was, tensors = saved[key].owed, saved[key].tensors
        wanted = []
        for number, factor in saved[key].wanted(push.index, owed.pushers):
            tensor = box.of_rank(key, number, tensors, _blank(box))
            if tensors < was.pushers:  # All ranks load this tensor.
                tensor = replace(tensor, replica_id=push.index)
            factor *= weight / was.pushers if was.average else weight
            wanted.append((tensor, factor, False))
        if was.servers and push.index == 0:
            factor = 1.0 if owed.servers else weight
            wanted.append((box.of_servers(key, _blank(box)), factor, owed.servers))
        for tensor, factor, to_servers in wanted:
            # Other ranks load this tensor, too, so this rank's copy is marked as a further replica.
            loaded = replace(tensor, replica_id=1) if is_alike else tensor
            yield _LoadRequest(box=box, factor=factor, to_servers=to_servers), loaded


def _is_of_stage(key: str) -> bool:
    """Return whether a key belongs to a pipeline stage's copy."""
    stage, *others = map(int, key.rpartition(_COPY)[2].split("."))
    return stage > 0 and not any(others)


def _blank(box: _Box) -> torch.Tensor:
    return torch.zeros(box.numel, dtype=torch.bfloat16)


def _agreed(
    boxes: list[_Box], own: Mapping[str, _Owed | None]
) -> tuple[list[_Box], dict[str, _Owed]]:
    """Return the boxes of parameters whose losses all ranks save in the same form. Also return that
    form.

    The form may differ, because tensor-parallel ranks may send the same parameter by different
    backends.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, dict(own))
    owed: dict[str, _Owed | None] = {}
    for forms_of_rank in gathered:
        for key, how in forms_of_rank.items():
            owed[key] = how if owed.get(key, how) == how else None
    agreed = {key: how for key, how in owed.items() if how is not None}
    return [box for box in boxes if box.key in agreed], agreed


def _boxes(state: Mapping[str, Any]) -> tuple[list[_Box], dict[str, _Owed | None]]:
    """Return the boxes that this rank pushes with feedback. Also return the form in which each
    parameter's losses are saved (None: not saved). Of the ranks that push the same elements, only
    one returns the form.

    Parameters whose saved parts are not contiguous are left out.
    """
    chunks = {key: value for key, value in state.items() if key.startswith("model")}
    tensors, _ = extract_sharded_tensors_and_factories(chunks)
    sharded = {id(tensor.data): tensor for tensor in nested_values(tensors)}
    boxes: list[_Box] = []
    owed: dict[str, _Owed | None] = {}
    for bucket, config in plan.all_buckets():
        op = bucket.dpu_reduce_op
        bf16_parameters = set() if op.bf16_part is None else set(op.bf16_part.parameters)
        parameters = [
            (first, last, sharded[id(parameter)], parameter.dim())
            for parameter, (first, last) in bucket.param_to_index.items()
            if id(parameter) in sharded and parameter not in bf16_parameters
        ]
        pushes = _pushes(bucket, config)
        if not pushes and op.group[0] == job.rank():
            whole = _whole(bucket, 0, _Owed(pushers=0, average=False, servers=False))
            owed |= {box.key: None for parameter in parameters for box in _cut(whole, *parameter)}
        for push in pushes:
            cut = [box for parameter in parameters for box in _cut(push, *parameter)]
            boxes += cut
            if push.index == 0:
                owed |= {box.key: push.owed for box in cut}
    return boxes, owed


def _cut(
    push: _Push,
    first: int,
    last: int,
    model_parameter: ShardedTensor | ShardedTensorFactory,
    axes: int,
) -> Iterator[_Box]:
    """Yield the boxes of a parameter that contain the pushed elements. In its bucket, the parameter
    has elements `first` to `last`."""
    for part in push.parts:
        low, high = max(part[0], first), min(part[1], last)
        if low < high:
            yield from _cut_part(push, part, first, (low, high), model_parameter, axes)


def _cut_part(
    push: _Push,
    part: tuple[int, int, int],
    first: int,
    elements: tuple[int, int],
    model_parameter: ShardedTensor | ShardedTensorFactory,
    axes: int,
) -> Iterator[_Box]:
    begin, _, at = part
    low, high = elements
    cut = saved_boxes(model_parameter, model_parameter.key, low - first, high - first)
    copy = own_replica(model_parameter.replica_id)
    for box in cut or ():
        sharded, before = box.sharded, len(box.sharded.global_shape) - axes
        stacked = "".join(f".{offset}" for offset in sharded.global_offset[:before])
        yield _Box(
            push=push,
            at=at + first + box.begin - begin,
            numel=box.end - box.begin,
            name=sharded.key + stacked,
            copy=copy if isinstance(copy, tuple) else (0, copy),
            sharded=replace(
                sharded,
                dtype=torch.bfloat16,
                local_shape=sharded.local_shape[before:],
                global_shape=sharded.global_shape[before:],
                global_offset=sharded.global_offset[before:],
                replica_id=0,
            ),
        )


def _whole(bucket: _ParamAndGradBucket, index: int, owed: _Owed) -> _Push:
    elements = bucket.grad_data.numel()
    op, parts = bucket.dpu_reduce_op, ((0, elements, 0),)
    return _Push(
        name=op.name, numel=elements, parts=parts, group=tuple(op.group), index=index, owed=owed
    )


def _pushes(bucket: _ParamAndGradBucket, config: DistributedDataParallelConfig) -> list[_Push]:
    """Return the tensors in which this rank sends a bucket. Empty unless they travel in blocks with
    feedback."""
    op: BucketOp = bucket.dpu_reduce_op
    is_alone = len(op.group) == 1 and not op.updated
    if not op.wire.feedback or op.route == bytepslib.routes.COLLECTIVE or is_alone:
        return []
    rank = job.rank()

    def owed(group: Sequence[int]) -> _Owed:
        average = config.average_in_collective
        return _Owed(pushers=len(group), average=average, servers=not op.updated)

    sums = op.node_whole
    if config.use_distributed_optimizer and op.node_shards is not None:
        sums = op.node_shards
    if sums is None:
        return [_whole(bucket, op.group.index(rank), owed(op.group))]
    local, pushed = sums.layout.local_index(rank), []
    pushes = sums.pushes(rank, bucket.grad_data.element_size())
    for piece, push in zip(sums.pieces, pushes, strict=True):
        parts, at = [], 0
        for ranges in piece.scatters:
            parts.append((*ranges[local], at))
            at += bytepslib.node_groups.longest(ranges)
        pushed.append(
            _Push(
                name=push.name,
                numel=piece.length,
                parts=tuple(parts),
                group=tuple(push.group),
                index=push.group.index(rank),
                owed=owed(push.group),
            )
        )
    return pushed
