# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Overlaps pulls of parameters with the next forward pass.

``--overlap-param-gather`` with ``--dpu-optimizer`` enables this overlap; in a DDP config
``dpu_optimizer_overlap`` does. A step then returns when the norm is known and the parameters are
requested from the servers. Servers answer bucket by bucket, those of the first layers first. A hook
before each module's forward pass waits for the module's parameters. So links carry gradients during
the backward pass and parameters during the forward pass.

Code that reads parameters elsewhere must call ``wait_for_parameters`` of this package first.
Saving, loading, ``state_dict()`` and the end of training do so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from ...utils import get_model_config, log_single_rank
from . import job

if TYPE_CHECKING:
    from byteps.torch.server_bucket import ServerBucket
    from byteps.torch.step_machine import StepMachine

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket

_logger = logging.getLogger(__name__)


def is_wanted(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Return whether steps return while parameters are in flight. If the user has asked for this
    but it is impossible, rank 0 logs the reason."""
    if not any(chunk.ddp_config.dpu_optimizer_overlap for chunk in chunks):
        return False
    obstacle = ""
    if getattr(get_model_config(chunks[0]), "cuda_graph_impl", "none") not in (None, "none"):
        obstacle = "a CUDA graph cannot wait"
    elif not all(map(_lands_in_parameters, _buckets(chunks))):
        obstacle = (
            "parameters come down into the memory of fp32 gradients, which the next pass uses. Add "
            "--grad-reduce-in-bf16 or --dpu-reduce-wire-dtype int8"
        )
    if obstacle:
        log_single_rank(
            _logger,
            logging.WARNING,
            "dpu_reduce: --dpu-optimizer: steps wait for all parameters in spite of "
            f"--overlap-param-gather: {obstacle}",
        )
    return not obstacle


def _buckets(chunks: Sequence[DistributedDataParallel]) -> Iterator[_ParamAndGradBucket]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                if bucket.grad_data.numel() > 0 and bucket.dpu_reduce_op.updated:
                    yield bucket


def _lands_in_parameters(bucket: _ParamAndGradBucket) -> bool:
    """Return whether updated parameters are pulled straight into the model's memory."""
    wire = bucket.dpu_reduce_op.wire
    return wire.is_block or all(wire.memory == parameter.dtype for parameter in bucket.params_list)


def clip(*, overlaps: bool) -> str:
    """Return the ``clip`` mode of ``Speculation``.

    Speculation pulls parameters while gradients are pushed. This saves time if servers have links
    of their own. If servers run on the workers' hosts, gradients alone keep both directions of a
    link busy, and parameters are better pulled during the forward pass.
    """
    return "wait" if overlaps and job.joined().network.servers.extra == 0 else "speculate"


def order(
    chunks: Sequence[DistributedDataParallel], buckets: Sequence[ServerBucket]
) -> list[ServerBucket]:
    """Return the buckets in the order in which a forward pass needs them."""
    places = enumerate(p for chunk in chunks for p in chunk.module.parameters())
    first = {parameter: position for position, parameter in reversed(list(places))}
    return sorted(
        buckets, key=lambda bucket: min(first[placed.parameter] for placed in bucket.places)
    )


def hook(
    chunks: Sequence[DistributedDataParallel],
    buckets: Sequence[ServerBucket],
    machine: StepMachine,
) -> None:
    """Make each module wait for its own parameters before its forward pass. ``state_dict()`` waits
    for all parameters."""
    bucket_of = {placed.parameter: bucket for bucket in buckets for placed in bucket.places}
    for module in (module for chunk in chunks for module in chunk.module.modules()):
        own = list(module.parameters(recurse=False))
        if needed := list(dict.fromkeys(bucket_of[p] for p in own if p in bucket_of)):
            module.register_forward_pre_hook(_waits_for(needed, machine))
            # Every module has the hook, because Megatron asks each module separately for its state.
            module.register_state_dict_pre_hook(lambda *_: machine.wait_for_parameters())


def _waits_for(needed: Sequence[ServerBucket], machine: StepMachine) -> Callable[..., None]:
    @_disable_dynamo
    @torch.no_grad()
    def wait(module: torch.nn.Module, inputs: Any) -> None:
        del module, inputs
        if machine.awaits_parameters:
            for bucket in needed:
                machine.wait_for(bucket)

    return wait
