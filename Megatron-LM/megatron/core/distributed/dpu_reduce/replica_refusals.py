# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Settings that replicas cannot serve, refused by name before anything is built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import collectives, outer_settings, quorum
from .refusal import FEW_BITS, OF_MATRICES, Refusal, refuse_settings

if TYPE_CHECKING:
    from argparse import Namespace


_BY_ITSELF = "it shards parameters and reduces gradients by itself"
_OF_SHARDS: tuple[Refusal, ...] = (
    Refusal(attributes=("use_megatron_fsdp",), flag="--use-megatron-fsdp", reason=_BY_ITSELF),
    Refusal(attributes=("use_custom_fsdp",), flag="--use-custom-fsdp", reason=_BY_ITSELF),
    Refusal(attributes=("use_torch_fsdp2",), flag="--use-torch-fsdp2", reason=_BY_ITSELF),
)
_OF_REPLICAS: tuple[Refusal, ...] = (
    *_OF_SHARDS,
    Refusal(
        attributes=("num_distributed_optimizer_instances",),
        flag="--num-distributed-optimizer-instances",
        reason="replicas are the instances",
        allowed=(1, None),
    ),
    Refusal(
        attributes=("dpu_reduce_backend",),
        flag="--dpu-reduce-backend",
        reason="replicas meet only at the servers",
        allowed=("auto", None),
    ),
    Refusal(
        attributes=("dataloader_type",),
        flag="--dataloader-type",
        reason="it does not know which part of a batch this replica reads",
        refused=("external",),
    ),
    Refusal(
        attributes=("perform_rl_step",),
        flag="--perform-rl-step",
        reason="its batches are those of one torch.distributed world",
    ),
    Refusal(
        attributes=("non_persistent_ckpt_type",),
        flag="--non-persistent-ckpt-type",
        reason="one replica saves for all",
        refused=("local",),
    ),
    *collectives.refusals(),
)
"""Settings that are refused with several replicas."""

_OF_OUTER_STEPS: tuple[Refusal, ...] = (
    Refusal(
        attributes=("dpu_optimizer",),
        flag="--dpu-optimizer",
        reason="its servers make each step",
    ),
    Refusal(
        attributes=("optimizer",),
        flag="--optimizer",
        reason="the parameters that it steps are not those of a rank alone",
        refused=OF_MATRICES,
    ),
    Refusal(
        attributes=("use_precision_aware_optimizer",),
        flag="--use-precision-aware-optimizer",
        reason="it keeps no fp32 parameters that could be exchanged",
    ),
    Refusal(
        attributes=("optimizer_cpu_offload",),
        flag="--optimizer-cpu-offload",
        reason="it moves the parameters that are exchanged",
    ),
)
"""Flags that are refused with ``--dpu-outer``."""

_OF_OUTER_REPLICAS: tuple[Refusal, ...] = (
    Refusal(
        attributes=("dpu_reduce_wire_dtype",),
        flag="--dpu-reduce-wire-dtype",
        reason="dtype= of --dpu-outer sets the type of what replicas exchange",
        refused=FEW_BITS,
    ),
)
"""Flags that are refused with ``--dpu-outer`` and replicas."""


def check_config(config: object) -> None:
    """Check a DDP config, for users of megatron.core without arguments."""
    refuse_settings(config, _OF_REPLICAS, "BYTEPS_REPLICA")
    _check_servers(config, "BYTEPS_REPLICA")


def _check_servers(source: object, flag: str) -> None:
    """Check ``--dpu-optimizer`` with replicas. `source`: the arguments or a DDP config."""
    if not getattr(source, "dpu_optimizer", False):
        return
    flag = f"{flag} with --dpu-optimizer does not work with"
    if not getattr(source, "dpu_optimizer_matrices", True):
        raise ValueError(
            f"{flag} --optimizer={getattr(source, 'optimizer', 'muon')}: a replica that comes "
            "back takes all parameters from the servers, but ranks keep and update the matrices. "
            "Use adam or sgd, or drop --dpu-optimizer."
        )


def _check_quorum(args: Namespace, variable: str | None) -> None:
    given = getattr(args, "dpu_quorum", None)
    if given is None:
        return
    quorum.parse(given)
    if not variable:
        raise ValueError(
            f"--dpu-quorum={given} needs replicas: start each with worker.sh --replica NUMBER/COUNT"
        )


def check(args: Namespace) -> None:
    """Raise ValueError for arguments that replicas, or their outer steps, do not support."""
    replica = os.environ.get("BYTEPS_REPLICA")
    if replica and not getattr(args, "use_dpu_reduce", False):
        raise ValueError(
            f"BYTEPS_REPLICA={replica} needs --use-dpu-reduce: without it replicas never meet"
        )
    _check_quorum(args, replica)
    given = getattr(args, "dpu_outer", None)
    every = outer_settings.parse(given).steps
    if every > 1:
        refuse_settings(args, (*_OF_OUTER_STEPS, *_OF_SHARDS), "--dpu-outer")
    if not replica:
        return
    refuse_settings(args, _OF_REPLICAS, f"BYTEPS_REPLICA={replica}")
    _check_servers(args, f"BYTEPS_REPLICA={replica}")
    if every == 1:
        return
    refuse_settings(args, _OF_OUTER_REPLICAS, "--dpu-outer")
    own = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    if own > 1 and not args.use_distributed_optimizer:
        raise ValueError(
            f"--dpu-outer={given} with {own} data-parallel ranks in a replica needs "
            "--use-distributed-optimizer: then each rank exchanges the parameters that it owns"
        )
