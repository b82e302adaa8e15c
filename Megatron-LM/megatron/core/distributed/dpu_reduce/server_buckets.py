# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's buckets as server buckets, whose parameters servers keep in fp32 and update.

fp8 and fp4 parameters are pulled in the wire dtype, and each rank quantizes them, as Megatron
quantizes bf16 parameters before each matrix product. (With ``--fp8-param-gather`` Megatron
quantizes the fp32 parameters once, and gathers the result.)
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer import optimizer as megatron_optimizer
from ...utils import log_single_rank
from . import bytepslib, job
from .sums import GradSyncHandle

if TYPE_CHECKING:
    from byteps.torch.server_bucket import BucketSpec, ServerBucket
    from byteps.torch.server_tensor import GradientCheck, PlacedParameter, Rule
    from byteps.torch.wire import WireType

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
    from .bucket_op import BucketOp, Kept

# Megatron 0.18 has only one norm.
GRAD_NORM_GROUP_ATTR: str = getattr(megatron_optimizer, "GRAD_NORM_GROUP_ATTR", "grad_norm_group")
SEPARATE_GRAD_NORM_GROUPS: tuple[str, ...] = getattr(
    megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()
)


class _Quantized:
    """Reads and writes a quantized parameter of Transformer Engine."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def read(self) -> torch.Tensor:
        """Return the values. The first call returns the values before quantization, if they were
        kept."""
        from ...fp8_utils import dequantize_fp8_tensor

        high_precision = getattr(self._parameter, "get_high_precision_init_val", None)
        values: torch.Tensor | None = high_precision() if high_precision is not None else None
        if values is None:
            return dequantize_fp8_tensor(self._parameter)
        self._parameter.clear_high_precision_init_val()
        return values.view(self._parameter.shape)

    def write(self, values: torch.Tensor) -> None:
        from ...fp8_utils import copy_tensor_to_quantized_param

        copy_tensor_to_quantized_param(self._parameter, values)


def codecs_of(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, _Quantized]:
    """Return codecs for the parameters that are quantized.

    Raises:
        ValueError: a parameter is a group of parameters, which has no values of its own; or this
            Megatron is too old to quantize a parameter from outside.
    """
    from ...fp8_utils import is_float8tensor

    try:
        from ...fp8_utils import is_grouped_tensor_with_quantized_storage
        from ..param_and_grad_buffer import _param_uses_quantized_storage
    except ImportError:
        if any(map(is_float8tensor, parameters)):
            raise ValueError(
                "--dpu-optimizer with parameters of fp8 or fp4 needs Megatron 0.19 or later"
            ) from None
        return {}
    codecs = {}
    for parameter in parameters:
        if is_grouped_tensor_with_quantized_storage(parameter):
            raise ValueError(
                "--dpu-optimizer does not work with --moe-single-grouped-weight and parameters of "
                "fp8 or fp4: the weights of all experts are one tensor, which cannot be read as a "
                "whole"
            )
        if _param_uses_quantized_storage(parameter):
            codecs[parameter] = _Quantized(parameter)
    return codecs


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
    """Lay the bucket's parameters end to end, like its gradients, and declare them.

    If gradients travel in blocks of few bits, the gradients that are kept as bf16 form a separate
    bucket. It comes first, because it removes its gradients from the common memory when it sends
    them.

    Args:
        bucket: bucket with a ``dpu_reduce_op``. Its gradients may move later, but must keep their
            size.
        average: whether to divide the summed gradients by the number of ranks.
        rule: the update rule.
        group_of: index of the parameter group of each parameter.
        counts: function that says whether this rank's copy of a parameter counts in the norm of the
            gradients.
        in_order: whether gradients are added in the order of ranks.
        speculative: whether servers may be asked for speculative steps.
        counts_zeros: whether servers count gradients that are 0.
        checked: names of the parameters. A step fails if a gradient changes after it was pushed
            early. None: this is not checked.

    Raises:
        byteps.torch.BytePSError: a server refuses, or has too little memory.
        ValueError: a parameter is a quantized group of parameters.
    """
    op: BucketOp = bucket.dpu_reduce_op
    bf16_parameters = () if op.bf16_part is None else op.bf16_part.parameters
    begins = {parameter: begin for parameter, (begin, _) in bucket.param_to_index.items()}
    others = [
        parameter for parameter in bucket.params_list if parameter not in set(bf16_parameters)
    ]
    specs = _specs(bucket, rule, average=average, in_order=in_order)
    place_at, made = bytepslib.server_tensor.PlacedParameter, []
    for spec, places, gradients in (
        (specs.bf16, _laid(bf16_parameters), lambda: _taken_out(bucket)),
        (
            specs.others,
            sorted((place_at(begins[p], p) for p in others), key=lambda placed: placed.begin),
            lambda: bucket.grad_data,
        ),
    ):
        if not places:
            continue
        check: GradientCheck | None = None
        if checked is not None:
            check = bytepslib.server_tensor.GradientCheck(places, checked, _CHANGED)
        made.append(
            bytepslib.server_bucket.ServerBucket(
                places,
                gradients,
                replace(spec, speculative=speculative, counts_zeros=counts_zeros),
                group_of=group_of,
                counts=counts,
                check=check,
                codecs=codecs_of([placed.parameter for placed in places]),
            )
        )
    return made


def _laid(parameters: Sequence[torch.nn.Parameter]) -> list[PlacedParameter]:
    """Return places of parameters laid end to end, without gaps."""
    places: list[PlacedParameter] = []
    for parameter in parameters:
        begin = places[-1].end if places else 0
        places.append(bytepslib.server_tensor.PlacedParameter(begin, parameter))
    return places


def _taken_out(bucket: _ParamAndGradBucket) -> torch.Tensor:
    """Return the bucket's gradients that do not travel in few bits, laid end to end."""
    bf16_part: Kept = bucket.dpu_reduce_op.bf16_part
    return torch.cat([bucket.grad_data[begin:end] for begin, end in bf16_part.ranges])


