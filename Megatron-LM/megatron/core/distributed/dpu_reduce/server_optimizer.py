# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Optimizer on the servers (``--dpu-optimizer``).

Servers keep the fp32 parameters and the moments. A rank holds only parameters and gradients.
Megatron sums gradients over tensor- and pipeline-parallel ranks, and scales them, before the
data-parallel sum here. All these operations are linear, so their order does not matter.
:meth:`ServerOptimizer.step` sends the gradients after them. With ``--overlap-grad-reduce``, a
bucket that they do not change is sent as soon as the backward pass has computed it.

Servers answer with parameters that are right if nothing is clipped. These are pulled into the
gradients' memory while later gradients are pushed, and are used when the norm is known.

With ``--overlap-param-gather`` a step returns earlier: each module waits for its own parameters
when its forward pass begins, as with Megatron's distributed optimizer. See :mod:`.forward_overlap`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from ...optimizer.optimizer import MegatronOptimizer
from ...tensor_parallel import param_is_not_tensor_parallel_duplicate
from ...transformer.module import param_is_not_shared
from ...utils import get_model_config, log_single_rank
from . import bytepslib, forward_overlap, replica_state, server_buckets, server_checkpoint
from .server_buckets import Norms, make_server_buckets, norm_group_of, norms_of
from .summed_later import SummedLater

if TYPE_CHECKING:
    from byteps.torch.server_bucket import ServerBucket

    from ...optimizer.optimizer_config import OptimizerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBuffer
    from .server_making import RanksPart

_logger = logging.getLogger(__name__)

_Group = torch.distributed.ProcessGroup


