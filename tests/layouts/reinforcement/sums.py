"""Which sums of gradients go through BytePS."""

from __future__ import annotations

from typing import Any


def of_group(group: Any) -> list[str]:
    """Names of the sums of a bucket group: none where a rank has no other to add to."""
    operations = [getattr(bucket, "dpu_reduce_op", None) for bucket in group.buckets]
    return [op.name for op in operations if op is not None and len(op.group) > 1]


def count() -> list[str]:
    """A list that grows by the names of the sums that BytePS makes from now on."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    seen: list[str] = []
    start = buffers.dpu_reduce.start_grad_sync

    def count(group: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(of_group(group))
        return start(group, *args, **kwargs)

    buffers.dpu_reduce.start_grad_sync = count
    return seen
