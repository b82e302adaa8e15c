"""The optimizer on the servers: workers push gradients and pull updated parameters.

Servers keep the fp32 parameters and the moments; a worker keeps only parameters and gradients. See
docs/use/server-optimizer.md.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from byteps.torch import ops, session, wire
from byteps.torch.names import release
from byteps.torch.operations import Group, ranks_of
from byteps.torch.server_bucket import ServerBucket, make_buckets
from byteps.torch.server_tensor import rule_of
from byteps.torch.session import BytePSError
from byteps.torch.step_machine import Speculation, StepMachine, clip_scale
from byteps.torch.wire import WireType, feedback
from torch.amp.grad_scaler import OptState

_logger = logging.getLogger(__name__)

# GradScaler's other protocol lets ranks choose different scales, so the one that torch deprecates
# is used.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)

_live: weakref.WeakValueDictionary[tuple[int, str], ServerOptimizer] = weakref.WeakValueDictionary()
"""Optimizers that this process uses, by job and name. Two optimizers of the same name would collide
on this rank, which is in the groups of both."""


_HELD = "worker_param"
"""Key in a saved state of a parameter's value on the workers. The state has it if the parameter is
pulled as differences."""


def _blocks_of(wire_dtype: str | WireType | None) -> WireType | None:
    if wire_dtype is None:
        return None
    form = wire.of(torch.float32, wire_dtype)
    if not form.is_block:
        raise ValueError(
            f"a ServerOptimizer takes no wire_dtype={wire_dtype}: give 'int8' or 'int4', or leave "
            "wire_dtype out to send gradients and parameters in the type of the parameters"
        )
    return form


class ServerOptimizer(torch.optim.Optimizer):
    """Sums gradients over a group of workers, and updates the parameters, on the servers.

    It replaces the torch optimizer that it is made from: give this object to learning-rate
    schedulers, and call its `step`, `zero_grad` and `state_dict`. Each step uses the current
    learning rate and weight decay of the parameter groups; their other options must not change.

    The parameters and their gradients become views of a few flat tensors. Parameters that need no
    gradient are left out; if one needs a gradient later, `step` raises. A parameter without a
    gradient since `zero_grad` is updated with a gradient of zero, where torch would skip it.

    `step` and `load_state_dict` are collective: every member of the group calls them, or all call
    ``torch.amp.GradScaler.step`` with this object. In the latter case, if a gradient of any member
    is not finite, all members skip the step and lower the scale.

    Args:
        optimizer: a torch.optim.AdamW or torch.optim.SGD that has made no step. Its parameters are
            fp32, bf16 or fp16, contiguous, on the CPU or on GPUs. All members get the parameters of
            the group's lowest rank.
        name: the same on all members. Optimizers whose groups have a common rank need different
            names, because servers look up state by name. A name is free again once its optimizer is
            closed or collected on every member.
        group: the ranks that share the parameters, or their ProcessGroup; None for all workers.
        average: whether to divide the summed gradients by the size of the group.
        max_norm: largest norm of all summed gradients. If the norm is larger, gradients are scaled
            down to it. A step whose norm is not finite is skipped. None: no clipping, no skipping.
        clip: used with max_norm; both values give the same bits. "wait": parameters are pulled when
            the norm is known. "speculate": parameters are pulled as if nothing were clipped, into
            the gradients' memory, while later gradients are still pushed. They are used when the
            norm is known, or pulled again if gradients are clipped. After a step, gradients are 0.
            Servers also keep a step's gradients: 2 bytes per bf16 parameter, 4 per fp32 parameter.
        bucket_bytes: largest size of a flat tensor. A larger parameter gets a flat tensor of its
            own.
        wire_dtype: "int8" or "int4", or `byteps.torch.wire.int8(feedback=True)`: gradients travel
            in blocks of 8 or 4 bits per value, and parameters are pulled as 8-bit differences to
            the workers' values, which servers keep. Parameters of fewer than two dimensions, or of
            less than `keep_bytes`, travel in their own type. None: all parameters do.
        keep_bytes: see wire_dtype. None: 64 KiB.

    Raises:
        BytePSError: members disagree, or a server has too little memory: the text has the sizes.
        ValueError: the optimizer has an unsupported option; the text names it. Or, on any member,
            another ServerOptimizer has the name or one of the parameters: then all members raise.
    """

    _step_supports_amp_scaling = True
    """torch's GradScaler calls `step` even if this rank has found infinities."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "optimizer",
        group: Group = None,
        average: bool = True,
        max_norm: float | None = None,
        clip: str = "speculate",
        bucket_bytes: int = 256 << 20,
        wire_dtype: str | WireType | None = None,
        keep_bytes: int | None = None,
    ) -> None:
        if not name:
            raise ValueError("a ServerOptimizer needs a name, the same on all workers")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {max_norm}")
        form = _blocks_of(wire_dtype)
        if optimizer.state:
            raise ValueError("the optimizer has made steps: give a new one, then load_state_dict")
        self._speculation = Speculation(clip, useful=max_norm is not None)
        self._rule = rule_of(optimizer)
        self._buckets: list[ServerBucket] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.max_norm = max_norm
        self.last_norm: float | None = None
        """Norm of the last step's summed gradients before clipping. None without max_norm and
        GradScaler."""
        self.skipped_steps = 0
        """Number of steps skipped because gradients were not finite."""
        self._is_closed = False
        self._name = name
        self._ranks = ranks_of(group) or list(range(session.size()))
        self._demand_free()
        made = make_buckets(
            self.param_groups,
            self._rule,
            name=name,
            ranks=self._ranks,
            average=average,
            most_bytes=bucket_bytes,
            speculative=self._speculation.is_on,
            form=form,
            keep_bytes=keep_bytes,
        )
        self._buckets = [bucket for bucket, _ in made]
        self._gradients = [gradients for _, gradients in made]
        everybody = [parameter for group in self.param_groups for parameter in group["params"]]
        served = {placed.parameter for bucket in self._buckets for placed in bucket.places}
        self._indices = {p: index for index, p in enumerate(everybody) if p in served}
        """Index of each parameter that servers keep, among all parameters of the optimizer."""
        self._machine = StepMachine(self._buckets, self._rule, self._speculation, name=f"'{name}'")
        for bucket in self._buckets:
            if bucket.is_first:
                bucket.load_parameters()
        self._pull_parameters()
        _live[session.number(), name] = self

    def _demand_free(self) -> None:
        """Raise ValueError if the name or a parameter is in use on any member. Members ask each
        other, because they collect garbage at different times."""
        if any(self._taken()):
            gc.collect()
        named, shared = self._sums(self._taken(), "holders")
        if named:
            raise ValueError(
                f"another ServerOptimizer named {self._name!r} is in use on {int(named)} of this "
                f"group's {len(self._ranks)} ranks, and servers would keep both in one state: pass "
                "name=... with a name of its own for each optimizer, or close() the other one"
            )
        if shared:
            raise ValueError(
                f"another ServerOptimizer has some of the parameters of {self._name!r} on "
                f"{int(shared)} of this group's {len(self._ranks)} ranks, and each step of one "
                "would undo those of the other: give each parameter to one optimizer, or close() "
                "the other one"
            )

    def _taken(self) -> tuple[bool, bool]:
        """Return whether another optimizer of this process has the same name, and whether another
        one has one of the parameters."""
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        job = session.number()
        shared = any(
            id(parameter) in own
            for (number, _), other in list(_live.items())
            if number == job
            for parameter in other._indices
        )
        return (job, self._name) in _live, shared

    def close(self) -> None:
        """Release the name and the servers' state. Another optimizer can then have the same
        parameters. Every member calls this.

        `step`, `state_dict` and `load_state_dict` raise afterwards. Does nothing if closed already.
        The parameters keep their values.
        """
        self._is_closed = True
        for bucket in self._buckets:
            bucket.close()
        key = session.number(), self._name
        if _live.get(key) is self:
            del _live[key]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: groups are fixed once they are declared to the servers."""
        if self._buckets:
            raise ValueError(
                "the parameters of a ServerOptimizer are declared once, when it is made"
            )
        super().add_param_group(param_group)

    # torch's overloads return a loss only with a closure. One signature cannot say that.
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scaler: Any = None
    ) -> float | None:
        """Push the gradients and return when the updated parameters are there.

        On a GPU the parameters are there for work that is queued on the current stream from now on.

        Args:
            closure: computes gradients and loss anew; the loss is returned.
            grad_scaler: as ``GradScaler.step`` passes it, on all members or on none.

        Raises:
            BytePSError: a member or a server was lost, or members ask for different steps. Some
                servers may have made this step and others not, so only load_state_dict makes the
                parameters whole.
            ValueError: an option of a parameter group that is fixed has changed; a parameter needs
                a gradient but needed none when this object was made; or a scaled gradient is fp16,
                which torch refuses.
        """
        self._demand_usable()
        if grad_scaler is None and getattr(self, "found_inf", None) is not None:
            raise BytePSError(
                f"'{self._name}': this torch's GradScaler does not pass itself to step(), so ranks "
                "cannot agree on a scale. Scale the loss by a fixed factor, or use bf16"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._machine.demand_same_rule(self.param_groups)
        self._demand_served()
        infinities = {} if grad_scaler is None else self._unscale(grad_scaler)
        for gradients in self._gradients:
            gradients.collect()
        if any(infinity.item() for infinity in infinities.values()):
            # A NaN makes the norm NaN on all members, even if this rank's gradients have changed
            # since they were checked.
            self._gradients[0].tensor[0] = math.nan
        with self._machine.failing():
            is_skipped = self._step(asks_norm=grad_scaler is not None)
        for infinity in infinities.values():
            infinity.fill_(float(is_skipped))
        return loss

    def _unscale(self, grad_scaler: Any) -> dict[torch.device, torch.Tensor]:
        """Divide the gradients by the scale, unless that was done. Return the tensors in which the
        scaler later finds whether gradients were finite."""
        if grad_scaler._per_optimizer_states[id(self)]["stage"] is OptState.READY:
            grad_scaler.unscale_(self)
        return grad_scaler._found_inf_per_device(self)

    def _demand_served(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter.numel() and parameter not in self._indices:
                    raise ValueError(
                        f"'{self._name}': parameter {index} of group {number} needs a gradient "
                        "now, but not when this optimizer was made, so servers do not update it: "
                        "close() this optimizer, and make another one of all parameters"
                    )

    def _demand_usable(self) -> None:
        self._demand_open()
        self._machine.demand_no_failure()

    def _demand_open(self) -> None:
        if self._is_closed:
            raise BytePSError(f"'{self._name}' was closed: make another ServerOptimizer")

    def _step(self, *, asks_norm: bool) -> bool:
        """Make the step; return whether all members skipped it."""
        if self.max_norm is None and not asks_norm:
            self._machine.update(self.param_groups)
            return False
        self._machine.push(self.param_groups)
        # fsum rounds only once, so all members get the same bits, even on different CPUs.
        norm = math.sqrt(math.fsum(part for b in self._buckets for part in b.squares))
        is_finite = math.isfinite(norm)
        scale = 1.0 if self.max_norm is None else clip_scale(norm, self.max_norm)
        self._machine.finish(scale=scale, skip=not is_finite)
        self.last_norm = norm
        self.skipped_steps += not is_finite
        if not is_finite:
            feedback.drop()  # These losses belong to gradients of a skipped step.
        advice = self._speculation.advice()
        if advice is not None and self._is_lowest():
            _logger.warning("'%s': %s", self._name, advice)
        if self._speculation.is_on:
            for gradients in self._gradients:
                gradients.tensor.zero_()
        return not is_finite

    @property
    def steps(self) -> int:
        """Number of steps made."""
        return self._machine.steps

    @property
    def tried_steps(self) -> int:
        """Number of steps whose parameters were pulled before the norm was known."""
        return self._speculation.tried

    @property
    def redone_steps(self) -> int:
        """Number of those steps whose gradients were then clipped, so that their parameters were
        pulled again."""
        return self._speculation.redone

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. They stay allocated, even with `set_to_none`."""
        del set_to_none
        for gradients in self._gradients:
            gradients.zero()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of the torch optimizer, read from the servers, on the CPU.

        torch's optimizer can load this state, and `load_state_dict` can load torch's. bf16
        parameters also have "master_param", their fp32 values. If gradients travel in few bits,
        parameters also have "worker_param", their values on the workers, to which the next step
        adds. Each rank saves its rounding losses by `byteps.torch.feedback_state`, and loads them
        after this state. Without them, every rank calls `byteps.torch.wire.feedback.drop` when it
        saves, so that this job and a restarted one make the same steps. Not collective: the rank
        that saves calls it, while no rank is in `step`.

        Raises:
            BytePSError: a server is lost, or a step failed, so that servers may have different
                steps.
        """
        self._demand_usable()
        saved = super().state_dict()
        for bucket in self._buckets:
            saved["state"].update(self._state_of(bucket))
        return saved

    def _state_of(self, bucket: ServerBucket) -> dict[int, dict[str, torch.Tensor]]:
        """Return the state of each parameter of a bucket, by its index."""
        flat = {
            name: bucket.read(slot, 0, bucket.numel)
            for slot, name in enumerate(self._rule.slot_names)
        }
        if bucket.held_slot > 0:
            flat[_HELD] = bucket.read(bucket.held_slot, 0, bucket.numel)
        state_by_index = {}
        for placed in bucket.places:
            state = {
                name: placed.of(values).clone()
                for name, values in flat.items()
                if name != "master_param"
                or placed.parameter.dtype != torch.float32
                or bucket.held_slot > 0
            }
            index = self._indices[placed.parameter]
            state_by_index[index] = state | {"step": torch.tensor(float(self.steps))}
        return state_by_index

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state into the servers; all members pass the same state.

        fp32 parameters are taken from the model of the group's lowest rank, so load the model
        first. bf16 parameters are taken from "master_param", if it was saved.

        Raises:
            BytePSError: a server refuses or is lost.
            ValueError: the state has other parameters or options, or different numbers of steps.
                Nothing has changed.
        """
        self._demand_open()
        saved_groups = state_dict["param_groups"]
        sizes = [
            [len(g["params"]) for g in param_groups]
            for param_groups in (saved_groups, self.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has groups of {sizes[0]} parameters, not {sizes[1]}")
        groups = [
            group | {key: value for key, value in theirs.items() if key != "params"}
            for group, theirs in zip(self.param_groups, saved_groups, strict=True)
        ]
        state = state_dict["state"]
        # All ranks check this, so that no rank waits for one that refuses.
        self._machine.demand_same_rule(groups)
        self._demand_same_shapes(state)
        counts = {float(state.get(index, {}).get("step", 0)) for index in self._indices.values()}
        if len(counts) > 1:
            raise ValueError(f"parameters made different numbers of steps: {sorted(counts)}")
        for group, theirs in zip(self.param_groups, groups, strict=True):
            group.update(theirs)
        self._machine.begin_load()
        for bucket in self._buckets:
            if bucket.is_first:
                self._load(bucket, state)
        self._pull_parameters()
        feedback.drop()
        # torch saves no step count for SGD. The count matters only to tell the first step from
        # later ones.
        self._machine.end_load(int(max(counts, default=0.0)))

    def _load(self, bucket: ServerBucket, state: dict[int, dict[str, Any]]) -> None:
        for slot, name in enumerate(self._rule.slot_names):
            values = {}
            for _, parameter in bucket.places:
                saved = state.get(self._indices[parameter], {}).get(name)
                if saved is not None:
                    values[parameter] = saved.detach()
                elif slot == 0:
                    values[parameter] = parameter.detach()
            if values:
                bucket.load(slot, values)
        held = {
            parameter: state[self._indices[parameter]][_HELD].detach()
            for _, parameter in bucket.places
            if _HELD in state.get(self._indices[parameter], {})
        }
        if bucket.held_slot > 0 and len(held) == len(bucket.places):
            bucket.load(bucket.held_slot, held)

    def _demand_same_shapes(self, state: dict[int, dict[str, Any]]) -> None:
        for parameter, index in self._indices.items():
            for name in (*self._rule.slot_names, _HELD):
                saved = state.get(index, {}).get(name)
                if saved is not None and saved.shape != parameter.shape:
                    raise ValueError(
                        f"{name} of parameter {index} has the shape {tuple(saved.shape)}, "
                        f"the parameter {tuple(parameter.shape)}"
                    )

    def _is_lowest(self) -> bool:
        return session.rank() == self._ranks[0]

    def _pull_parameters(self) -> None:
        """Pull parameters that the lowest rank has loaded."""
        self._sums([0.0], "loaded")
        for bucket in self._buckets:
            bucket.pull_parameters()

    def _sums(self, values: Sequence[float], what: str) -> list[float]:
        """Sum values over the group. The name of the sum has a hash of the group, because another
        group may have an optimizer of the same name."""
        ranks = ",".join(map(str, self._ranks)).encode()
        group = hashlib.blake2s(ranks, digest_size=6).hexdigest()
        totals = torch.tensor([float(value) for value in values])
        name = f"{self._name}/{what}/{group}"
        ops.push_pull_inplace(totals, average=False, name=name, group=self._ranks)
        release([name], group=self._ranks)
        return totals.tolist()