def _container(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a torch optimizer that only holds the groups and options, without state."""
    common = {"lr": config.lr or 0.0, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.sgd_momentum, **common)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, **common)


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Return Megatron's gradient scaler for this config; None if the loss is not scaled."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


class ServerOptimizer(MegatronOptimizer):
    """Pushes gradients to the servers, which update the parameters, and pulls the new parameters.

    ``step`` and ``load_state_dict`` are collective over all ranks of the job. One optimizer has
    both dense and expert parameters. Their buckets use different data-parallel groups.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        param_groups: list[dict[str, Any]],
        *,
        dense_group: _Group,
        expert_group: _Group | None,
        tp_group: _Group,
        expert_tp_group: _Group,
        pp_group: _Group,
        ranks: RanksPart | None = None,
    ) -> None:
        """See :func:`.server_making.make_server_optimizer`.

        Args:
            config: options of the update.
            model_chunks: model chunks of this rank, already planned.
            param_groups: groups of all parameters that servers update. Every rank has the same
                groups in the same order.
            dense_group: the ranks that hold the parts of one replica of the dense parameters.
            expert_group: the ranks that hold the parts of one replica of the expert parameters;
                None if there are no experts.
            tp_group, expert_tp_group: the tensor-parallel ranks of dense and expert parameters.
            pp_group: the pipeline's ranks.
            ranks: part of each step that ranks make, if any.
        """
        super().__init__(_container(config, param_groups), config)
        self.model_chunks = list(model_chunks)
        self.grad_stats_parallel_group = dense_group
        self.tp_group, self.expert_tp_group = tp_group, expert_tp_group
        self._expert_group = expert_group
        self._ranks = ranks
        self._rule = bytepslib.server_tensor.rule_of(self.optimizer)
        self.grad_scaler = _grad_scaler(config)
        self._unscale = 1.0
        """Factor for the gradients that undoes loss scaling."""
        self._looks = (
            config.clip_grad > 0.0
            or math.isfinite(config.grad_norm_skip_threshold)
            or self.grad_scaler is not None
            or ranks is not None
        )
        """Whether a step needs the gradients' norm."""
        self._counts_zeros = config.log_num_zeros_in_grad
        self._overlaps = any(chunk.ddp_config.overlap_grad_reduce for chunk in model_chunks)
        overlaps_forward = forward_overlap.is_wanted(model_chunks)
        self._speculation = bytepslib.step_machine.Speculation(
            forward_overlap.clip(overlaps=overlaps_forward),
            useful=self._looks or self._overlaps or self._counts_zeros,
        )
        self._loaded = False
        """Whether the servers have parameters."""
        # A rank whose parameters are all frozen has no bucket, but takes part in the norm.
        self._device = next(p.device for chunk in model_chunks for p in chunk.parameters())
        self._dense: list[ServerBucket] = []
        self._expert: list[ServerBucket] = []
        self._early: set[ServerBucket] = set()
        """Buckets that are sent during the backward pass."""
        for group, kind in ((dense_group, "buffers"), (expert_group, "expert_parallel_buffers")):
            if group is not None:
                server_buckets.keep_copies_alike(model_chunks, kind, group)
        summed_later = SummedLater(get_model_config(model_chunks[0]), tp_group, pp_group)
        for chunk in model_chunks:
            self._dense += self._take_buckets(chunk, chunk.buffers, summed_later)
            self._expert += self._take_buckets(chunk, chunk.expert_parallel_buffers, summed_later)
        self._buckets = self._dense + self._expert
        order = forward_overlap.order(model_chunks, self._buckets) if overlaps_forward else ()
        self._machine = bytepslib.step_machine.StepMachine(
            self._buckets,
            self._rule,
            self._speculation,
            name="--dpu-optimizer",
            forward_order=order,
        )
        if order:
            forward_overlap.hook(model_chunks, order, self._machine)
        self.is_stub_optimizer = not self._buckets
        self._norm_of = {bucket: norm_group_of(bucket) for bucket in self._buckets}
        self._scale = torch.ones(1, dtype=torch.float32, device=self._device)
        self._note_scale()

    def _take_buckets(
        self,
        chunk: DistributedDataParallel,
        buffers: Sequence[_ParamAndGradBuffer],
        summed_later: SummedLater,
    ) -> list[ServerBucket]:
        """Declare the buckets of a model chunk. Give Megatron's buckets their
        ``dpu_server_buckets`` and this optimizer."""
        # Copies of a parameter have the same gradients, and must keep the same bits.
        has_copies = any(
            group is not None and group.size() > 1
            for group in (self.grad_stats_parallel_group, self._expert_group)
        )
        checks = bytepslib.figures.setting("BYTEPS_CHECK_GRADIENTS", bool)
        names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in chunk.named_parameters()
        }
        group_of, taken = self._group_of(), []
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            if bucket.grad_data.numel() == 0 or not bucket.dpu_reduce_op.updated:
                continue
            made = make_server_buckets(
                bucket,
                average=chunk.ddp_config.average_in_collective,
                rule=self._rule,
                group_of=group_of,
                counts=self._counts,
                in_order=has_copies or bucket.dpu_reduce_op.in_order,
                speculative=self._speculation.is_on,
                counts_zeros=self._counts_zeros,
                checked=names if checks else None,
            )
            bucket.dpu_server_buckets, bucket.dpu_optimizer = made, self
            taken += made
            if chunk.ddp_config.overlap_grad_reduce and not any(
                summed_later(parameter, names[parameter]) for parameter in bucket.params_list
            ):
                self._early.update(made)
        for buffer in buffers:
            # verl moves the parameters of a buffer to the host and back through this attribute, as
            # with Megatron's distributed optimizer. It covers only the first bucket. A buffer has
            # only one, unless gradients are sent during the backward pass.
            for server_bucket in getattr(
                next(iter(buffer.buckets), None), "dpu_server_buckets", []
            )[:1]:
                buffer.param_data = server_bucket.parameters
        return taken

    def _group_of(self) -> dict[torch.Tensor, int]:
        """Return the index of each parameter's group."""
        return {
            parameter: index
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }

    def _counts(self, parameter: torch.Tensor) -> bool:
        """Return whether Megatron's norm counts this rank's copy of a parameter."""
        groups = {"tp_group": self.tp_group, "expert_tp_group": self.expert_tp_group}
        # Megatron 0.18 asks the dense group for experts, too.
        accepted = inspect.signature(param_is_not_tensor_parallel_duplicate).parameters
        return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
            parameter, **{name: group for name, group in groups.items() if name in accepted}
        )

    # ------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Push the gradients. Return when the updated parameters are there. With
        ``dpu_optimizer_overlap`` they may still be in flight.

        Returns:
            whether parameters were updated (false if a norm is not finite or the main norm is above
            ``grad_norm_skip_threshold``), the norm, and the number of gradients that are 0. Without
            clipping and loss scaling the norm is None, and nothing is checked. Zeros are counted if
            the config asks for it. With loss scaling, gradients that are not finite have no norm.

        Raises:
            byteps.torch.BytePSError: a rank or a server was lost. The parameters may be those of
                this step on some servers and of the last one on others.
            RuntimeError: another rank of this host was lost, with the same effect.
            ValueError: a fixed option of a parameter group has changed.
        """
        self._machine.demand_no_failure()
        self._machine.demand_same_rule(self.optimizer.param_groups)
        with self._machine.failing():
            return self._step()

    def _step(self) -> tuple[bool, float | None, int | None]:
        groups = self.optimizer.param_groups
        if not self._loaded:
            self._load_parameters()
        if not self._looks and not self._overlaps and not self._counts_zeros:
            with self._timer("optimizer-inner-step"):
                self._machine.update(groups)
            return True, None, None
        with self._timer("optimizer-clip-main-grad"):
            self._machine.push(groups, self._unscale)
            norms = self._norms()
            if self._ranks is not None:
                norms = self._ranks.norms(norms)
        if self.grad_scaler is not None:
            self.grad_scaler.update(not norms.are_finite)
            self._note_scale()
        self.grad_norms_by_group = {
            name: norm for name, norm in norms.own.items() if name in self._norm_of.values()
        }
        skip = not norms.are_finite or norms.main > self.config.grad_norm_skip_threshold
        if self._ranks is not None and not skip:
            self._ranks.update(norms)
        with self._timer("optimizer-inner-step"):
            self._machine.finish(
                scale=self._clip(norms.main),
                skip=skip,
                own={
                    bucket: self._clip(norms.own[name])
                    for bucket, name in self._norm_of.items()
                    if name is not None
                },
            )
        if (advice := self._speculation.advice()) is not None:
            log_single_rank(_logger, logging.WARNING, f"--dpu-optimizer: {advice}")
        if self.grad_scaler is not None and not norms.are_finite:
            return False, None, None
        return (
            not skip,
            norms.main if self._looks else None,
            norms.zeros if self._counts_zeros else None,
        )

    def _clip(self, norm: float) -> float:
        """Return the clipping factor for unscaled gradients of this norm."""
        limit = self.config.clip_grad
        return bytepslib.step_machine.clip_scale(norm, limit) if limit > 0.0 else 1.0

    def _note_scale(self) -> None:
        """Read the loss scale, which may have changed. Reading it waits for the device, as the step
        does anyway. The backward pass must not wait, so it uses the value that was read here."""
        if self.grad_scaler is not None:
            self._unscale = self.grad_scaler.inv_scale.item()

    def bucket_is_ready(self, bucket: ServerBucket) -> None:
        """Push the bucket's gradients, which the backward pass has computed. Leave them if Megatron
        will still sum them over other ranks or scale them.

        Parameters are pulled into the memory of these gradients, where an all-reduce would put its
        sum. The model's parameters change only in the step.
        """
        if bucket not in self._early:
            return
        self._machine.demand_no_failure()
        with self._machine.failing():
            if not self._loaded:
                self._load_parameters()
            self._machine.push_early(bucket, self.optimizer.param_groups, self._unscale)

    def _norms(self) -> Norms:
        """Return the norms of all gradients of the model."""
        kinds = [(self._dense, self.grad_stats_parallel_group)]
        if self._expert_group is not None:
            kinds.append((self._expert, self._expert_group))
        return norms_of(kinds, self._norm_of, self._unscale, self._device)

    def _load_parameters(self) -> None:
        """Load the model's parameters into the servers as the initial state. This needs no barrier,
        because servers update only when all ranks have pushed."""
        for bucket in self._buckets:
            if bucket.is_first:
                bucket.load_parameters()
        replica_state.demand_loaded()
        self._machine.begin_anew()
        self._loaded = True

    @contextmanager
    def _timer(self, name: str) -> Iterator[None]:
        timers = self.config.timers
        if timers is not None:
            timers(name, log_level=1).start(barrier=self.config.barrier_with_L1_time)
        yield
        if timers is not None:
            timers(name).stop()

    # ------------------------------------------------------------------- calls by Megatron

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because DDP zeroes its buffers."""

    def get_loss_scale(self) -> torch.Tensor:
        return self._scale if self.grad_scaler is None else self.grad_scaler.scale

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Start over after the model was loaded without its optimizer. The next step loads the
        model's parameters into the servers."""
        if state_dict is not None:
            raise ValueError(
                "--dpu-optimizer does not work with --load-main-params-from-ckpt: the servers "
                "start from the model's own parameters"
            )
        self._machine.wait_for_parameters()
        for bucket in self._buckets:
            bucket.reread_parameters()
        self._loaded = False

    def prepare_model_params_for_param_sync(self) -> None:
        """Wait for parameters in flight, because they are read next.

        Raises:
            byteps.torch.BytePSError: a server was lost.
        """
        self._machine.wait_for_parameters()

    def prepare_grads(self) -> bool:
        raise NotImplementedError("servers clip and update in one operation: call step() instead")

    def step_with_ready_grads(self) -> bool:
        raise NotImplementedError("servers clip and update in one operation: call step() instead")

    def offload_to_cpu(self) -> None:
        """Do nothing, because ranks have no state."""

    def restore_from_cpu(self) -> None:
        """Do nothing, because ranks have no state."""

    # ------------------------------------------------------------------- replicas

    def begin_with_others(self) -> None:
        """Load the servers' initial state when training begins, because a single replica may save
        it at any time. All ranks of all replicas call this.

        Raises:
            byteps.torch.BytePSError: a server, or the replica that loads the state, was lost.
        """
        if not self._loaded:
            self._load_parameters()

    def served(self) -> set[torch.Tensor]:
        """Return the parameters that servers update."""
        return {placed.parameter for bucket in self._buckets for placed in bucket.places}

    def facts_of_steps(self) -> dict[str, int]:
        """Return the step counts for a joining replica. After this call the servers have the
        parameters of all steps. Raises BytePSError if a server was lost."""
        self._machine.wait_for_parameters()
        for bucket in self._buckets:
            bucket.settle()
        return {"steps": self._machine.steps, "clipped": self._speculation.clipped_in_a_row}

    @torch.no_grad()
    def join(self, facts: dict[str, int]) -> float:
        """Continue from another replica's `facts_of_steps` and the servers' parameters. Return the
        MB that were pulled. All ranks of this replica call this. Raises like `facts_of_steps`."""
        for bucket in self._buckets:
            bucket.pull_parameters()
        self._speculation.go_on(facts["clipped"])
        self._machine.end_load(facts["steps"])
        self._loaded = True
        self._note_scale()
        return sum(bucket.numel for bucket in self._buckets) * torch.float32.itemsize / 1e6

    # ------------------------------------------------------------------- checkpoints

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[Any, Any]:
        """Return the state in the distributed optimizer's format; see :mod:`.server_checkpoint`.

        Raises:
            byteps.torch.BytePSError: a server is lost, or a step failed, so that servers may have
                states of different steps.
            ValueError: the checkpoint to load has another format.
        """
        if is_loading:
            server_checkpoint.check_metadata(metadata)
        else:
            self._machine.demand_no_failure()
            self._machine.wait_for_parameters()
            # Code that saves without Megatron's arguments treats this object like a plain
            # optimizer.
            if metadata is not None:
                server_checkpoint.put_metadata(metadata)
        if not self._loaded and not is_loading:
            self._load_parameters()
            # All ranks read next, but only the first rank of each group has loaded. So the others
            # wait for it. Ranks without buckets take no part.
            ddp = self.model_chunks[0]
            for buckets, group in (
                (self._dense, ddp.dp_cp_group),
                (self._expert, ddp.expt_dp_group),
            ):
                if buckets:
                    torch.distributed.barrier(group=group)
        parts = [
            server_checkpoint.sharded_state(
                buckets,
                groups,
                model_sharded_state_dict,
                slots=self._slots,
                steps=self._machine.steps,
                is_loading=is_loading,
            )
            for buckets, groups in self._kinds()
        ]
        if self.grad_scaler is not None:  # the key under which Megatron's optimizers store it, too
            for part in parts:
                part["grad_scaler"] = self.grad_scaler.state_dict()
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Load a checkpoint's state into the servers, including the model's parameters.

        Raises:
            byteps.torch.BytePSError: a server refuses or is lost.
            ValueError: the state has another format, or different numbers of steps.
        """
        self._machine.begin_load()
        kinds = self._kinds()
        parts = [state_dict] if len(kinds) == 1 else [state_dict[i] for i in range(len(kinds))]
        for (_, groups), part in zip(kinds, parts, strict=True):
            server_checkpoint.take_rates(groups, part)
        steps = {
            server_checkpoint.load(buckets, part, self._slots)
            for (buckets, _), part in zip(kinds, parts, strict=True)
        } - {None}
        if len(steps) > 1:
            raise ValueError(
                f"--dpu-optimizer: parameters made different numbers of steps: {steps}"
            )
        if self.grad_scaler is not None and "grad_scaler" in parts[0]:
            self.grad_scaler.load_state_dict(parts[0]["grad_scaler"])
            self._note_scale()
        for bucket in self._buckets:
            bucket.reread_parameters()
            if bucket.is_first:
                bucket.load_held()
        replica_state.demand_loaded()
        self._loaded = True
        self._machine.end_load((steps or {0}).pop() or 0)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        raise ValueError(
            "--dpu-optimizer saves and loads checkpoints of --ckpt-format torch_dist alone"
        )

    @property
    def _slots(self) -> list[str]:
        """Names of the values that servers keep, as in Megatron's checkpoints."""
        return ["param", *self._rule.slot_names[1:]]

    def _kinds(self) -> list[tuple[list[ServerBucket], list[dict[str, Any]]]]:
        """Return the buckets and the parameter groups of dense parameters, then those of expert
        parameters. Megatron has an optimizer for each of the two kinds."""
        groups = self.optimizer.param_groups
        kinds = [(self._dense, [g for g in groups if not g["is_expert_parallel"]])]
        if self._expert_group is not None:
            kinds.append((self._expert, [g for g in groups if g["is_expert_parallel"]]))
        return kinds
