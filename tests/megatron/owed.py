"""What rounding has lost of each parameter's gradient, read off the ranks of a job."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from byteps.torch import operations
from byteps.torch.feedback import feedback
from megatron.core import parallel_state
from megatron.core.distributed.dpu_reduce import plan
from megatron.training import training

Owed = dict[str, tuple[torch.Tensor, int | None]]
"""By parameter: this rank's part of what is owed, and the axis along which it is split."""


def watch() -> Owed:
    """What is owed at the first checkpoint that is saved or loaded, once it is."""
    found: Owed = {}
    save, load = training.save_checkpoint, training.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(iteration: int, model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = save(iteration, model, *args, **kwargs)
        if not found:
            found.update(_owed(model))
        return result

    @functools.wraps(load)
    def load_checkpoint(model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = load(model, *args, **kwargs)
        found.update(_owed(model))
        return result

    training.save_checkpoint, training.load_checkpoint = save_checkpoint, load_checkpoint
    return found


def _owed(model: Sequence[Any]) -> Owed:
    (chunk,) = model
    names = {parameter: name.split("module.")[-1] for name, parameter in chunk.named_parameters()}
    found: Owed = {}
    for bucket, config in plan.all_buckets():
        op, elements = bucket.dpu_reduce_op, bucket.grad_data.numel()
        own = feedback.get(op.name)
        assert own is not None
        weight = 1 / len(op.group) if config.average_in_collective else 1
        values = own.float() * weight
        if torch.distributed.get_rank() == op.group[0] and not op.updated:
            values += operations.read_feedback(op.name, elements).float()
        kept = op.kept.parameters if op.kept is not None else ()
        for parameter, (begin, end) in bucket.param_to_index.items():
            if any(parameter is one for one in kept):
                continue
            axis = getattr(parameter, "partition_dim", 0)
            is_split = getattr(parameter, "tensor_model_parallel", False)
            name = names[parameter]
            if parallel_state.get_pipeline_model_parallel_world_size() > 1:
                name = name.replace("output_layer", "embedding.word_embeddings")
            found[name] = values[begin:end].view(parameter.shape), axis if is_split else None
    return found


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """By parameter, all of it: what ranks return of `watch`, and their number among those that
    split a parameter."""
    parts: dict[str, dict[int, Any]] = {}
    axes: dict[str, int] = {}
    for rank in ranks:
        for name, (values, axis) in rank["owed"].items():
            number = rank["tensor_rank"]
            if axis is None and number > 0:  # a copy, whose gradient is like that of the first
                continue
            axes[name] = axis or 0
            of_rank = parts.setdefault(name, {})
            of_rank[number] = of_rank.get(number, 0) + values
    return {
        name: torch.cat([part for _, part in sorted(of_rank.items())], dim=axes[name])
        for name, of_rank in parts.items()
    }
