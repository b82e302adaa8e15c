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

    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .bucket_op import BucketOp

_ROUTER = re.compile(r"\brouter\b")


@dataclass(frozen=True)
class Kept:
    """The ranges of a bucket whose gradients travel as bf16, in one tensor of their own."""

    ranges: tuple[tuple[int, int], ...]
    """First element in the bucket, and last plus one."""

    @property
    def numel(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def declaration(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> TensorDeclaration:
        """What servers are told."""
        return bytepslib.byteps.TensorDeclaration(
            name=_name(op),
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
            2 * self.numel, name=_name(op), group=op.group, placement=op.placement
        )

    def start(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> _PendingKept:
        """Start summing them, and put zeros in their places."""
        parts = [grads[begin:end] for begin, end in self.ranges]
        values = torch.cat(parts)
        torch._foreach_zero_(parts)
        handle = bytepslib.byteps.push_pull_async_inplace(
            values,
            average=average,
            name=_name(op),
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
) -> Kept | None:
    """What of a bucket travels as bf16; None: nothing does.

    Args:
        names: of the model's parameters.
        config: its `dpu_reduce_keep_bf16` names more than what is always kept.
    """
    patterns = [re.compile(pattern) for pattern in config.dpu_reduce_keep_bf16 or ()]
    least = int(bytepslib.figures.setting("BYTEPS_KEEP_BF16_BYTES"))
    ranges: list[tuple[int, int]] = []
    for parameter, (begin, end) in bucket.param_to_index.items():
        name, nbytes = names.get(parameter, ""), (end - begin) * bucket.grad_data.itemsize
        named = _ROUTER.search(name) or any(pattern.search(name) for pattern in patterns)
        if parameter.dim() < 2 or nbytes < least or named:
            ranges.append((begin, end))
    if not ranges:
        return None
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return Kept(tuple(merged))


def _name(op: BucketOp) -> str:
    return f"{op.name}/kept"


def _wire(grads: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if grads.dtype == torch.float32 else grads.dtype
