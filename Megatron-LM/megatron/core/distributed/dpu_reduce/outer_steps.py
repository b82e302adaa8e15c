# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Local steps (``--dpu-outer``): replicas step on their own, and exchange parameters once in many
steps.

A step counts from the start of training, so exchanges are at multiples of the flag's STEPS::

    steps 1 to `after`   gradients are summed; exchanges only fill the outer momentum
    later                each replica steps; exchanges are outer steps
    one job, no replica  gradients are summed in each step; outer steps send nothing
    evaluation           parameters and buffers are those of the last exchange meanwhile
    checkpoint, end      an exchange, if a step was made since the last one

Replicas exchange the fp32 parameters that the inner optimizers step. Each rank exchanges the
parameters that it owns, possibly none. Saved buffers (biases of routers, for example) are averaged
over replicas at the same time. :mod:`byteps.torch.diloco` does the arithmetic. The number of steps
is saved, so that a resumed job exchanges at the same steps as an uninterrupted job.

When ``--dpu-quorum`` replicas have reached an exchange, a slower replica skips its remaining steps.
It reads past the samples of these steps, and exchanges the result of fewer steps. Until the next
exchange it plans as many steps as it had time for. It plans one step more if it had to wait for
longer than a step takes, and from time to time as a trial. So a slow replica stays in the job, and
costs the other replicas little.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import bytepslib, job, lost_samples, outer_settings, quorum

_NAME = "outer/"
_running: OuterSteps | None = None


