# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Switches off settings of a recipe that ``--dpu-optimizer`` replaces.

A recipe that shards the optimizer over ranks asks for work that servers do anyway. So its settings
are switched off, not refused, before Megatron derives anything from them: in the arguments or,
without arguments, in the DDP config when a model is wrapped. Rank 0 logs this in one line.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...utils import log_single_rank
from . import job
from .refusal import OF_MATRICES

if TYPE_CHECKING:
    from ..distributed_data_parallel_config import DistributedDataParallelConfig

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """Setting that asks ranks for work which they need not do."""

    name: str
    """Attribute of the arguments and the DDP config. If it is missing, there is nothing to switch
    off."""
    flag: str
    becomes: Any = False


_SHARDED = "servers shard the optimizer, and every rank receives whole parameters"
_FP32 = "servers keep fp32 parameters and moments"
_BY_LAYER = "ranks keep the optimizer of matrices, each of some, and servers that of the rest"
_HALF = "parameters come down in the type of the model, and are quantized in the forward pass"

_ON_RANKS: tuple[tuple[str, Sequence[_Setting]], ...] = (
    (
        _SHARDED,
        (
            _Setting(name="use_distributed_optimizer", flag="--use-distributed-optimizer"),
            _Setting(
                name="num_distributed_optimizer_instances",
                flag="--num-distributed-optimizer-instances",
                becomes=1,
            ),
            _Setting(name="overlap_param_gather", flag="--overlap-param-gather"),
            _Setting(
                name="overlap_param_gather_with_optimizer_step",
                flag="--overlap-param-gather-with-optimizer-step",
            ),
        ),
    ),
)
_IN_ARGUMENTS: tuple[tuple[str, Sequence[_Setting]], ...] = (
    *_ON_RANKS,
    (
        _FP32,
        (
            _Setting(name="use_precision_aware_optimizer", flag="--use-precision-aware-optimizer"),
            _Setting(name="optimizer_cpu_offload", flag="--optimizer-cpu-offload"),
            _Setting(name="optimizer_cuda_graph", flag="--optimizer-cuda-graph"),
        ),
    ),
    (
        _HALF,
        (
            _Setting(name="fp8_param_gather", flag="--fp8-param-gather"),
            _Setting(name="fp4_param_gather", flag="--fp4-param-gather"),
            _Setting(
                name="reuse_grad_buf_for_mxfp8_param_ag",
                flag="--reuse-grad-buf-for-mxfp8-param-ag",
            ),
        ),
    ),
)
_LAYER_WISE = (
    _BY_LAYER,
    (
        _Setting(name="use_layer_wise_param_layout", flag="the layer-wise parameter layout"),
        _Setting(name="overlap_param_gather", flag="--overlap-param-gather"),
    ),
)
_WITHOUT_SHARDS = tuple(
    (why, tuple(setting for setting in settings if setting.name != "use_distributed_optimizer"))
    for why, settings in _IN_ARGUMENTS
)
"""Settings to switch off with Muon. ``--use-distributed-optimizer`` stays, because it divides
matrices over ranks."""
_READERS = (
    ("log_params_norm", "--log-params-norm"),
    (
        "check_weight_hash_across_dp_replicas_interval",
        "--check-weight-hash-across-dp-replicas-interval",
    ),
    ("perform_rl_step", "--perform-rl-step"),
)
"""Features that read parameters between steps. Each has its attribute of the arguments and its
flag."""
_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Attributes of the precision-aware optimizer. Only that optimizer allows types other than fp32."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings of the command line, before `translate_args` changes the arguments."""

    preset: bool = False
    instances: int = 0
    """Instances of the distributed optimizer; 0: it was not asked for."""

    @classmethod
    def of(cls, args: Namespace) -> Given:
        sharded = getattr(args, "use_distributed_optimizer", False)
        return cls(
            preset=getattr(args, "dpu_preset", None) == "own-hosts",
            instances=args.num_distributed_optimizer_instances if sharded else 0,
        )


given = Given()
"""Settings at the last call of `translate_args`. A job's forecast needs them, because the DDP
config has only the changed arguments."""


