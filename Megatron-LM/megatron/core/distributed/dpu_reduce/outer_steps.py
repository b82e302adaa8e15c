# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""``--dpu-outer``: replicas step by themselves, and exchange once in many steps.

What is exchanged is what the inner optimizers step: fp32 parameters, of which each rank has those
that it owns, maybe none. Buffers that are saved, as the biases of routers, become the mean of all
replicas' at the same time. The arithmetic is :mod:`byteps.torch.diloco`'s. Steps are counted, and
their number is saved, so that a job that resumes exchanges when one that was never stopped does. A
checkpoint begins with an exchange of everything: the model in it is the one that all replicas then
have.

Once ``--dpu-quorum`` replicas are there, one that is not computes no more: it leaves steps out,
that is, reads past its samples, and exchanges what it has learned in fewer steps. The next time it
stops before the step that the others waited for. It makes one more once it has waited longer than
a step takes, and now and then tries. So it stays in the job, and costs the others little.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import bytepslib, job, lost_samples, outer_settings, quorum

_NAME = "outer/"
_running: OuterSteps | None = None


class OuterSteps:
    """The exchanges of this rank's parameters, from the first local step on."""

    def __init__(
        self, args: Namespace, model: Sequence[Any], optimizer: Any, done: int, joins: bool = False
    ) -> None:
        """`done`: local steps that were made before, by the job that this one goes on from.
        `joins`: this replica takes all from another one, and nobody compares."""
        self._model, self._optimizers = model, list(inner(optimizer))
        self.done = done
        """Local steps that were made. Counted here: a rank may own nothing that is exchanged."""
        outer = outer_settings.parse(args.dpu_outer)
        every, fragments = outer.steps, outer.fragments
        # Every rank takes part, also one whose parameters are too few to be cut.
        self._every = every
        self._begins = {(part + 1) * every // fragments % every for part in range(fragments)}
        common = {
            "every": every,
            "delay": outer.delay,
            "group": job.peers(),
            "compare": not joins,
            "in_order": args.deterministic_mode,
        }
        self._parts = [
            bytepslib.diloco.LocalSteps(
                parameters,
                lr=outer.lr,
                momentum=outer.momentum,
                fragments=fragments,
                name=f"{_NAME}{index}",
                **common,
            )
            for index, one in enumerate(self._optimizers)
            if (parameters := [p for p in stepped(one) if p.numel()])
        ]
        buffers = [one for one in job.saved_buffers(model) if one.is_floating_point()]
        if buffers := [one for one in buffers if one.numel()]:
            mean = bytepslib.diloco.LocalSteps(
                buffers,
                lr=1.0,
                momentum=0.0,
                wire_dtype=torch.float32,
                name=f"{_NAME}buffers",
                **common,
            )
            self._parts.append(mean)
        for part in self._parts:
            part.steps = done
        job.leave_each_other()

    def step(self) -> bool:
        """An iteration is done. Returns whether an exchange has begun, the same on all ranks."""
        self.done += 1
        changed = False
        for part in self._parts:
            changed |= part.step()
        if changed:
            self._to_model()
        return self.done % self._every in self._begins

    def exchange(self) -> None:
        """Exchange everything, now."""
        for part in self._parts:
            part.exchange()
        self._to_model()

    def end(self) -> None:
        """End the exchanges in flight. This replica makes no step any more."""
        for part in self._parts:
            part.end()

    def tensors(self) -> list[torch.Tensor]:
        """The outer state."""
        return [tensor for part in self._parts for tensor in part.state()]

    def _to_model(self) -> None:
        """Have the model's parameters follow those of the optimizers."""
        for one in self._optimizers:
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
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
            raise ValueError("it is of other parameters, or of an older version")
        for part, values in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(values)
        self.done = state["done"]
        self._to_model()


def inner(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers, of which each steps some parameters."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(one, "is_stub_optimizer", False):
            yield one


def stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    """What its torch optimizer steps."""
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]


def forget() -> None:
    """Training is done."""
    global _pace, _running
    _pace, _running = _Pace(), None


def begin(args: Namespace, model: Sequence[Any], optimizer: Any) -> None:
    """Training begins, or goes on from a checkpoint.

    Raises:
        RuntimeError: replicas begin with different parameters.
    """
    if not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: replicas have different parameters or buffers to begin with: give "
            "all of them the same --seed, --load and layout"
        )
    outer = outer_settings.parse(args.dpu_outer)
    if outer.steps > 1 and args.iteration >= outer.after:
        _leave_each_other(args, model, optimizer, args.iteration - outer.after)
        if args.iteration > outer.after:
            _resume(args)


def _end_of_iteration(args: Namespace, model: Sequence[Any], optimizer: Any) -> bool:
    """The optimizer has made its step, or left it out.

    Returns:
        whether an exchange has begun.
    """
    if _running is not None:
        return _running.step()
    # That iteration itself may be one of --iterations-to-skip.
    outer = outer_settings.parse(args.dpu_outer)
    if outer.steps > 1 and args.curr_iteration + 1 >= outer.after:
        _leave_each_other(args, model, optimizer)
    return False


def before_join(model: Sequence[Any]) -> None:
    """A replica is about to join. All ranks of all other replicas call this: nothing is in flight
    afterwards, and each rank has all parameters.

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
    """This replica leaves the others: what it has pushed reaches them.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if _running is not None:
        _running.end()


def running() -> bool:
    """Whether replicas step by themselves."""
    return _running is not None


