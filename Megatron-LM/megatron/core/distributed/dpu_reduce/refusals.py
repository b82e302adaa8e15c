# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Settings that ``--use-dpu-reduce`` cannot serve, refused by name before anything is built."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from . import advice, bytepslib, kept_bf16, replica_refusals
from .refusal import FEW_BITS, OF_MATRICES, Refusal, refuse_settings

if TYPE_CHECKING:
    from argparse import Namespace

    from ...optimizer.optimizer_config import OptimizerConfig
    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig

WIRE_TYPES = ("bf16", *FEW_BITS)
"""Values of ``--dpu-reduce-wire-dtype``."""


_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        attributes=("inprocess_restart",),
        flag="--inprocess-restart",
        reason="BytePS cannot rejoin its servers from within a restarted training function",
    ),
    Refusal(
        attributes=("fake_process_group",),
        flag="--fake-process-group",
        reason="BytePS needs real ranks to sum over",
    ),
)


_SHARDED = "it cuts parameters over ranks, and servers update the buckets of whole ones"
_CUT_ONCE_MORE = (
    "gradients of weights that are whole are averaged over the ranks that share the others, after "
    "the backward pass, and servers do not count them once in the norm"
)

_WHOLE_PARAMETERS: tuple[Refusal, ...] = (
    Refusal(attributes=("use_megatron_fsdp",), flag="--use-megatron-fsdp", reason=_SHARDED),
    Refusal(attributes=("use_custom_fsdp",), flag="--use-custom-fsdp", reason=_SHARDED),
    Refusal(attributes=("use_torch_fsdp2",), flag="--use-torch-fsdp2", reason=_SHARDED),
    Refusal(
        attributes=("tensor_parallel_num_weight_shards",),
        flag="--tensor-parallel-num-weight-shards",
        reason=_CUT_ONCE_MORE,
        allowed=(1, None),
        allowed_like="tensor_model_parallel_size",
    ),
    Refusal(
        attributes=("expert_tensor_parallel_num_weight_shards",),
        flag="--expert-tensor-parallel-num-weight-shards",
        reason=_CUT_ONCE_MORE,
        allowed=(1, None),
        allowed_like="expert_tensor_parallel_size",
    ),
)
"""Parameter layouts that --dpu-optimizer refuses: in the arguments, the DDP config, or the model's
config."""


_OPTIMIZER_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        attributes=("dpu_reduce_backend",),
        flag="--dpu-reduce-backend",
        reason="no collective takes the place of servers that update",
        allowed=("auto", "flat", "node-first", None),
    ),
    Refusal(
        attributes=(
            "param_name_patterns_for_fp32_local_accumulation",
            "ddp_param_name_patterns_for_fp32_local_accumulation",
        ),
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
        reason="gradients are taken from the buckets alone",
        allowed=((), [], None),
    ),
    Refusal(
        attributes=("optimizer",),
        flag="--optimizer",
        reason="servers know adam (AdamW) and sgd",
        allowed=("adam", "sgd", *OF_MATRICES, None),
    ),
    Refusal(
        attributes=("muon_scalar_optimizer",),
        flag="--muon-scalar-optimizer",
        reason="servers know AdamW for what Muon leaves",
        allowed=("adam", None),
    ),
    Refusal(
        attributes=("decoupled_weight_decay",),
        flag="decoupled_weight_decay",
        reason="servers know AdamW, not Adam with the decay in the gradient",
        allowed=(True, None),
    ),
    Refusal(
        attributes=("optimizer_cuda_graph",),
        flag="--optimizer-cuda-graph",
        reason="BytePS runs on the host",
    ),
    Refusal(
        attributes=("save_wgrads_interval",),
        flag="--save-wgrads-interval",
        reason="the sums of the gradients stay on the servers",
    ),
    Refusal(
        attributes=("qk_clip",),
        flag="--qk-clip",
        reason="it changes the model's weights behind the servers' back",
    ),
    Refusal(
        attributes=("load_main_params_from_ckpt",),
        flag="--load-main-params-from-ckpt",
        reason="servers take the model's parameters",
    ),
)


def _check_wire_dtype(source: object) -> None:
    """Check the wire dtype. ``source`` is the arguments or a DDP config."""
    name = getattr(source, "dpu_reduce_wire_dtype", None)
    if name is None:
        return
    if not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} needs --use-dpu-reduce: without it no gradient goes "
            "through BytePS"
        )
    if name not in WIRE_TYPES:
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} is not known; it can be {', '.join(WIRE_TYPES)}"
        )