@dataclass(frozen=True)
class _Specs:
    """Specs of the tensors of a bucket that this rank sends: `kept` in bf16, `others` in few bits.
    Without few bits, all are in `others`."""

    others: BucketSpec
    bf16: BucketSpec


def _specs(bucket: _ParamAndGradBucket, rule: Rule, *, average: bool, in_order: bool) -> _Specs:
    op: BucketOp = bucket.dpu_reduce_op
    grads, param_dtype = bucket.grad_data, next(iter(bucket.params_list)).dtype
    make = functools.partial(_spec, op, grads, rule, average=average, in_order=in_order)
    if not op.wire.is_block:
        spec = make(op.name, grads.numel(), op.wire.memory, None)
        return _Specs(spec, spec)
    few = make(op.name, grads.numel(), param_dtype, op.wire)
    if op.bf16_part is None:
        return _Specs(few, few)
    return _Specs(
        replace(few, gaps=op.bf16_part.ranges),
        make(op.bf16_part.name_of(op), op.bf16_part.numel, param_dtype, None),
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
    """Return the spec of a tensor of `numel` gradients, which are a part or all of `grads`.

    Args:
        dtype: type in which parameters are pulled. Gradients are pushed in it, too, unless `wire`
            is a type of blocks.
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
    if name != op.name:  # the kept gradients are few, so they are sent in a single piece
        pieces = bytepslib.node_groups.whole_pieces(numel, sums.node.size, 1)
        sums = replace(sums, name=name, pieces=tuple(pieces), wire_dtype=None)
    declarations = [
        replace(declaration, dtype=dtype, wire_dtype=wire)
        for declaration in sums.declarations(rank, grads.dtype, grads.device)
    ]
    members = declarations[0].group
    assert isinstance(members, Sequence)
    return made(
        declarations=declarations,
        rule=rule,
        pieces=sums.pieces,
        host=bytepslib.nodes.HostRanks(
            group=sums.node,
            local=sums.layout.local_index(rank),
            average=average,
            in_order=in_order,
        ),
        in_order=in_order,
        savers=job.of_this_replica(members),
    )


def are_updated(bucket_group: _ParamAndGradBucketGroup) -> bool:
    """Return whether servers update the parameters of a bucket group. They update all of its
    parameters, or none."""
    return any(bucket.dpu_reduce_op.updated for bucket in bucket_group.buckets)


def start_update(bucket_group: _ParamAndGradBucketGroup) -> GradSyncHandle | None:
    """Replace :func:`.sums.start_grad_sync` if servers keep the optimizer.

    The gradients are not changed, because Megatron may sum them over other groups next. The
    optimizer's step sends them. With ``overlap_grad_reduce``, gradients that are final are sent
    now.

    Returns:
        with ``overlap_grad_reduce`` a handle, whose wait returns at once.

    Raises:
        byteps.torch.BytePSError: an earlier step failed, or a rank or a server was lost.
        RuntimeError: the model has no optimizer yet.
    """
    _demand_optimizer(bucket_group)
    if not bucket_group.ddp_config.overlap_grad_reduce:
        return None
    for bucket in bucket_group.buckets:
        if bucket.grad_data.numel() > 0:
            for server_bucket in bucket.dpu_server_buckets:
                bucket.dpu_optimizer.bucket_is_ready(server_bucket)
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
    """Raise RuntimeError if no optimizer has taken a bucket, because then nothing would sum its
    gradients."""
    for bucket in bucket_group.buckets:
        if bucket.grad_data.numel() > 0 and not hasattr(bucket, "dpu_server_buckets"):
            raise RuntimeError(
                "--dpu-optimizer: a model was wrapped for it, but its optimizer was not made by "
                "get_megatron_optimizer()"
            )


# Gradient norms of a step, computed from the sums of squares in the servers' answers. Megatron
# clips some parameters by a norm of their own, such as detached heads of multi-token prediction.
# Buckets of such parameters hold no others (see `.summed_later`).


_Group = torch.distributed.ProcessGroup
_NAMES = (None, *SEPARATE_GRAD_NORM_GROUPS)
"""Names of the norms. None is the main norm: of all gradients that have no norm of their own."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Norms of a step. They have the same bits on every rank."""

    main: float
    """Norm of all gradients that have no norm of their own."""
    own: Mapping[str, float]
    """Norms of the other groups, by name."""
    zeros: int
    """Number of gradients that are 0, if servers count them."""

    @property
    def are_finite(self) -> bool:
        """Return whether all gradients are finite."""
        return all(map(math.isfinite, (self.main, *self.own.values())))


def norm_group_of(bucket: ServerBucket) -> str | None:
    """Return the name of the norm by which a bucket's gradients are clipped.

    Raises:
        ValueError: the bucket's parameters have different norms, because they were marked after DDP
            was built.
    """
    names = {getattr(placed.parameter, GRAD_NORM_GROUP_ATTR, None) for placed in bucket.places}
    if len(names) > 1 or not names <= set(_NAMES):
        raise ValueError(
            f"--dpu-optimizer: parameters of a bucket have {GRAD_NORM_GROUP_ATTR} "
            f"{sorted(map(str, names))}. Set one of {', '.join(SEPARATE_GRAD_NORM_GROUPS)}, before "
            "the model is wrapped in DistributedDataParallel"
        )
    return names.pop()


def norms_of(
    kinds: Sequence[tuple[Sequence[ServerBucket], _Group]],
    norm_of: Mapping[ServerBucket, str | None],
    scale: float,
    device: torch.device,
) -> Norms:
    """Compute the norms of a step that was pushed.

    fsum rounds only once, so the result depends neither on the order of partial sums nor on the
    layout of ranks.

    Args:
        kinds: this rank's buckets, dense and expert, and for each kind the ranks that hold the
            parts of one model replica. All these ranks call this.
        norm_of: result of `norm_group_of` for each bucket.
        scale: factor for the gradients that undoes loss scaling.
        device: device of exchanged tensors.
    """
    parts = [part for buckets, group in kinds for part in _parts(buckets, group, norm_of, device)]
    *squares, zeros = (math.fsum(part) for part in zip(*parts, strict=True))
    main, *own = (math.sqrt(square) * scale for square in squares)
    return Norms(
        main=main, own=dict(zip(SEPARATE_GRAD_NORM_GROUPS, own, strict=True)), zeros=int(zeros)
    )


def _parts(
    buckets: Sequence[ServerBucket],
    group: _Group,
    norm_of: Mapping[ServerBucket, str | None],
    device: torch.device,
) -> list[list[float]]:
    """Return the sums of squares of each norm, and the zeros, for each rank of a group."""
    squares: dict[str | None, list[float]] = {name: [] for name in _NAMES}
    for bucket in buckets:
        squares[norm_of[bucket]] += bucket.squares
    own = [math.fsum(squares[name]) for name in _NAMES]
    own.append(float(sum(bucket.zeros for bucket in buckets)))
    if buckets:  # the ranks of a host that sums first have the sums of their own parts only
        own = [math.fsum(column) for column in zip(*buckets[0].of_host(own), strict=True)]
    if group.size() == 1:
        return [own]
    own_tensor = torch.tensor(own, dtype=torch.float64, device=device)
    parts = [torch.empty_like(own_tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own_tensor, group=group)
    return [part.tolist() for part in parts]


# Layouts of copies: all copies of a parameter must be summed alike, so that servers update them to
# the same bits.


_logger = logging.getLogger(__name__)


def keep_copies_alike(
    model_chunks: Sequence[DistributedDataParallel], buffers: str, group: Any
) -> None:
    """Disable node-first sums unless all data-parallel groups have the same layout over hosts.

    Ranks of `group` hold parts of one model replica. Different data-parallel groups sum the copies
    of a parameter (tied embeddings on two stages, for example). If these groups were laid out
    differently over hosts, values would be added in different orders, and the copies would drift
    apart. All ranks of `group` call this.

    Args:
        buffers: name of the model chunk's attribute that has its buffers.
        group: the ranks that hold the parts of the model.
    """
    if group.size() == 1:
        return
    own = [_spread(bucket.dpu_reduce_op) for bucket in _buckets(model_chunks, buffers)]
    spreads: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(spreads, own[0] if own else None, group=group)
    if alike([spread for spread in spreads if spread is not None]):
        return
    log_single_rank(
        _logger,
        logging.WARNING,
        "dpu_reduce: every rank pushes whole buckets after all, since the data-parallel groups of "
        f"the model's parts are spread over hosts differently: {spreads}",
    )
    for bucket in _buckets(model_chunks, buffers):
        bucket.dpu_reduce_op = replace(
            bucket.dpu_reduce_op, route=bytepslib.routes.FLAT, node_whole=None
        )


def alike(spreads: Sequence[Sequence[int]]) -> bool:
    """Return whether all layouts are the same, or no group sums inside a host first."""
    return len({tuple(spread) for spread in spreads}) <= 1


def _buckets(model_chunks: Sequence[DistributedDataParallel], buffers: str) -> Iterator[Any]:
    for chunk in model_chunks:
        for buffer in getattr(chunk, buffers):
            for bucket in buffer.buckets:
                if bucket.grad_data.numel() > 0 and bucket.dpu_reduce_op.updated:
                    yield bucket


def _spread(op: BucketOp) -> tuple[int, ...]:
    """Return the host index of each member of the group. Empty if each member pushes by itself."""
    if op.node_whole is None:
        return ()
    return tuple(op.node_whole.layout.host_of(rank) for rank in op.group)
