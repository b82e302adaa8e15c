# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's buckets, as buckets whose parameters the servers keep in fp32 and update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job, quantized
from .sums import GradSyncHandle

if TYPE_CHECKING:
    from byteps.torch.flat import Place
    from byteps.torch.gradient_check import GradientCheck
    from byteps.torch.server_bucket import BucketSpec, ServerBucket
    from byteps.torch.server_rule import Rule
    from byteps.torch.wire import WireType

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
    from .bucket_op import BucketOp
    from .kept import Kept

_CHANGED = (
    "something sums or scales them after the backward pass that dpu_reduce/summed_later.py does "
    "not know of (BYTEPS_CHECK_GRADIENTS=1). Without --overlap-grad-reduce nothing is sent before "
    "the step of --dpu-optimizer"
)


def make_server_buckets(
    bucket: _ParamAndGradBucket,
    *,
    average: bool,
    rule: Rule,
    group_of: Mapping[torch.Tensor, int],
    counts: Callable[[torch.Tensor], bool],
    in_order: bool,
    speculative: bool,
    counts_zeros: bool,
    checked: Mapping[torch.Tensor, str] | None = None,
) -> list[ServerBucket]:
    """Lay the bucket's parameters side by side, as its gradients are, and tell the servers.

    Where gradients travel in blocks of few bits, those that do not are a bucket of their own, which
    comes first: it takes their gradients out of the others' memory as it sends them.

    Args:
        bucket: with its ``dpu_reduce_op``. Its gradient data may be moved later on, but not be of
            another size.
        average: divide the summed gradients by the number of ranks.
        rule: how parameters are updated.
        group_of: index of the parameter group.
        counts: whether this rank's copy of a parameter counts in the norm of the gradients.
        in_order: gradients are added in the order of ranks.
        speculative: servers may be asked to try a step.
        counts_zeros: servers count the gradients that are 0.
        checked: names of the parameters, to fail in the step where a gradient that was pushed early
            has changed since; None: nothing is checked.

    Raises:
        byteps.torch.BytePSError: a server refuses, or has too little memory.
        ValueError: a parameter is several in one, and quantized.
    """
    op: BucketOp = bucket.dpu_reduce_op
    kept = () if op.kept is None else op.kept.parameters
    begins = {parameter: begin for parameter, (begin, _) in bucket.param_to_index.items()}
    others = [parameter for parameter in bucket.params_list if parameter not in set(kept)]
    specs = _specs(bucket, rule, average=average, in_order=in_order)
    place, made = bytepslib.flat.Place, []
    for spec, places, gradients in (
        (specs.kept, _laid(kept), lambda: _taken_out(bucket)),
        (
            specs.others,
            sorted((place(begins[p], p) for p in others), key=lambda one: one.begin),
            lambda: bucket.grad_data,
        ),
    ):
        if not places:
            continue
        check: GradientCheck | None = None
        if checked is not None:
            check = bytepslib.gradient_check.GradientCheck(places, checked, _CHANGED)
        made.append(
            bytepslib.server_bucket.ServerBucket(
                places,
                gradients,
                replace(spec, speculative=speculative, counts_zeros=counts_zeros),
                group_of=group_of,
                counts=counts,
                check=check,
                codecs=quantized.codecs_of([place.parameter for place in places]),
            )
        )
    return made


def _laid(parameters: Sequence[torch.nn.Parameter]) -> list[Place]:
    """Side by side, without gaps."""
    places: list[Place] = []
    for parameter in parameters:
        begin = places[-1].end if places else 0
        places.append(bytepslib.flat.Place(begin, parameter))
    return places


def _taken_out(bucket: _ParamAndGradBucket) -> torch.Tensor:
    """The gradients of a bucket that do not travel in few bits, side by side."""
    kept: Kept = bucket.dpu_reduce_op.kept
    return torch.cat([bucket.grad_data[begin:end] for begin, end in kept.ranges])


@dataclass(frozen=True)
class _Specs:
    """What this rank sends of a bucket: in few bits or all of it, and what is kept out of that."""

    others: BucketSpec
    kept: BucketSpec