def _check_few_bits(source: object) -> None:
    """Check settings for few bits. ``source`` is the arguments or a DDP config."""
    keep_bf16 = getattr(source, "dpu_reduce_keep_bf16", None)
    kept_bf16.parse(keep_bf16)
    if keep_bf16 and getattr(source, "dpu_reduce_wire_dtype", None) not in FEW_BITS:
        raise ValueError("--dpu-reduce-keep-bf16 needs --dpu-reduce-wire-dtype int8 or int4")


def _check_route(source: object) -> None:
    """Check the backend. ``source`` is the arguments or a DDP config."""
    name = getattr(source, "dpu_reduce_backend", None) or "auto"
    if name == "auto":
        return
    if not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            f"--dpu-reduce-backend={name} needs --use-dpu-reduce: without it no gradient goes "
            "through BytePS"
        )
    known = bytepslib.routes.ROUTES
    if name not in known:
        raise ValueError(f"--dpu-reduce-backend={name} is not known; it can be {', '.join(known)}")


def _check_optimizer(source: object) -> None:
    """Check settings for the optimizer on the servers. ``source`` is the arguments or a DDP
    config."""
    if not getattr(source, "dpu_optimizer", False):
        return
    refuse_settings(source, _OPTIMIZER_REFUSALS, "--dpu-optimizer")
    refuse_settings(source, _WHOLE_PARAMETERS, "--dpu-optimizer")
    form = getattr(source, "ckpt_format", "torch_dist")
    saves = getattr(source, "save", None) and not getattr(source, "no_save_optim", None)
    loads = getattr(source, "load", None) and not getattr(source, "no_load_optim", None)
    if form != "torch_dist" and (saves or loads):
        raise ValueError(
            f"--dpu-optimizer does not work with --ckpt-format={form}: the servers' state is saved "
            "and loaded as torch_dist. Use that, or --no-save-optim and --no-load-optim."
        )
    wire = getattr(source, "dpu_reduce_wire_dtype", None)
    if wire == "bf16" and getattr(source, "bf16", True) is False:
        raise ValueError(
            f"--dpu-optimizer does not work with --dpu-reduce-wire-dtype={wire} without --bf16: "
            "parameters travel in that type too, and those of this model are fp32"
        )


def _check_deterministic(args: Namespace) -> None:
    """Refuse deterministic mode if sums have an order that this package does not control."""
    route = getattr(args, "dpu_reduce_backend", None)
    if (
        getattr(args, "deterministic_mode", False)
        and getattr(args, "use_dpu_reduce", False)
        and getattr(args, "use_megatron_fsdp", False)
        and has_replicas(args)
        and route != "collective"
    ):
        raise ValueError(
            "--use-dpu-reduce with Megatron-FSDP does not work with --deterministic-mode: servers "
            "add the shards of optimizer instances in the order of their arrival. Use "
            "--dpu-reduce-backend collective, or drop one of the two."
        )


def why_servers_cannot_update(source: object) -> str:
    """Return the reason why `--dpu-optimizer` is incompatible with the arguments or a config. Empty
    if it is compatible."""
    try:
        refuse_settings(source, _OPTIMIZER_REFUSALS, "--dpu-optimizer")
        refuse_settings(source, _WHOLE_PARAMETERS, "--dpu-optimizer")
    except ValueError as error:
        return str(error)
    return ""


def validate_optimizer_config(config: OptimizerConfig) -> None:
    """Check the config of an optimizer that servers keep.

    Raises:
        ValueError: servers do not support a setting; the text names it.
    """
    refuse_settings(config, _OPTIMIZER_REFUSALS, "--dpu-optimizer")


def refuse(args: Namespace) -> None:
    """Check arguments without training, so BytePS need not be installed.

    Raises:
        ValueError: see `validate_args`.
    """
    _check_wire_dtype(args)
    _check_few_bits(args)
    _check_route(args)
    _check_optimizer(args)
    _check_deterministic(args)
    replica_refusals.check(args)
    if getattr(args, "use_dpu_reduce", False):
        refuse_settings(args, _REFUSALS)


def validate_args(args: Namespace) -> None:
    """Check that the arguments are compatible with BytePS gradient sums, if these are requested.

    Megatron has already renamed and derived its arguments, so each setting has one name.

    Raises:
        ValueError: an argument cannot be combined with ``--use-dpu-reduce``; the text names both
            flags and the reason.
        RuntimeError: BytePS is not installed.
    """
    refuse(args)
    if not getattr(args, "use_dpu_reduce", False):
        return
    bytepslib.load()
    if getattr(args, "use_torch_fsdp2", False):
        # torch FSDP2's DDP config lacks this package's fields, so no wrapper logs this.
        if bytepslib.fsdp.is_asked():
            bytepslib.fsdp.install()
        else:
            _say_that_collectives_stay(_FSDP2, getattr(args, "rank", 0))


