# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Lists Megatron's collectives over data-parallel ranks, and says for each what replicas need.

Each replica has its own torch.distributed world, so a collective over its data-parallel ranks
leaves out the other replicas. If replicas got different values of trained state in this way, they
would diverge silently. So this list must be complete. A test trains with the settings that lead to
these collectives, records each call in torch's process groups, and fails at a call that is not
listed. :mod:`.replica_refusals` refuses the arguments that lead to unsupported collectives.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from .refusal import Refusal


class Over(enum.Enum):
    """Ranks over which a collective inside a replica must reach if there are several replicas."""

    CONTINUED = "a hook continues it over replicas"
    ALIKE = "it is made of sums or parameters that all replicas have, so all find the same"
    MOVED = "it moves values between ranks of a replica, and adds up none that are trained"
    REPORTED = "it is about one replica alone: a report, a test, or its own files"
    REFUSED = "replicas refuse the setting that leads to it"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A function that calls collectives over data-parallel ranks."""

    where: str
    """``module:function``, without ``megatron.``."""
    over: Over
    why: str
    """Purpose of the collective. With local steps (``--dpu-outer``), a collective reaches over
    replicas only if its purpose says so, because parameters and buffers become equal at each
    exchange anyway."""
    refusal: Refusal | None = None


_GRADIENTS = "core.distributed.finalize_model_grads"
_BUFFERS = "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_DISPATCHER = "core.transformer.moe.token_dispatcher"
_TRAINING = "training.training"

_CONTINUED = {
    f"{_BUFFERS}.start_grad_sync": "gradients: their bucket's operation is over all replicas",
    f"{_GRADIENTS}:finalize_model_grads": "tokens by which gradients are divided",
    f"{_GRADIENTS}:_update_router_qb_beta": "quantiles of a router's logits",
    "core.transformer.moe.moe_utils:get_updated_expert_bias": "tokens of each expert",
    "core.optimizer.clip_grads:get_grad_norm_fp32": "norm of the gradients",
    f"{_TRAINING}:train_step": "loss",
    f"{_TRAINING}:evaluate": "loss of the evaluation, and whether its time is up",
    f"{_TRAINING}:checkpoint_and_decide_exit": "whether time is up",
    "training.dist_signal_handler:all_gather_item": "signals",
}
_ALIKE = {
    "core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__": "nothing",
    f"{_BUFFERS}.start_param_sync": "parameters of the distributed optimizer",
    "core.distributed.distributed_data_parallel:DistributedDataParallel.broadcast_params": "start",
    "core.fp8_utils:_quantize_param_shard_impl": "scales of fp8 parameters",
    "core.optimizer.clip_grads:count_zeros_fp32": "zeros in summed gradients",
    "core.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group": "which norms there are",
    "core.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": (
        "whether a summed gradient is finite"
    ),
    "core.optimizer:_get_param_groups": "groups of parameters",
    "core.optimizer.emerging_optimizers:"
    "TensorParallelMuon.scaled_orthogonalize_fn_with_gtp_remat": "parts of a matrix",
    "core.optimizer.layer_wise_optimizer:"
    "LayerWiseDistributedOptimizer.allgather_params.<locals>._allgather_helper": "parameters",
    "core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.broadcast_params": (
        "parameters"
    ),
    "core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.has_grad_norm_group": (
        "which norms there are"
    ),
    f"{_TRAINING}:build_train_valid_test_data_loaders": "which data there are",
    "training.utils.common_utils:calc_params_l2_norm.<locals>._sum_reduce": "norm of parameters",
    "training.utils.common_utils:logical_and_across_model_parallel_group": "whether all stepped",
    "training.utils.common_utils:reduce_max_stat_across_model_parallel_group": "norm, zeros",
}
_MOVED = {
    **{
        f"{_DISPATCHER}:{name}": "tokens, to their experts and back"
        for name in (
            "MoEAllGatherTokenDispatcher.token_dispatch",
            "MoEAllGatherTokenDispatcher.token_combine",
            "MoEAlltoAllTokenDispatcher.preprocess",
            "MoEAlltoAllTokenDispatcher.token_dispatch",
            "MoEAlltoAllTokenDispatcher.token_combine",
            "_HybridEPManager.setup_metadata",
        )
    },
    "core.pipeline_parallel.schedules:custom_backward": "gradients of tokens of experts",
    "core.datasets.data_schedule:HybridCPDataLoaderWrapper.get_global_seqlens": "lengths",
    "core.datasets.data_schedule:HybridCPDataLoaderWrapper.reroute_samples_to_hdp_ranks": "samples",
    "core.datasets.data_schedule_utils:_get_global_seqlens_and_ids": "lengths",
    "core.datasets.data_schedule_utils:reroute_samples_to_dcp_ranks": "samples",
    "core.utils:get_batch_on_this_tp_rank.<locals>._broadcast": "samples",
    "core.optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero": "state",
    "core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero": (
        "state"
    ),
    "core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.sharded_state_dict": "state",
}
_REPORTED = {
    "core.energy_monitor:EnergyMonitor.lap": "energy",
    "core.energy_monitor:EnergyMonitor.get_total": "energy",
    "core.rerun_state_machine:RerunStateMachine._reduce_any": (
        "whether a step is made again: with replicas none is (--rerun-mode is disabled)"
    ),
    "core.timers:Timers._get_elapsed_time_all_ranks": "times",
    "core.transformer.attention:SelfAttention.run_realtime_tests": "test",
    "core.transformer.experimental_attention_variant.dsa:"
    "DSAIndexerLossLoggingHelper.reduce_loss_in_tracker": "losses that are logged",
    "core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics": "losses that are logged",
    "core.transformer.multi_token_prediction:MTPLossLoggingHelper.reduce_metrics_in_tracker": (
        "losses that are logged"
    ),
    "core.utils:check_param_hashes_across_dp_replicas": "test",
    "core.utils:StragglerDetector._check_toggle": "times",
    "core.utils:StragglerDetector._min_max": "times",
    f"{_TRAINING}:consume_seqlen_stats_in_iteration": "operations of a step",
    f"{_TRAINING}:evaluate_and_print_results": "whether it was evaluated",
    f"{_TRAINING}:pretrain": "time of the start",
    "training.gpu_sniff_test:_gather_and_check": "test",
    "training.gpu_sniff_test:_gather_hostnames": "test",
    "training.utils.common_utils:average_losses_across_data_parallel_group": "loss of old scripts",
}
_REFUSED = {
    "core.optimizer.qk_clip:clip_qk": Refusal(
        attributes=("qk_clip",),
        flag="--qk-clip",
        reason="it scales weights by the largest logit of one replica",
    ),
    "core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count": Refusal(
        attributes=("moe_router_load_balancing_type",),
        flag="--moe-router-load-balancing-type",
        reason="it counts tokens of one replica; use aux_loss or seq_aux_loss",
        refused=("global_aux_loss",),
    ),
    "core.transformer.moe.paged_stash:PagedStashRunner.check_moe_overflow": Refusal(
        attributes=("moe_paged_stash",),
        flag="--moe-paged-stash",
        reason="a replica cannot make a step again by itself",
    ),
    f"{_TRAINING}:build_train_valid_test_data_iterators": Refusal(
        attributes=("full_validation",),
        flag="--full-validation",
        reason="replicas would evaluate different numbers of batches",
    ),
}


def collectives() -> Iterator[Collective]:
    """Yield all collectives of this list."""
    for over, reasons in (
        (Over.CONTINUED, _CONTINUED),
        (Over.ALIKE, _ALIKE),
        (Over.MOVED, _MOVED),
        (Over.REPORTED, _REPORTED),
    ):
        for where, why in reasons.items():
            yield Collective(where=where, over=over, why=why)
    for where, refusal in _REFUSED.items():
        yield Collective(where=where, over=Over.REFUSED, why=refusal.reason, refusal=refusal)


def refusals() -> Iterator[Refusal]:
    """Yield the refusals of arguments that lead to unsupported collectives."""
    return (collective.refusal for collective in collectives() if collective.refusal is not None)