class OuterSteps:
    """Exchanges of this rank's parameters."""

    def __init__(
        self, args: Namespace, model: Sequence[Any], optimizer: Any, done: int, joins: bool = False
    ) -> None:
        """`done`: number of steps made before. `joins`: whether this replica copies the state of
        another one, so that parameters are not compared."""
        self._model, self._optimizers = model, list(inner(optimizer))
        self.done = done
        """Number of steps made. This object counts them, because a rank may own no exchanged
        parameters."""
        outer = outer_settings.parse(args.dpu_outer)
        every, fragments = outer.steps, outer.fragments
        # Every rank takes part, even if its parameters are too few to be cut.
        self._every, self._after = every, outer.after
        self._begins = {(part + 1) * every // fragments % every for part in range(fragments)}
        common = {
            "every": every,
            "after": outer.after,
            "delay": outer.delay,
            "group": job.peers() or (0,),  # Without --use-dpu-reduce this rank exchanges nothing.
            "compare": not joins,
            "done": done,
            "in_order": args.deterministic_mode,
        }
        self._parts = [
            bytepslib.diloco.LocalSteps(
                parameters,
                lr=outer.lr,
                momentum=outer.momentum,
                fragments=fragments,
                wire_dtype=outer.dtype,
                name=f"{_NAME}{index}",
                **common,
            )
            for index, optimizer in enumerate(self._optimizers)
            if (parameters := [p for p in stepped(optimizer) if p.numel()])
        ]
        buffers = [buffer for buffer in job.saved_buffers(model) if buffer.is_floating_point()]
        buffers = [buffer for buffer in buffers if buffer.numel()]
        if buffers and job.replicas() > 1:
            mean = bytepslib.diloco.LocalSteps(
                buffers,
                lr=1.0,
                momentum=0.0,
                wire_dtype=torch.float32,
                name=f"{_NAME}buffers",
                **common,
            )
            self._parts.append(mean)

    @property
    def steps_alone(self) -> bool:
        """Whether replicas make the next step on their own."""
        return self.done >= self._after

    def step(self) -> bool:
        """Count an iteration. Return whether replicas have begun to exchange; the same on all
        ranks."""
        self.done += 1
        changed = False
        for part in self._parts:
            changed |= part.step()
        if changed:
            self._to_model()
        return self.done > self._after and self.done % self._every in self._begins

    def exchange(self) -> None:
        """Exchange all parameters now, if replicas step on their own."""
        for part in self._parts:
            part.exchange()
        self._to_model()

    def end(self) -> None:
        """Finish the exchanges in flight, after which this replica makes no more steps."""
        for part in self._parts:
            part.end()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Context in which the model has the outer parameters and the averaged buffers."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.outer_parameters())
            self._to_model()
            yield
        self._to_model()

    def tensors(self) -> list[torch.Tensor]:
        """Return the outer state."""
        return [tensor for part in self._parts for tensor in part.state()]

    def _to_model(self) -> None:
        """Copy the optimizers' parameters to the model."""
        for optimizer in self._optimizers:
            if hasattr(optimizer, "_copy_main_params_to_model_params"):
                optimizer._copy_main_params_to_model_params()
        for chunk in self._model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def save(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        parts = [part.state_dict() for part in self._parts]
        torch.save({"done": self.done, "parts": parts}, path)

    def load(self, path: str) -> None:
        state = torch.load(path, weights_only=True)
        if not isinstance(state, dict) or len(state["parts"]) != len(self._parts):
            raise ValueError("the saved state belongs to other parameters, or to an older version")
        for part, values in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(values)
        self.done = state["done"]
        self._to_model()


def inner(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's inner optimizers, each of which steps a part of the parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that the torch optimizer of this Megatron optimizer steps."""
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]


def forget() -> None:
    """Reset at the end of training."""
    global _pace, _running
    _pace, _running = _Pace(), None


def begin(args: Namespace, model: Sequence[Any], optimizer: Any) -> None:
    """Set up local steps when training starts, anew or from a checkpoint.

    Raises:
        RuntimeError: replicas begin with different parameters.
    """
    global _running
    if job.replicas() > 1 and not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: replicas have different parameters or buffers to begin with: give "
            "all of them the same --seed, --load and layout"
        )
    _running = None
    outer = outer_settings.parse(getattr(args, "dpu_outer", None))
    if outer.steps == 1:
        return
    _running = OuterSteps(args, model, optimizer, args.iteration)
    if args.iteration > 0:
        _resume(args)
    if _running.steps_alone:
        _leave_each_other(outer)


def _end_of_iteration(args: Namespace) -> bool:
    """Handle an iteration in which the optimizer has made or skipped its step.

    Returns:
        whether replicas have begun to exchange.
    """
    if _running is None:
        return False
    outer = outer_settings.parse(args.dpu_outer)
    has_begun = _running.step()
    if _running.done == outer.after:
        _leave_each_other(outer)
    if args.curr_iteration + 1 == args.train_iters:
        _running.exchange()
    return has_begun


def before_join(model: Sequence[Any]) -> None:
    """Finish the exchanges before a replica joins. All ranks of the other replicas call this.
    Afterwards nothing is in flight, and each rank has all parameters.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if _running is not None:
        _running.exchange()
    for chunk in model:
        config = chunk.ddp_config
        if config.use_distributed_optimizer and config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def end_exchanges() -> None:
    """Finish the exchanges in flight before this replica leaves, so that its pushes reach the other
    replicas.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if _running is not None:
        _running.end()


@contextmanager
def outer_parameters() -> Iterator[None]:
    """Context in which the model has the outer parameters, if there are any. Parameters have their
    own values again afterwards."""
    if _running is None:
        yield
        return
    with _running.outer_parameters():
        yield


def steps_alone() -> bool:
    """Return whether replicas make the next step on their own."""
    return _running is not None and _running.steps_alone


def is_of_exchange(name: str) -> bool:
    """Return whether a tensor of this name belongs to an exchange."""
    return name.startswith(_NAME)


def done() -> int:
    """Return the number of steps made; -1: there are no outer steps."""
    return -1 if _running is None else _running.done


def joined(args: Namespace, model: Sequence[Any], optimizer: Any, steps: int) -> None:
    """Start after joining other replicas, which have made `steps` steps."""
    global _running
    if steps >= 0:
        _running = OuterSteps(args, model, optimizer, steps, joins=True)
        if _running.steps_alone:
            job.leave_each_other()


def tensors() -> list[torch.Tensor]:
    """Return the outer state of this rank. Empty if there are no outer steps."""
    return [] if _running is None else _running.tensors()


def _leave_each_other(outer: outer_settings.Outer) -> None:
    """Make outer steps from here on; replicas step on their own."""
    count = job.replicas()
    what = "this job makes an outer step"
    if count > 1:
        job.leave_each_other()
        what = (
            f"replica {job.replica()} of {count} steps by itself, and exchanges differences of "
            f"parameters in {outer.dtype}"
        )
    if torch.distributed.get_rank() == 0:
        rate = bytepslib.diloco.outer_rate(count) if outer.lr is None else outer.lr
        print(
            f"dpu_reduce: from here on {what} once in {outer.steps} steps, with rate {rate:g} and "
            f"momentum {outer.momentum:g}",
            flush=True,
        )


def meets(args: Namespace) -> bool:
    """Return whether replicas meet after this iteration. Only then can they agree on something."""
    return not steps_alone() or done() % outer_settings.parse(args.dpu_outer).steps == 0


def before_save() -> None:
    """Exchange everything before a checkpoint is saved. All ranks of all replicas call this.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if _running is not None:
        _running.exchange()


def save(args: Namespace, iteration: int) -> None:
    """Save this rank's outer state, if there is any, next to the checkpoint."""
    if _running is not None:
        _running.save(_path(args.save, iteration))


def _resume(args: Namespace) -> None:
    assert _running is not None
    path = _path(args.load, args.iteration)
    try:
        _running.load(path)
    except (OSError, ValueError) as error:
        # All replicas read the same file, so all of them fail in the same way.
        print(
            f"dpu_reduce: the outer momentum begins at 0, since {path} cannot be used: {error}",
            flush=True,
        )


def _path(folder: str | None, iteration: int) -> str:
    rank = torch.distributed.get_rank()
    return os.path.join(folder or "", "dpu_outer", f"iter_{iteration:07d}", f"rank_{rank:05d}.pt")


# Steps that a slow replica skips, so that the others do not wait for it.


_TRY_AFTER = 8
"""Number of exchanges without a wait after which a slow replica tries one more step."""


@dataclass
class _Pace:
    """Progress of this replica between two exchanges. It is the same on all ranks of the
    replica."""

    computed: int = 0
    """Number of steps since the last exchange began."""
    most: int | None = None
    """Limit for `computed`; None: no limit."""
    awaited: bool = False
    """Whether other replicas have waited for this one since the last exchange began."""
    quiet: int = 0
    """Number of exchanges without a wait since `most` has changed."""
    began: float = 0.0
    """Start time of the last computed step."""
    step_s: float = 0.0
    """Duration of the shortest step, in seconds."""
    had_time: bool = False
    """Whether this rank waited for longer than a step in the last exchange."""
    since: tuple[int, int] | None = None
    """First skipped iteration that was not logged yet, and its first sample; None: there is
    none."""


_pace = _Pace()


def leaves_out(args: Namespace, data: Any, scheduler: Any) -> bool:
    """Return whether this iteration is skipped. If so, this function has read the iteration's
    samples, advanced the learning rate, and made an exchange if one was due. All ranks of a replica
    call this.

    Args:
        data: the rank's iterator, or a list with the iterator of each model chunk; None if this
            rank reads no data.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if not args.dpu_quorum or not steps_alone():
        return False
    awaited, had_time = _agree()
    if awaited and not _pace.awaited:
        _pace.awaited, _pace.quiet = True, 0
        _pace.most = max(_pace.computed - 1, 1)
    elif _pace.most is not None and (had_time or _pace.quiet >= _TRY_AFTER):
        _pace.quiet, _pace.most = 0, _pace.most + 1
    if not awaited and (_pace.most is None or _pace.computed < _pace.most):
        _tell(args, args.curr_iteration, args.consumed_train_samples)
        _pace.began = time.monotonic()
        return False
    if _pace.since is None:
        _pace.since = args.curr_iteration, args.consumed_train_samples
    from ...num_microbatches_calculator import get_num_microbatches

    microbatches = get_num_microbatches()
    for iterator in _iterators(data):
        for _ in range(microbatches):
            next(iterator)
        if hasattr(
            iterator, "advance"
        ):  # advance() drops batches that were kept for a repeated step
            iterator.advance()
    samples = microbatches * args.micro_batch_size * args.data_parallel_size
    scheduler.step(increment=samples * getattr(args, "gtp_weight_remat_size", 1))
    iteration_ended(args)
    if args.curr_iteration + 1 == args.train_iters:
        _tell(args, args.train_iters, args.consumed_train_samples + samples)
    return True


def iteration_ended(args: Namespace) -> None:
    """Make an outer step if it is due, and update the pace, at the end of an iteration."""
    now = time.monotonic()
    if _pace.began:
        took, _pace.began = now - _pace.began, 0.0
        _pace.step_s = min(took, _pace.step_s or took)
        _pace.computed += 1
    if _end_of_iteration(args):
        waited = time.monotonic() - now
        _pace.had_time = not _pace.awaited and waited > _pace.step_s > 0
        _pace.quiet += not _pace.awaited
        _pace.computed, _pace.awaited = 0, False


def _iterators(data: Any) -> Iterator[Any]:
    for iterator in data if isinstance(data, list) else [data]:
        if iterator is not None:
            yield iterator


def _agree() -> tuple[bool, bool]:
    """Return whether any replica waits for an exchange of this one, and whether all ranks of this
    replica had to wait for others in the last exchange."""
    awaited = any(is_of_exchange(name) for name in bytepslib.members.awaited())
    flags = torch.tensor([int(awaited), int(not _pace.had_time)])
    _pace.had_time = False
    if torch.distributed.get_backend() == "nccl":
        flags = flags.cuda()
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    any_awaited, any_had_none = flags.tolist()
    return bool(any_awaited), not any_had_none


def _tell(args: Namespace, iteration: int, sample: int) -> None:
    """Log and record the steps that were skipped before this iteration and sample."""
    if _pace.since is None:
        return
    (first, begin), _pace.since = _pace.since, None
    if torch.distributed.get_rank() != 0:
        return
    print(
        f"dpu_reduce: replica {job.replica()} left out iterations {first + 1} to {iteration}, "
        f"{(sample - begin) // job.replicas()} samples: it is slower than the "
        f"{quorum.parse(args.dpu_quorum).replicas} replicas of --dpu-quorum",
        flush=True,
    )
    lost_samples.record(args.save, iteration, begin, sample - begin, [job.replica()])
