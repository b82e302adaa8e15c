# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's buckets, as buckets whose parameters the servers keep in fp32 and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job, quantized
from .sums import GradSyncHandle

if TYPE_CHECKING:
    from byteps.torch.gradient_check import GradientCheck
    from byteps.torch.server_bucket import BucketSpec, ServerBucket
    from byteps.torch.server_rule import Rule

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
    from .bucket_op import BucketOp

_CHANGED = (
    "something sums or scales them after the backward pass that dpu_reduce/summed_later.py does "
    "not know of (BYTEPS_CHECK_GRADIENTS=1). Without --overlap-grad-reduce nothing is sent before "
    "the step of --dpu-optimizer"
)


def make_server_bucket(
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
) -> ServerBucket:
    """Lay the bucket's parameters side by side, as its gradients are, and tell the servers.

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
    begins = {parameter: begin for parameter, (begin, _) in bucket.param_to_index.items()}
    places = sorted(
        (bytepslib.flat.Place(begins[parameter], parameter) for parameter in bucket.params_list),
        key=lambda place: place.begin,
    )
    check: GradientCheck | None = None
    if checked is not None:
        check = bytepslib.gradient_check.GradientCheck(places, checked, _CHANGED)
    spec = replace(
        _spec(bucket, rule, average=average, in_order=in_order),
        speculative=speculative,
        counts_zeros=counts_zeros,
    )
    return bytepslib.server_bucket.ServerBucket(
        places,
        lambda: bucket.grad_data,
        spec,
        group_of=group_of,
        counts=counts,
        check=check,
        codecs=quantized.codecs_of(bucket.params_list),
    )


def _spec(bucket: _ParamAndGradBucket, rule: Rule, *, average: bool, in_order: bool) -> BucketSpec:
    """What this rank sends of a bucket."""
    op: BucketOp = bucket.dpu_reduce_op
    rank, grads, sums = job.rank(), bucket.grad_data, op.node_whole
    made = bytepslib.server_bucket.BucketSpec
    if sums is None:
        whole = bytepslib.byteps.TensorDeclaration(
            name=op.name,
            dtype=op.wire.memory,
            numel=grads.numel(),
            average=average,
            group=list(op.group),
            placement=op.placement,
            device=grads.device,
        )
        return made(declarations=[whole], rule=rule, in_order=in_order)
    return made(
        declarations=[
            replace(one, dtype=op.wire.memory, wire_dtype=None)
            for one in sums.declarations(rank, grads.dtype, grads.device)
        ],
        rule=rule,
        pieces=sums.pieces,
        host=bytepslib.server_host.HostRanks(
            group=sums.node,
            local=sums.layout.local_index(rank),
            average=average,
            in_order=in_order,
        ),
        in_order=in_order,
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
            bucket.dpu_optimizer.bucket_is_ready(bucket.dpu_server_bucket)
    return GradSyncHandle([])


def forget_pushes(ddp: DistributedDataParallel) -> None:
    """Wait until nothing reads or writes the memory of gradients that were sent early.

    Raises:
        byteps.torch.BytePSError: a rank or a server was lost.
    """
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        for bucket in buffer.buckets:
            server_bucket = getattr(bucket, "dpu_server_bucket", None)
            if server_bucket is not None:
                server_bucket.forget_push()


def _demand_optimizer(bucket_group: _ParamAndGradBucketGroup) -> None:
    """Nobody would sum the gradients of a bucket that no optimizer has taken."""
    for bucket in bucket_group.buckets:
        if bucket.grad_data.numel() > 0 and not hasattr(bucket, "dpu_server_bucket"):
            raise RuntimeError(
                "--dpu-optimizer: a model was wrapped for it, but its optimizer was not made by "
                "get_megatron_optimizer()"
            )
