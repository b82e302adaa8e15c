# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Sums data-parallel gradients through BytePS parameter servers.

With ``--use-dpu-reduce``, BytePS sums the buckets of ``DistributedDataParallel`` (ranks push to
servers that add, and pull the sum) if that needs less time on the links than the collectives of
``torch.distributed``. Everything else in Megatron stays the same: buckets and when they are ready,
gradient scaling, and the optimizer's inputs.

Megatron calls this package through the hooks below, each in a line or two. The rule for hooks:
Megatron calls a hook unconditionally, and the hook checks its flag first (``use_dpu_reduce``,
``dpu_optimizer`` or ``dpu_outer``, in ``hooks``). So a flag is tested in a single place, and
without it a hook costs only a call. Two hooks only decide whether another is called: ``reduces``
and ``keeps_optimizer``.

============================  ======================================================
``add_arguments``             the argument parser is being built
``translate_args``            arguments are parsed: switch off what servers do instead of ranks
``translate_config``          a ``DistributedDataParallelConfig`` is used: switch off likewise
``validate_args``             arguments are derived: refuse what is not supported
``validate_ddp_config``       a ``DistributedDataParallelConfig`` is created
``fully_sharded``             a fully sharded wrapper is built: log which sums it keeps
``initialize``                torch.distributed is initialized: start BytePS once
``separate_buffers``          DDP has grouped parameters: move some to separate buffers
``register``                  a ``DistributedDataParallel`` was built: plan its buckets
``reduces``                   a bucket group is ready: does BytePS sum it?
``start_grad_sync``           if so: sum it
``outer_reduction``           shards are ready: sum them over replicas
``outside_graph``             decorator for the recording and replay of a step's CUDA graph
``keeps_optimizer``           an optimizer is being made: do servers keep it?
``make_server_optimizer``     if so: make it
``gradients_will_be_zeroed``  DDP is about to zero its gradients
``add_checkpoint_metadata``   a checkpoint is about to be saved or loaded
``save_feedback``             a checkpoint's state is complete, before it is saved
``ask_for_feedback``          a state is described, before it is loaded
``load_feedback``             a state was loaded
``step_ended``                the optimizer has made or skipped its step
``write_metrics``             TensorBoard and wandb write an iteration's values
``replicas_of``               the data-parallel size is derived: count the replicas
``model_is_built``            model and optimizer are built, datasets are not
``training_begins``           datasets are built too
``serialize_dataset_builds``  decorator for functions that build datasets
``sum_over_replicas``         data-parallel ranks have summed a few numbers
``agreed_norm``               the gradient norm is known
``wanted_by_any``             does a rank of any replica want to end the job?
``iteration_ended``           an iteration has ended: a replica may join
``saved_once``                decorator for the function that saves a checkpoint
``of_outer_parameters``       decorator for the function that evaluates the model
``shutdown``                  training has ended
============================  ======================================================

=====================  ============================================================
``hooks``              the hooks above
``arguments``          flags, and replacements of removed flags
``translations``       switches off a recipe's settings for work that servers do
``refusals``           unsupported settings; ``replica_refusals``: those of replicas
``job``                hosts and links of the job, and its replicas
``plan``               gives each bucket of a model its operation, and declares it
``bucket_op``          the operation of a bucket: name, node-first sums, and the part that
                       stays bf16 if the rest travels in few bits
``decisions``          the route of each bucket group, and messages at start-up
``advice``             text of these messages: the forecast and the table of routes
``check``              the forecast for arguments or a recipe of Megatron-Bridge;
                       ``parameters`` reads sizes from them
``sums``               sums in flight; steps in a CUDA graph; sums over the replicas of a
                       sharded model
``replica_changes``    replicas that leave, are lost, or come back
``replica_state``      state that a joining replica takes from another
``saves``              checkpoints that one replica saves for all
``lost_samples``       samples that were not trained on
``data_slots``         a rank's part of each batch, counted over all replicas
``outer_settings``     when and how outer steps are made
``outer_steps``        these exchanges, and steps that a slow replica skips
``step_log``           metrics of a step, for TensorBoard and wandb
``summed_later``       parameters in separate buffers: matrices that ranks update (Muon),
                       and gradients that change after the backward pass
``server_buckets``     with ``--dpu-optimizer``: buckets that servers update, and their norms
``server_optimizer``   the optimizer on the servers; ``server_making`` makes it
``forward_overlap``    pulls parameters from the servers during the next forward pass
``server_checkpoint``  checkpoints of the optimizer on the servers
``feedback_state``     checkpoints of rounding losses
``quorum``             how long replicas wait for each other
``kept_bf16``          gradients that stay bf16 if others travel in few bits
``bytepslib``          imports BytePS when it is first needed
=====================  ============================================================
"""

from __future__ import annotations

from .arguments import add_arguments
from .bucket_op import BucketOp, bucket_name, group_name
from .hooks import (
    add_checkpoint_metadata,
    agreed_norm,
    ask_for_feedback,
    gradients_will_be_zeroed,
    initialize,
    iteration_ended,
    keeps_optimizer,
    leaves_out_step,
    make_server_optimizer,
    mean_over_replicas,
    model_is_built,
    of_outer_parameters,
    outer_reduction,
    outside_graph,
    reduces,
    register,
    replicas_of,
    save_feedback,
    saved_once,
    saves_are_written,
    separate_buffers,
    serialize_dataset_builds,
    shutdown,
    start_grad_sync,
    state_is_loaded,
    step_ended,
    sum_over_replicas,
    told_to_end,
    training_begins,
    wait_for_parameters,
    wanted_by_any,
    write_metrics,
)
from .refusals import fully_sharded, validate_args, validate_ddp_config
from .sums import GradSyncHandle
from .translations import translate_args, translate_config

__all__ = [
    "BucketOp",
    "GradSyncHandle",
    "add_arguments",
    "add_checkpoint_metadata",
    "agreed_norm",
    "ask_for_feedback",
    "bucket_name",
    "fully_sharded",
    "gradients_will_be_zeroed",
    "group_name",
    "initialize",
    "iteration_ended",
    "keeps_optimizer",
    "leaves_out_step",
    "make_server_optimizer",
    "mean_over_replicas",
    "model_is_built",
    "of_outer_parameters",
    "outer_reduction",
    "outside_graph",
    "reduces",
    "register",
    "replicas_of",
    "save_feedback",
    "saved_once",
    "saves_are_written",
    "separate_buffers",
    "serialize_dataset_builds",
    "shutdown",
    "start_grad_sync",
    "state_is_loaded",
    "step_ended",
    "sum_over_replicas",
    "told_to_end",
    "training_begins",
    "translate_args",
    "translate_config",
    "validate_args",
    "validate_ddp_config",
    "wait_for_parameters",
    "wanted_by_any",
    "write_metrics",
]
