# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What ``--use-dpu-reduce`` cannot serve is refused before anything is built, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib
from .routes import ROUTES

OPTIMIZER_CLIPS = ("speculate", "wait")
"""How --dpu-optimizer makes steps that may be clipped."""

if TYPE_CHECKING:
    from argparse import Namespace

    from ...optimizer.optimizer_config import OptimizerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig

WIRE_DTYPES = {"bf16": torch.bfloat16}
"""What ``--dpu-reduce-wire-dtype`` may name."""


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """A setting under which gradients do not take the path that this module replaces."""

    attributes: tuple[str, ...]
    """Its names, on the arguments and on the DDP config."""
    flag: str
    reason: str
    allowed: tuple[Any, ...] = (False, None)
    """Values that are not refused; ignored where ``refused`` is given."""
    refused: tuple[Any, ...] = ()
    """Values that are refused, all others being allowed."""
    allowed_like: str = ""
    """Another attribute, whose value is not refused either."""

    def applies_to(self, value: object, source: object) -> bool:
        if self.refused:
            return value in self.refused
        if self.allowed_like and value == getattr(source, self.allowed_like, None):
            return False
        return value not in self.allowed


_FSDP = "it shards gradients with reduce-scatters of its own, which BytePS does not replace"
_UNTRIED = "it has not been tried with gradients that BytePS sums"
_RESHARDED = (
    "its weights are Transformer Engine's, cut once more and summed in part by themselves, which "
    "has not been tried with gradients that BytePS sums"
)

_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(attributes=("use_megatron_fsdp",), flag="--use-megatron-fsdp", reason=_FSDP),
    _Refusal(attributes=("use_custom_fsdp",), flag="--use-custom-fsdp", reason=_FSDP),
    _Refusal(attributes=("use_torch_fsdp2",), flag="--use-torch-fsdp2", reason=_FSDP),
    _Refusal(
        attributes=("optimizer",),
        flag="--optimizer",
        reason="it shards whole layers, not buckets",
        refused=("dist_muon",),
    ),
    _Refusal(attributes=("fp4_param_gather",), flag="--fp4-param-gather", reason=_UNTRIED),
    _Refusal(
        attributes=("reuse_grad_buf_for_mxfp8_param_ag",),
        flag="--reuse-grad-buf-for-mxfp8-param-ag",
        reason=_UNTRIED,
    ),
    _Refusal(
        attributes=(
            "reduce_scatter_with_fp32_accumulation",
            "ddp_reduce_scatter_with_fp32_accumulation",
        ),
        flag="--ddp-reduce-scatter-with-fp32-accumulation",
        reason="it replaces the sum by an all-to-all; BytePS servers already add half types in "
        "fp32",
    ),
    _Refusal(
        attributes=("nccl_ub",),
        flag="--use-nccl-ub",
        reason="it allocates the gradient buffers for NCCL's collectives, which would not be used",
    ),
    _Refusal(
        attributes=("tensor_parallel_num_weight_shards",),
        flag="--tensor-parallel-num-weight-shards",
        reason=_RESHARDED,
        allowed=(1, None),
        allowed_like="tensor_model_parallel_size",
    ),
    _Refusal(
        attributes=("expert_tensor_parallel_num_weight_shards",),
        flag="--expert-tensor-parallel-num-weight-shards",
        reason=_RESHARDED,
        allowed=(1, None),
        allowed_like="expert_tensor_parallel_size",
    ),
    _Refusal(
        attributes=("cuda_graph_impl",),
        flag="--cuda-graph-impl",
        reason="it records the gradient sums in a CUDA graph, and BytePS runs on the host",
        refused=("full_iteration",),
    ),
    _Refusal(
        attributes=("inprocess_restart",),
        flag="--inprocess-restart",
        reason="BytePS cannot rejoin its servers from within a restarted training function",
    ),
    _Refusal(
        attributes=("fake_process_group",),
        flag="--fake-process-group",
        reason="BytePS needs real ranks to sum over",
    ),
)


_STATELESS = "ranks hold no optimizer state with it"

_OPTIMIZER_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(
        attributes=("use_distributed_optimizer",),
        flag="--use-distributed-optimizer",
        reason="the servers hold all state, and ranks none that could be sharded",
    ),
    _Refusal(
        attributes=("use_layer_wise_distributed_optimizer",),
        flag="--use-layer-wise-distributed-optimizer",
        reason=_STATELESS,
    ),
    _Refusal(
        attributes=("overlap_param_gather",),
        flag="--overlap-param-gather",
        reason="every rank gets whole parameters, in the optimizer's step",
    ),
    _Refusal(
        attributes=("dpu_reduce_route",),
        flag="--dpu-reduce-route",
        reason="no collective takes the place of servers that update",
        allowed=("auto", "flat", "node-first", None),
    ),
    _Refusal(
        attributes=(
            "param_name_patterns_for_fp32_local_accumulation",
            "ddp_param_name_patterns_for_fp32_local_accumulation",
        ),
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
        reason="gradients are taken from the buckets alone",
        allowed=((), [], None),
    ),
    _Refusal(
        attributes=("fp16",),
        flag="--fp16",
        reason="servers update bf16 and fp32 parameters, and do not scale the loss",
    ),
    _Refusal(
        attributes=("loss_scale",),
        flag="--loss-scale",
        reason="servers do not scale gradients back",
        allowed=(None, 0),
    ),
    _Refusal(
        attributes=("optimizer",),
        flag="--optimizer",
        reason="servers know adam (AdamW) and sgd",
        allowed=("adam", "sgd", None),
    ),
    _Refusal(
        attributes=("decoupled_weight_decay",),
        flag="decoupled_weight_decay",
        reason="servers know AdamW, not Adam with the decay in the gradient",
        allowed=(True, None),
    ),
    _Refusal(
        attributes=("use_precision_aware_optimizer",),
        flag="--use-precision-aware-optimizer",
        reason="servers keep fp32 parameters and moments",
    ),
    _Refusal(
        attributes=("optimizer_cpu_offload",),
        flag="--optimizer-cpu-offload",
        reason=_STATELESS,
    ),
    _Refusal(
        attributes=("optimizer_cuda_graph",),
        flag="--optimizer-cuda-graph",
        reason="BytePS runs on the host",
    ),
    _Refusal(
        attributes=("save_wgrads_interval",),
        flag="--save-wgrads-interval",
        reason="the sums of the gradients stay on the servers",
    ),
    _Refusal(
        attributes=("mtp_num_layers",),
        flag="--mtp-num-layers",
        reason="gradients of multi-token prediction are clipped by a norm of their own",
        allowed=(None, 0),
    ),
    _Refusal(
        attributes=("qk_clip",),
        flag="--qk-clip",
        reason="it changes the model's weights behind the servers' back",
    ),
    _Refusal(
        attributes=("load_main_params_from_ckpt",),
        flag="--load-main-params-from-ckpt",
        reason="servers take the model's parameters",
    ),
)