def validate_ddp_config(ddp_config: DistributedDataParallelConfig) -> None:
    """Check a DDP config, for users of megatron.core without arguments. ``dpu_optimizer`` implies
    ``use_dpu_reduce``.

    Raises:
        ValueError: a setting cannot be combined with ``use_dpu_reduce``.
    """
    if ddp_config.dpu_optimizer:
        ddp_config.use_dpu_reduce = True
    _check_wire_dtype(ddp_config)
    _check_few_bits(ddp_config)
    _check_route(ddp_config)
    _check_optimizer(ddp_config)
    if ddp_config.use_dpu_reduce:
        refuse_settings(ddp_config, _REFUSALS)


def validate_model_config(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> None:
    """Check the config of a model that DDP wraps, for users of megatron.core without arguments.

    Raises:
        ValueError: a setting cannot be combined with the DDP config.
    """
    if ddp_config.use_dpu_reduce:
        refuse_settings(config, _REFUSALS)
    if ddp_config.dpu_optimizer:
        refuse_settings(config, _OPTIMIZER_REFUSALS, "--dpu-optimizer")
        refuse_settings(config, _WHOLE_PARAMETERS, "--dpu-optimizer")


def fully_sharded(ddp_config: DistributedDataParallelConfig, wrapper: str) -> None:
    """Handle the construction of a fully sharded wrapper. Rank 0 logs that the wrapper reduces its
    gradients by itself. With hybrid sharding, servers may sum over replicas of the model.

    Args:
        ddp_config: config of the wrapper.
        wrapper: name of the wrapper.

    Raises:
        ValueError: the config asks for the optimizer on the servers, which the wrapper would
            ignore.
    """
    if not ddp_config.use_dpu_reduce:
        return
    if ddp_config.dpu_optimizer:
        raise ValueError(
            f"--dpu-optimizer does not work with {wrapper}: {_SHARDED}. Drop one of the two."
        )
    replicas = 1
    if wrapper == REPLICATED and has_replicas(ddp_config):
        replicas = ddp_config.num_distributed_optimizer_instances
        # All ranks must join together. All are here now; in a backward pass some may be missing.
        bytepslib.reductions.joined()
    _say_that_collectives_stay(wrapper, torch.distributed.get_rank(), replicas)


REPLICATED = "Megatron-FSDP"
"""Wrapper that may all-reduce its shards over replicas."""
_FSDP2, _FSDP2_DTYPES = "torch FSDP2", "BYTEPS_FSDP_DTYPES"
_FSDP2_HINT = f". {_FSDP2_DTYPES}=int8 on all hosts sends them in few bits"


def has_replicas(source: Any) -> bool:
    """Return whether Megatron-FSDP all-reduces shards over replicas. `source`: the arguments or a
    DDP config."""
    return (
        getattr(source, "num_distributed_optimizer_instances", 1) > 1
        and getattr(source, "outer_dp_sharding_strategy", "no_shard") == "no_shard"
    )


def left_by(wrapper: str, source: Any) -> str:
    """Return a text about the reductions that a fully sharded wrapper makes by itself. `source`:
    the arguments or a DDP config."""
    if wrapper == REPLICATED and has_replicas(source):
        return (
            f"{wrapper} shards gradients by itself. Its all-reduce over "
            f"{source.num_distributed_optimizer_instances} replicas goes through servers where "
            "that is faster; what that gains is not computed here"
        )
    return (
        f"{wrapper} reduces all gradients by itself: they stay with torch.distributed, and nothing "
        f"is gained{_FSDP2_HINT if wrapper == _FSDP2 else ''}"
    )


@functools.cache
def _say_that_collectives_stay(wrapper: str, rank: int, replicas: int = 1) -> None:
    if rank != 0:
        return
    rest = "all of them stay with torch.distributed, and no server is used"
    if wrapper == _FSDP2:
        rest += _FSDP2_HINT
    if replicas > 1:
        rest = (
            f"these stay with torch.distributed. The all-reduce over {replicas} replicas goes "
            "through servers where that is faster"
        )
    text = f"dpu_reduce: {wrapper} shards gradients by reduce-scatters of its own: {rest}"
    print(advice.as_lines(text), flush=True)
