# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Steps that Megatron records in one CUDA graph: their gradients are summed after its replay.

``FullCudaGraphWrapper`` records the whole of a forward and backward pass, gradient sums included,
and a replay runs none of Megatron's Python. BytePS runs on the host. So nothing is summed within
the graph: Megatron's ``finalize_model_grads`` and all that it calls run after each replay, as they
run without a graph. The sums of a step then overlap with nothing of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from . import sums

_Sums = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class _Finalize:
    """A call of ``finalize_model_grads`` that a recorded pass would have made."""

    function: _Sums
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Their tensors lie in the graph's memory: a replay gives them new values."""


def run(step: Callable[[], Any], model: Sequence[Any]) -> Any:
    """Run a step that is recorded, replayed, or neither yet, and then sum its gradients.

    Args:
        step: a forward and backward pass.
        model: chunks, each a ``DistributedDataParallel``.

    Returns:
        what `step` returns.

    Raises:
        byteps.torch.BytePSError: a sum failed; the text names the peer.
    """
    first = model[0]
    with _nothing_summed(model):
        result = step()
    finalize: _Finalize | None = getattr(first, "dpu_reduce_finalize", None)
    if finalize is not None:
        _start(model, bool(finalize.kwargs.get("force_all_reduce")))
        finalize.function(*finalize.args, **finalize.kwargs)
    return result


@contextmanager
def _nothing_summed(model: Sequence[Any]) -> Iterator[None]:
    """Every micro-batch is as one before the last, and the end of the pass is noted, not made."""
    first = model[0]
    config = first.config
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    before = {name: getattr(config, name) for name in names}
    finalize = before["finalize_model_grads_func"]

    def note(*args: Any, **kwargs: Any) -> None:
        first.dpu_reduce_finalize = _Finalize(function=finalize, args=args, kwargs=kwargs)

    config.no_sync_func = config.grad_sync_func = None
    config.finalize_model_grads_func = None if finalize is None else note
    try:
        with ExitStack() as stack:
            for chunk in model:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _start(model: Sequence[Any], force_all_reduce: bool) -> None:
    """Start what goes through servers, all of it before any of it is waited for. Collectives are
    left to ``finalize_model_grads``, which starts and waits for one bucket group after another: no
    backward pass has counted gradients, so that it takes each step for the first one."""
    for chunk in model:
        if not chunk.ddp_config.overlap_grad_reduce:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if sums.goes_through_servers(group):
                group.start_grad_sync(force_all_reduce=force_all_reduce)


def are_summed_outside(model: Any) -> bool:
    """Whether a bucket of these chunks, or this one, goes through servers."""
    chunks = model if isinstance(model, list) else [model]
    return any(
        sums.goes_through_servers(group)
        for chunk in chunks
        if getattr(getattr(chunk, "ddp_config", None), "use_dpu_reduce", False)
        for group in getattr(chunk, "bucket_groups", [])
        + getattr(chunk, "expert_parallel_bucket_groups", [])
    )