def _specs(bucket: _ParamAndGradBucket, rule: Rule, *, average: bool, in_order: bool) -> _Specs:
    op: BucketOp = bucket.dpu_reduce_op
    grads, param_dtype = bucket.grad_data, next(iter(bucket.params_list)).dtype
    make = functools.partial(_spec, op, grads, rule, average=average, in_order=in_order)
    if not op.wire.is_block:
        spec = make(op.name, grads.numel(), op.wire.memory, None)
        return _Specs(spec, spec)
    few = make(op.name, grads.numel(), param_dtype, op.wire)
    if op.kept is None:
        return _Specs(few, few)
    return _Specs(
        replace(few, gaps=op.kept.ranges),
        make(op.kept.name_of(op), op.kept.numel, param_dtype, None),
    )


def _spec(
    op: BucketOp,
    grads: torch.Tensor,
    rule: Rule,
    name: str,
    numel: int,
    dtype: torch.dtype,
    wire: WireType | None,
    *,
    average: bool,
    in_order: bool,
) -> BucketSpec:
    """What this rank sends of `numel` gradients, which are some or all of `grads`.

    Args:
        dtype: in which parameters come down, and gradients go up unless as `wire`.
    """
    rank, sums = job.rank(), op.node_whole
    made = bytepslib.server_bucket.BucketSpec
    if sums is None:
        whole = bytepslib.byteps.TensorDeclaration(
            name=name,
            dtype=dtype,
            numel=numel,
            average=average,
            group=list(op.group),
            placement=op.placement,
            wire_dtype=wire,
            device=grads.device,
        )
        return made(
            declarations=[whole], rule=rule, in_order=in_order, savers=job.of_this_replica(op.group)
        )
    if name != op.name:  # of few elements, in one piece
        pieces = bytepslib.pieces.whole_pieces(numel, sums.node.size, 1)
        sums = replace(sums, name=name, pieces=tuple(pieces), wire_dtype=None)
    declarations = [
        replace(one, dtype=dtype, wire_dtype=wire)
        for one in sums.declarations(rank, grads.dtype, grads.device)
    ]
    members = declarations[0].group
    assert isinstance(members, Sequence)
    return made(
        declarations=declarations,
        rule=rule,
        pieces=sums.pieces,
        host=bytepslib.server_host.HostRanks(
            group=sums.node,
            local=sums.layout.local_index(rank),
            average=average,
            in_order=in_order,
        ),
        in_order=in_order,
        savers=job.of_this_replica(members),
    )


def are_updated(bucket_group: _ParamAndGradBucketGroup) -> bool:
    """Whether servers update the parameters of a group, of which all or none stay on the ranks."""
    return any(bucket.dpu_reduce_op.updated for bucket in bucket_group.buckets)


def start_update(bucket_group: _ParamAndGradBucketGroup) -> GradSyncHandle | None:
    """In place of :func:`.sums.start_grad_sync`, where servers keep the optimizer.

    The gradients stay as they are: Megatron sums them over other groups next, and the step of the
    optimizer sends them. With ``overlap_grad_reduce`` those that nothing will change any more are
    sent now.

    Returns:
        with ``overlap_grad_reduce`` a handle, for which there is nothing to wait.

    Raises:
        byteps.torch.BytePSError: an earlier step failed, or a rank or a server was lost.
        RuntimeError: no optimizer was made for the model.
    """
    _demand_optimizer(bucket_group)
    if not bucket_group.ddp_config.overlap_grad_reduce:
        return None
    for bucket in bucket_group.buckets:
        if bucket.grad_data.numel() > 0:
            for one in bucket.dpu_server_buckets:
                bucket.dpu_optimizer.bucket_is_ready(one)
    return GradSyncHandle([])


def forget_pushes(ddp: DistributedDataParallel) -> None:
    """Wait until nothing reads or writes the memory of gradients that were sent early.

    Raises:
        byteps.torch.BytePSError: a rank or a server was lost.
    """
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        for bucket in buffer.buckets:
            for server_bucket in getattr(bucket, "dpu_server_buckets", ()):
                server_bucket.forget_push()


def _demand_optimizer(bucket_group: _ParamAndGradBucketGroup) -> None:
    """Nobody would sum the gradients of a bucket that no optimizer has taken."""
    for bucket in bucket_group.buckets:
        if bucket.grad_data.numel() > 0 and not hasattr(bucket, "dpu_server_buckets"):
            raise RuntimeError(
                "--dpu-optimizer: a model was wrapped for it, but its optimizer was not made by "
                "get_megatron_optimizer()"
            )
