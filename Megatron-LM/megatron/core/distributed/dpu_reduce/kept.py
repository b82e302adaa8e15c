# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Gradients that travel as bf16 where the others of their bucket travel in few bits.

Norms, biases and routers have few values, each of which weighs much. In a block with others, whose
largest value sets the scale, they would lose most of their bits, or the others would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib

if TYPE_CHECKING:
    from byteps.torch import TensorDeclaration

    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .bucket_op import BucketOp

_ROUTER = re.compile(r"\brouter\b")


@dataclass(frozen=True)
class Kept:
    """The ranges of a bucket whose gradients travel as bf16, in one tensor of their own."""

    ranges: tuple[tuple[int, int], ...]
    """First element in the bucket, and last plus one."""
    parameters: tuple[torch.nn.Parameter, ...]
    """Whose gradients these are, in their order."""

    itemsize: int = 2
    """Bytes of one of them as it travels."""

    @property
    def numel(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def nbytes(self) -> int:
        """As they travel."""
        return self.numel * self.itemsize

    @staticmethod
    def name_of(op: BucketOp) -> str:
        """Under which they are summed."""
        return f"{op.name}/kept"

    def declaration(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> TensorDeclaration:
        """What servers are told."""
        return bytepslib.byteps.TensorDeclaration(
            name=self.name_of(op),
            dtype=grads.dtype,
            numel=self.numel,
            average=average,
            group=op.group,
            placement=op.placement,
            wire_dtype=_wire(grads),
            device=grads.device,
        )

    def bytes_per_server(self, op: BucketOp) -> list[int]:
        """That a rank pushes, in the order of the servers' ranks."""
        return bytepslib.byteps.bytes_per_server(
            self.nbytes, name=self.name_of(op), group=op.group, placement=op.placement
        )

    def start(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> _PendingKept:
        """Start summing them, and put zeros in their places."""
        parts = [grads[begin:end] for begin, end in self.ranges]
        values = torch.cat(parts)
        torch._foreach_zero_(parts)
        handle = bytepslib.byteps.push_pull_async_inplace(
            values,
            average=average,
            name=self.name_of(op),
            placement=op.placement,
            group=op.group,
            wire_dtype=_wire(grads),
        )
        return _PendingKept(handle, values, parts)


class _PendingKept:
    def __init__(self, handle: Any, values: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._handle = handle
        self._values = values
        self._parts = parts
        self._others: Any = None

    def after(self, others: Any) -> _PendingKept:
        """To be awaited after the bucket's other gradients, in whose memory they belong."""
        self._others = others
        return self

    def wait(self) -> None:
        """Wait for both."""
        self._others.wait()
        bytepslib.byteps.synchronize(self._handle)
        sums = self._values.split([part.numel() for part in self._parts])
        torch._foreach_copy_(self._parts, sums)


def kept_of(
    bucket: _ParamAndGradBucket,
    names: dict[torch.nn.Parameter, str],
    config: DistributedDataParallelConfig,
    model: TransformerConfig | None = None,
) -> Kept | None:
    """What of a bucket travels as bf16; None: nothing does.

    Args:
        names: of the model's parameters.
        config: its `dpu_reduce_keep_bf16` names more than what is always kept.
        model: where servers update: of the model, whose copied parameters are kept.
    """
    patterns = [re.compile(pattern) for pattern in config.dpu_reduce_keep_bf16 or ()]
    least = int(bytepslib.figures.setting("BYTEPS_KEEP_BF16_BYTES"))
    ranges: list[tuple[int, int]] = []
    kept: list[tuple[int, torch.nn.Parameter]] = []
    for parameter, (begin, end) in bucket.param_to_index.items():
        name, nbytes = names.get(parameter, ""), (end - begin) * bucket.grad_data.itemsize
        named = _ROUTER.search(name) or any(pattern.search(name) for pattern in patterns)
        if parameter.dim() < 2 or nbytes < least or named or is_copied(parameter, model):
            ranges.append((begin, end))
            kept.append((begin, parameter))
    if not ranges:
        return None
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    kept.sort(key=lambda one: one[0])
    return Kept(tuple(merged), tuple(parameter for _, parameter in kept))


def is_copied(parameter: torch.nn.Parameter, config: TransformerConfig | None) -> bool:
    """Whether tensor-parallel ranks or stages of the pipeline have copies of a parameter.

    Where servers update, copies are updated apart, by the same gradients. In a block with others,
    which differ, they would be rounded differently, and would not stay the same.
    """
    if config is None:
        return False
    tp = config.tensor_model_parallel_size
    if not getattr(parameter, "allreduce", True):  # an expert's
        tp = getattr(config, "expert_tensor_parallel_size", None) or tp
    if tp > 1 and not getattr(parameter, "tensor_model_parallel", False):
        return True
    marks = ("shared_embedding", "shared", "pipeline_parallel")
    return config.pipeline_model_parallel_size > 1 and any(
        getattr(parameter, mark, False) for mark in marks
    )


def _wire(grads: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if grads.dtype == torch.float32 else grads.dtype