def is_of_exchange(name: str) -> bool:
    """Whether so is named what replicas exchange."""
    return name.startswith(_NAME)


def done() -> int:
    """Local steps that were made; -1: each step is summed."""
    return -1 if _running is None else _running.done


def joined(args: Namespace, model: Sequence[Any], optimizer: Any, steps: int) -> None:
    """This replica joins others, which have made so many local steps (`done`)."""
    global _running
    if steps >= 0:
        _running = OuterSteps(args, model, optimizer, steps, joins=True)


def tensors() -> list[torch.Tensor]:
    """The outer state of this rank; nothing where each step is summed."""
    return [] if _running is None else _running.tensors()


def _leave_each_other(args: Namespace, model: Sequence[Any], optimizer: Any, done: int = 0) -> None:
    global _running
    _running = OuterSteps(args, model, optimizer, done)
    if torch.distributed.get_rank() == 0:
        print(
            f"dpu_reduce: replica {job.replica()} of {job.replicas()} steps by itself from "
            f"here on, and exchanges parameters once in "
            f"{outer_settings.parse(args.dpu_outer).steps} steps",
            flush=True,
        )


def meets(args: Namespace) -> bool:
    """Whether replicas meet after this iteration, so that they can agree on something."""
    return _running is None or _running.done % outer_settings.parse(args.dpu_outer).steps == 0


def before_save(model: Sequence[Any]) -> None:
    """A checkpoint is about to be saved. All ranks of all replicas call this.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if _running is not None:
        _running.exchange()


def save(args: Namespace, iteration: int) -> None:
    """This replica saves a checkpoint: save the outer state of this rank."""
    if _running is not None:
        _running.save(_path(args.save, iteration))


def _resume(args: Namespace) -> None:
    assert _running is not None
    path = _path(args.load, args.iteration)
    try:
        _running.load(path)
    except (OSError, ValueError) as error:
        # The same on all replicas, which read the same file.
        print(
            f"dpu_reduce: the outer momentum begins at 0, since {path} cannot be used: {error}",
            flush=True,
        )


def _path(folder: str | None, iteration: int) -> str:
    rank = torch.distributed.get_rank()
    return os.path.join(folder or "", "dpu_outer", f"iter_{iteration:07d}", f"rank_{rank:05d}.pt")


# Steps that a slow replica leaves out, so that others do not wait for it.


_TRY_AFTER = 8
"""Exchanges for which nobody has waited."""


@dataclass
class _Pace:
    """What this replica computes between two exchanges; the same on all of its ranks."""

    computed: int = 0
    """Steps since the last exchange began."""
    most: int | None = None
    """So many at most; None: as many as there are."""
    awaited: bool = False
    """Others have waited for it since the last exchange began."""
    quiet: int = 0
    """Exchanges for which nobody has waited, since `most` has changed."""
    began: float = 0.0
    """When the last step that was computed began."""
    step_s: float = 0.0
    """The shortest step."""
    had_time: bool = False
    """This rank has waited in the last exchange for longer than a step."""
    since: tuple[int, int] | None = None
    """The first iteration that was left out and not told yet, and its first sample."""


_pace = _Pace()


def leaves_out(
    args: Namespace, data: Any, model: Sequence[Any], optimizer: Any, scheduler: Any
) -> bool:
    """Whether this iteration is left out. Then it is done: its samples were read, the learning rate
    has advanced, and an exchange that was due has been made. All ranks of a replica call this.

    Args:
        data: the rank's iterator, or that of each model chunk; None where it reads nothing.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if not args.dpu_quorum or not running():
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
    for one in _iterators(data):
        for _ in range(microbatches):
            next(one)
        if hasattr(one, "advance"):  # what could be run again is not kept
            one.advance()
    samples = microbatches * args.micro_batch_size * args.data_parallel_size
    scheduler.step(increment=samples * getattr(args, "gtp_weight_remat_size", 1))
    iteration_ended(args, model, optimizer)
    if args.curr_iteration + 1 == args.train_iters:
        _tell(args, args.train_iters, args.consumed_train_samples + samples)
    return True


def iteration_ended(args: Namespace, model: Sequence[Any], optimizer: Any) -> None:
    """An iteration is done."""
    now = time.monotonic()
    if _pace.began:
        took, _pace.began = now - _pace.began, 0.0
        _pace.step_s = min(took, _pace.step_s or took)
        _pace.computed += 1
    if _end_of_iteration(args, model, optimizer):
        waited = time.monotonic() - now
        _pace.had_time = not _pace.awaited and waited > _pace.step_s > 0
        _pace.quiet += not _pace.awaited
        _pace.computed, _pace.awaited = 0, False


def _iterators(data: Any) -> Iterator[Any]:
    for one in data if isinstance(data, list) else [data]:
        if one is not None:
            yield one


def _agree() -> tuple[bool, bool]:
    """Whether others wait for an exchange of any rank of this replica, and whether all ranks have
    waited for others in the last one."""
    awaited = any(is_of_exchange(name) for name in bytepslib.members.awaited())
    flags = torch.tensor([int(awaited), int(not _pace.had_time)])
    _pace.had_time = False
    if torch.distributed.get_backend() == "nccl":
        flags = flags.cuda()
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    any_awaited, any_had_none = flags.tolist()
    return bool(any_awaited), not any_had_none


def _tell(args: Namespace, iteration: int, sample: int) -> None:
    """Say and write down what was left out until this iteration and sample, if anything was."""
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