def _refuse(
    source: object,
    refusals: tuple[_Refusal, ...] = _REFUSALS,
    asked: str = "--use-dpu-reduce",
) -> None:
    settings = ((refusal, name) for refusal in refusals for name in refusal.attributes)
    for refusal, name in settings:
        value = getattr(source, name, None)
        if refusal.applies_to(value, source):
            shown = refusal.flag if value is True else f"{refusal.flag}={value}"
            raise ValueError(
                f"{asked} does not work with {shown}: {refusal.reason}. Drop one of the two."
            )


def _check_wire_dtype(source: object) -> None:
    """``source`` is the arguments or a DDP config."""
    name = getattr(source, "dpu_reduce_wire_dtype", None)
    if name is None:
        return
    if not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} needs --use-dpu-reduce: without it no gradient goes "
            "through BytePS"
        )
    if name not in WIRE_DTYPES:
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} is not known; it can be {', '.join(WIRE_DTYPES)}"
        )


def _check_route(source: object) -> None:
    """``source`` is the arguments or a DDP config."""
    name = getattr(source, "dpu_reduce_route", None) or "auto"
    if name not in ROUTES:
        raise ValueError(f"--dpu-reduce-route={name} is not known; it can be {', '.join(ROUTES)}")
    if name != "auto" and not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            f"--dpu-reduce-route={name} needs --use-dpu-reduce: without it no gradient goes "
            "through BytePS"
        )


def _check_optimizer(source: object) -> None:
    """``source`` is the arguments or a DDP config."""
    if not getattr(source, "dpu_optimizer", False):
        return
    if not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            "--dpu-optimizer needs --use-dpu-reduce: without it there are no servers to update"
        )
    _refuse(source, _OPTIMIZER_REFUSALS, "--dpu-optimizer")
    clip = getattr(source, "dpu_optimizer_clip", "speculate")
    if clip not in OPTIMIZER_CLIPS:
        raise ValueError(
            f"--dpu-optimizer-clip={clip} is not known; it can be {' or '.join(OPTIMIZER_CLIPS)}"
        )
    form = getattr(source, "ckpt_format", "torch_dist")
    saves = getattr(source, "save", None) and not getattr(source, "no_save_optim", None)
    loads = getattr(source, "load", None) and not getattr(source, "no_load_optim", None)
    if form != "torch_dist" and (saves or loads):
        raise ValueError(
            f"--dpu-optimizer does not work with --ckpt-format={form}: it saves and loads "
            "torch_dist. Use that, or --no-save-optim and --no-load-optim."
        )
    wire = getattr(source, "dpu_reduce_wire_dtype", None)
    if wire is not None and getattr(source, "bf16", True) is False:
        raise ValueError(
            f"--dpu-optimizer does not work with --dpu-reduce-wire-dtype={wire} without --bf16: "
            "parameters travel in that type too, and those of this model are fp32"
        )


def validate_optimizer_config(config: OptimizerConfig) -> None:
    """Check an optimizer config, where servers keep the optimizer.

    Raises:
        ValueError: servers cannot do what it asks for; the text names it.
    """
    _refuse(config, _OPTIMIZER_REFUSALS, "--dpu-optimizer")


def validate_args(args: Namespace) -> None:
    """Check that the arguments allow BytePS gradient sums, where they ask for them.

    Raises:
        ValueError: an argument that cannot be combined with ``--use-dpu-reduce``; the text names
            both and the reason.
        RuntimeError: BytePS is not installed.
    """
    _check_wire_dtype(args)
    _check_route(args)
    _check_optimizer(args)
    if not getattr(args, "use_dpu_reduce", False):
        return
    _refuse(args)
    bytepslib.load()


def validate_ddp_config(ddp_config: DistributedDataParallelConfig) -> None:
    """Check a DDP config, for users of megatron.core who have no arguments.

    Raises:
        ValueError: a setting that cannot be combined with ``use_dpu_reduce``.
    """
    _check_wire_dtype(ddp_config)
    _check_route(ddp_config)
    _check_optimizer(ddp_config)
    if ddp_config.use_dpu_reduce:
        _refuse(ddp_config)


def refuse_fsdp(ddp_config: DistributedDataParallelConfig) -> None:
    """Called where Megatron-FSDP or torch FSDP2 wraps a model.

    Raises:
        ValueError: the config asks for BytePS, which would otherwise be ignored without a word.
    """
    if ddp_config.use_dpu_reduce:
        raise ValueError(
            f"use_dpu_reduce does not work with fully sharded data parallelism: {_FSDP}. "
            "Drop one of the two."
        )
