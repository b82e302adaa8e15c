# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Data-parallel gradient sums through BytePS parameter servers.

With ``--use-dpu-reduce`` the buckets of ``DistributedDataParallel`` are summed by BytePS
(push to servers that add, pull the sum back) where that needs less time on the links than the
collectives of ``torch.distributed``. Everything else of Megatron is untouched: which gradients form
a bucket, when a bucket is ready, how gradients are scaled before, and what the optimizer reads
after, stay as they are.

Megatron calls this package at these places, each a hook of a line or two. The rule for hooks:
Megatron calls a hook without a condition, and the hook itself looks at its flag, before anything
else (``use_dpu_reduce`` or ``dpu_optimizer``, in ``hooks``; ``refusals`` are about the flags). So
a flag is tested in one place, and without it a hook costs a call. Two hooks are asked first whether
there is anything to do: ``takes`` and ``keeps_optimizer``.

============================  ======================================================
``add_arguments``             the parser of arguments is made
``translate_args``            the parsed arguments: what servers do, ranks need not
``translate_config``          the same of a ``DistributedDataParallelConfig``
``validate_args``             the arguments are derived: refuse what is not supported
``validate_ddp_config``       a ``DistributedDataParallelConfig`` is made
``fully_sharded``             a fully sharded wrapper is built: say which sums it keeps
``initialize``                torch.distributed is up: start BytePS once
``apart``                     DDP has grouped parameters: which need a buffer of their own?
``register``                  a ``DistributedDataParallel`` was built: plan its buckets
``takes``                     a bucket group is ready: does BytePS sum it?
``start_grad_sync``           it does: sum it
``outer_reduction``           shards are ready: sum them over replicas
``outside_graph``             decorates what records and replays a step as a CUDA graph
``keeps_optimizer``           an optimizer is made: do the servers keep it?
``make_server_optimizer``     they do: make it
``gradients_will_be_zeroed``  DDP is about to zero its gradients
``add_checkpoint_metadata``   a checkpoint is about to be saved or loaded
``save_feedback``             its state is there, to be saved
``ask_for_feedback``          it is described, to be loaded
``load_feedback``             it was loaded
``step_ended``                the optimizer has made its step, or has not
``replicas_of``               the data-parallel size is derived: how many replicas share it?
``model_is_built``            the model and the optimizer are there, and the data are not
``training_begins``           the data are, too
``in_turn``                   decorates what builds datasets
``sum_over_replicas``         data-parallel ranks have summed a few numbers
``agreed_norm``               the norm of the gradients is known
``wanted_by_any``             a rank of this replica wants to end the job, or none does
``between_steps``             an iteration is done: a replica may join
``saves_checkpoint``          a checkpoint is about to be saved: by this replica?
``shutdown``                  training is done
============================  ======================================================

=====================  ============================================================
``hooks``              the above
``arguments``          flags, and what became of those of earlier versions
``translations``       what a recipe asks of ranks that servers do
``refusals``           what cannot be served; ``replica_refusals`` is what replicas cannot
``job``                hosts and links of the job, and the replicas that train one model in it
``plan``               gives each bucket of a model its operation, and tells the servers; from:
``bucket_op``          what the operation of a bucket is: its name, its sums inside hosts first,
                       and what stays bf16 where others travel in few bits
``decisions``          the route of each bucket group, and what a job that starts is told
``advice``             the forecast that a job is told, and the table of its routes, in words
``check``              that, for arguments on the command line, or a recipe of Megatron-Bridge;
                       ``parameters`` reads sizes from them
``sums``               the sums in flight; of steps that are one CUDA graph, and over the replicas
                       of a sharded model
``replica_changes``    replicas that leave, that are lost, and that come back
``replica_state``      what one that comes back takes from another one
``saves``              checkpoints that one of them saves for all
``lost_samples``       what was not trained on
``data_slots``         which part of each batch a rank of them reads
``outer_settings``     when and how they exchange parameters
``outer_steps``        their exchanges, once in many steps, and steps that a slow one leaves out
``summed_later``       parameters apart: matrices that stay on the ranks, with Muon, and gradients
                       that change after the backward pass
``server_buckets``     with ``--dpu-optimizer``: buckets that servers update, and their norms
``server_optimizer``   the optimizer of those; ``server_making`` makes it
``forward_overlap``    its parameters, which come down while the next forward pass runs
``server_checkpoint``  what is saved of it
``feedback_state``     what is saved of what rounding has lost
``quorum``             how long replicas wait for others
``kept_bf16``          which gradients stay bf16 where others travel in few bits
``bytepslib``          BytePS, imported when it is first needed
=====================  ============================================================
"""

from __future__ import annotations

from .arguments import add_arguments
from .bucket_op import BucketOp, bucket_name, group_name
from .hooks import (
    add_checkpoint_metadata,
    agreed_norm,
    apart,
    ask_for_feedback,
    between_steps,
    gradients_will_be_zeroed,
    in_turn,
    initialize,
    keeps_optimizer,
    leaves_out_step,
    make_server_optimizer,
    mean_over_replicas,
    model_is_built,
    outer_reduction,
    outside_graph,
    register,
    replicas_of,
    save_feedback,
    saved_once,
    saves_are_written,
    shutdown,
    start_grad_sync,
    state_is_loaded,
    step_ended,
    sum_over_replicas,
    takes,
    told_to_end,
    training_begins,
    wait_for_parameters,
    wanted_by_any,
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
    "apart",
    "ask_for_feedback",
    "between_steps",
    "bucket_name",
    "fully_sharded",
    "gradients_will_be_zeroed",
    "group_name",
    "in_turn",
    "initialize",
    "keeps_optimizer",
    "leaves_out_step",
    "make_server_optimizer",
    "mean_over_replicas",
    "model_is_built",
    "outer_reduction",
    "outside_graph",
    "register",
    "replicas_of",
    "save_feedback",
    "saved_once",
    "saves_are_written",
    "shutdown",
    "start_grad_sync",
    "state_is_loaded",
    "step_ended",
    "sum_over_replicas",
    "takes",
    "told_to_end",
    "training_begins",
    "translate_args",
    "translate_config",
    "validate_args",
    "validate_ddp_config",
    "wait_for_parameters",
    "wanted_by_any",
]
