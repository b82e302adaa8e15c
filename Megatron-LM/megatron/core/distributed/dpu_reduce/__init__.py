# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Data-parallel gradient sums through BytePS parameter servers.

With ``--use-dpu-reduce`` the buckets of ``DistributedDataParallel`` are summed by BytePS
(push to servers that add, pull the sum back) where that needs less time on the links than the
collectives of ``torch.distributed``. Everything else of Megatron is untouched: which gradients form
a bucket, when a bucket is ready, how gradients are scaled before, and what the optimizer reads
after, stay as they are.

Megatron calls this module at these places, each a hook of a line or two:

===========================  ======================================================
``validate_args``            the parsed arguments: refuse what is not supported
``validate_ddp_config``      a ``DistributedDataParallelConfig`` is made
``refuse_fsdp``              a fully sharded wrapper is built
``apart``                    DDP has grouped parameters: which need a buffer of their own?
``initialize``               torch.distributed is up: start BytePS once
``register``                 a ``DistributedDataParallel`` was built: plan its buckets
``takes``                    a bucket group is ready: does BytePS sum it?
``start_grad_sync``          it does: sum it
``keeps_optimizer``          an optimizer is made: do the servers keep it?
``make_server_optimizer``    they do: make it
``add_checkpoint_metadata``  a checkpoint is about to be saved
``shutdown``                 training is done
===========================  ======================================================

=====================  ============================================================
``refusals``           what cannot be served
``naming``             names, priorities and placements of buckets
``routes``             the ways to sum a bucket, and which is the fastest
``measure``            how fast they are on these links
``table``              what was chosen, in words
``job``                hosts and links of the job
``plan``               gives each bucket of a model its operation, from:
``bucket_op``          what the operation of a bucket is
``decisions``          the route of each bucket group of a model
``trials``             how to try each route
``node_sums``          sums inside hosts first
``declared``           what the servers are told
``sums``               the sums under way
``summed_later``       gradients that change after the backward pass, apart
``server_buckets``     with ``--dpu-optimizer``: buckets that servers update
``server_routes``      whether their copies are summed alike
``server_optimizer``   the optimizer of those
``server_checkpoint``  what is saved of it
``server_shards``      which part of a parameter a rank saves
``bytepslib``          BytePS, imported when it is first needed
=====================  ============================================================
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .bucket_op import BucketOp
from .job import initialize
from .naming import bucket_name, group_name
from .plan import forget, register
from .refusals import refuse_fsdp, validate_args, validate_ddp_config
from .summed_later import apart
from .sums import GradSyncHandle, start_grad_sync, takes

__all__ = [
    "BucketOp",
    "GradSyncHandle",
    "add_checkpoint_metadata",
    "apart",
    "bucket_name",
    "gradients_will_be_zeroed",
    "group_name",
    "initialize",
    "keeps_optimizer",
    "make_server_optimizer",
    "refuse_fsdp",
    "register",
    "shutdown",
    "start_grad_sync",
    "takes",
    "validate_args",
    "validate_ddp_config",
]


def keeps_optimizer(model_chunks: Sequence[Any]) -> bool:
    """Whether servers keep the optimizer of these model chunks (``dpu_optimizer``)."""
    config = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(config, "dpu_optimizer", False))


def make_server_optimizer(*arguments: Any) -> Any:
    """See :func:`.server_optimizer.make_server_optimizer`, which needs ``megatron.core``'s
    optimizers, and those need this package."""
    from .server_optimizer import make_server_optimizer as make

    return make(*arguments)


def gradients_will_be_zeroed(ddp: Any) -> None:
    """DDP is about to zero its gradients. With ``dpu_optimizer`` the servers may still be sending
    parameters into that memory, of a step that Megatron runs once more.

    Raises:
        byteps.torch.BytePSError: a rank or a server was lost.
    """
    if not ddp.ddp_config.dpu_optimizer:
        return
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        for bucket in buffer.buckets:
            server_bucket = getattr(bucket, "dpu_server_bucket", None)
            if server_bucket is not None:
                server_bucket.forget_push()


def add_checkpoint_metadata(args: Namespace, metadata: dict[str, Any]) -> None:
    """With ``--dpu-optimizer``, say in which form its state is saved."""
    if getattr(args, "dpu_optimizer", False):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False


def shutdown() -> None:
    """Leave the BytePS job, if this process is in it. The other ranks may train on until they
    leave too. Safe to call more than once, and where BytePS was never started."""
    forget()
    nodes = sys.modules.get("byteps.torch.nodes")
    if nodes is not None:
        nodes.groups.forget()
    bps = sys.modules.get("byteps.torch")
    if bps is not None and bps.is_initialized():
        bps.shutdown()