def translate_args(args: Namespace) -> None:
    """Change arguments that ask ranks for the servers' work. Megatron validates them later.

    ``--dpu-optimizer`` implies ``--use-dpu-reduce``.
    """
    global given
    given = Given.of(args)
    if getattr(args, "dpu_optimizer", False):
        args.use_dpu_reduce = True
    if getattr(args, "use_dpu_reduce", False) and job.replicas_of(args) > 1:
        _fit_to_replicas(args)
    by_matrix = getattr(args, "optimizer", None) in OF_MATRICES
    if by_matrix:  # only this argument sets the value in the DDP config
        args.dpu_optimizer_matrices = False
    if not getattr(args, "dpu_optimizer", False):
        return
    settings = _IN_ARGUMENTS
    if by_matrix and (args.use_distributed_optimizer or args.optimizer.startswith("dist_")):
        settings = (_LAYER_WISE, *_WITHOUT_SHARDS)
    if getattr(args, "use_precision_aware_optimizer", False):
        _keep_dtypes(args)
    for said in (_overlap(args), _drop(args, settings)):
        if said and args.rank == 0:
            print(said, flush=True)


def _overlap(args: Namespace) -> str:
    """Replace ``--overlap-param-gather`` by ``dpu_optimizer_overlap``: see :mod:`.forward_overlap`.

    A DDP config must set ``dpu_optimizer_overlap`` explicitly, because custom training loops may
    read parameters between steps.

    Returns:
        a log message, or an empty string.
    """
    if not getattr(args, "overlap_param_gather", False):
        return ""
    args.overlap_param_gather = False
    reader = next((flag for name, flag in _READERS if getattr(args, name, None)), "")
    if job.replicas_of(args) > 1:
        reader = "other replicas"
    elif not getattr(args, "dpu_optimizer_matrices", True):
        reader = "the optimizer of the matrices"
    if not reader:
        args.dpu_optimizer_overlap = True
        return ""
    return (
        "dpu_reduce: --dpu-optimizer: steps wait for all parameters in spite of "
        f"--overlap-param-gather, since they may be read between steps ({reader})"
    )


def _fit_to_replicas(args: Namespace) -> None:
    """Change arguments that replicas cannot use. No replica may repeat a step, because its
    gradients would be summed with those of other replicas' next step. Only the first replica writes
    files that all replicas would write. SIGTERM ends a replica after its step, and must not end its
    data loaders earlier: see :mod:`.replica_changes`."""
    args.exit_signal_handler = True
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        args.rerun_mode = "disabled"
        if args.rank == 0:
            print(
                "dpu_reduce: --rerun-mode is disabled: a replica cannot repeat a step alone. A "
                "loss that is not finite ends the job",
                flush=True,
            )
    if job.replica() > 0:
        for name in ("tensorboard_dir", "wandb_project"):
            if getattr(args, name, None):
                setattr(args, name, None)


def translate_config[Layout](
    config: DistributedDataParallelConfig, layout: Layout | None
) -> Layout | None:
    """Change a DDP config as `translate_args` changes arguments, for users of megatron.core who
    have no arguments. Call this before DDP is built.

    The optimizer's config is not changed, because servers use only its options of the update.

    Args:
        layout: layout of the buckets, computed by the caller.

    Returns:
        the layout. None if servers keep the optimizer, because a layout may be for shards on ranks.
    """
    if not config.dpu_optimizer:
        return layout
    config.use_dpu_reduce = True
    if dropped := _drop(config, _ON_RANKS):
        log_single_rank(_logger, logging.WARNING, dropped)
    return None


def _keep_dtypes(args: Namespace) -> None:
    """Set the optimizer's dtypes to fp32, as on the servers. The gradients' type moves to another
    flag, which works without the precision-aware optimizer."""
    for name in _STATE_DTYPES:
        if hasattr(args, name):
            setattr(args, name, torch.float32)
    in_bf16 = getattr(args, "main_grads_dtype", None) in ("bf16", torch.bfloat16)
    if in_bf16 and args.bf16 and not args.accumulate_allreduce_grads_in_fp32:
        args.grad_reduce_in_bf16 = True
        args.main_grads_dtype = torch.float32


def _drop(source: object, settings: Sequence[tuple[str, Sequence[_Setting]]]) -> str:
    """Switch the settings off. Return a log message, or an empty string."""
    replaced = []
    for why, of_reason in settings:
        flags = []
        for setting in of_reason:
            if getattr(source, setting.name, None) not in (None, False, setting.becomes):
                setattr(source, setting.name, setting.becomes)
                flags.append(setting.flag)
        if flags:
            replaced.append(f"{', '.join(flags)} ({why})")
    return (
        f"dpu_reduce: --dpu-optimizer takes the place of {'; '.join(replaced)}" if replaced else ""
    )
