"""Faults and unusual orders, each a function that changes BytePS or Megatron in this process; and
kills of a rank or a server within a step."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer

from tests.layouts.job import LIMIT_S

STEP = 3
"""Step in which a process is killed."""


def install(folder: Path, victim: str, phase: str) -> None:
    """Make rank 1 kill itself or a server, and every rank record its parameters after each step,
    also after a failed step.

    Args:
        victim: "rank", "server", or "" for none.
        phase: "pushed": only rank 0 has sent its gradients; "answered": all ranks know the norm,
            and none has sent a verdict on the step.
    """
    # Imported here, because byteps may be missing in a process that imports this file.
    from byteps.torch.server_bucket import ServerBucket

    rank, digests = int(os.environ["RANK"]), []
    step, push = ServerOptimizer.step, ServerBucket._push
    norm = ServerOptimizer._norms

    def noted(self: ServerOptimizer) -> Any:
        try:
            result = step(self)
        except BaseException:
            (folder / f"left.{rank}").write_text(_digest(self))
            raise
        digests.append(_digest(self))
        (folder / f"digests.{rank}").write_text(json.dumps(digests))
        return result

    def pushed(self: ServerBucket, *args: Any) -> Any:
        if len(digests) < STEP - 1 or phase != "pushed":
            return push(self, *args)
        if rank == 1:
            meet(folder, wait=True)
            _kill(victim)
            return push(self, *args)
        handle = push(self, *args)
        meet(folder, wait=False)
        return handle

    def answered(self: ServerOptimizer) -> Any:
        answer = norm(self)
        if len(digests) == STEP - 1 and phase == "answered":
            meet(folder, wait=True)
            if rank == 1:
                _kill(victim)
        return answer

    ServerOptimizer.step = noted
    if victim:
        ServerBucket._push = pushed  # type: ignore[assignment] # mypy takes self for an argument
        ServerOptimizer._norms = answered


def _digest(optimizer: ServerOptimizer) -> str:
    digest = hashlib.sha256()
    for chunk in optimizer.model_chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def kill_servers(folder: Path, victims: Sequence[int]) -> None:
    """Make the last rank kill one of these processes in each step from the second on: servers to
    which rank 0 has pushed, and the last rank has not."""
    from byteps.torch import engine
    from byteps.torch.server_tensor import ServerTensor

    left = dict(enumerate(victims, 2))
    steps: Counter[object] = Counter()

    def killing(start: Callable[..., Any], tensor: Callable[..., object]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            steps[tensor(*args, **kwargs)] += 1
            step = steps[tensor(*args, **kwargs)]
            pushed = folder / f"pushed.{step}"
            if dist.get_rank() == dist.get_world_size() - 1 and step in left:
                _await(pushed)
                os.kill(left.pop(step), signal.SIGKILL)
            handle = start(*args, **kwargs)
            if dist.get_rank() == 0:
                pushed.touch()
            return handle

        return started

    # All functions that begin a sum, and a step of servers that keep the optimizer.
    engine.start = killing(engine.start, lambda *args, **kwargs: kwargs["name"])
    for name in ("push_step", "push_norm", "push_try"):
        push = getattr(ServerTensor, name)
        setattr(ServerTensor, name, killing(push, lambda self, *args: id(self)))


def _await(file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} does not come"
        time.sleep(0.01)


def meet(folder: Path, *, wait: bool) -> None:
    """Record that this rank has come here. With `wait`, wait until all ranks have."""
    (folder / f"here.{dist.get_rank()}").touch()
    deadline = time.monotonic() + LIMIT_S
    while wait and len(list(folder.glob("here.*"))) < dist.get_world_size():
        assert time.monotonic() < deadline, "the other rank does not come"
        time.sleep(0.01)


def _kill(victim: str) -> None:
    if victim == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    # Only this job's servers are killed. They are known by their environment, which has the store's
    # port of the job's first rank.
    mark = f"MASTER_PORT={os.environ['MASTER_PORT']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # The process has ended meanwhile.
        if mark in environment and b"--role" in command and b"server" in command:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("this job has no server")


# Faults and unusual orders; each function changes BytePS or Megatron in this process.


def undecayed() -> None:
    """Servers use no weight decay."""
    from byteps.torch.step_machine import StepMachine

    plain = StepMachine.next_step

    def without(self: StepMachine, param_groups: Any, scale: float = 1.0) -> Any:
        step = plain(self, param_groups, scale)
        return step._replace(rates=[(rate, 0.0) for rate, _ in step.rates])

    StepMachine.next_step = without


def checked() -> None:
    """Check a step without a fault. The step compares gradients that were sent early again."""
    os.environ["BYTEPS_CHECK_GRADIENTS"] = "1"


def pushed_too_early_checked() -> None:
    """Send gradients before other stages have added to them. The check notices it."""
    checked()
    from megatron.core.distributed.dpu_reduce.summed_later import SummedLater

    SummedLater.__call__ = lambda self, parameter, name: False


def summed_once_more_checked() -> None:
    """Sum another gradient over tensor-parallel ranks, as a new version of Megatron might. The
    check notices it."""
    checked()
    from megatron.core import mpu

    module: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]
    sums = module._allreduce_non_tensor_model_parallel_grads

    def more(model: Any, *args: Any, **kwargs: Any) -> None:
        sums(model, *args, **kwargs)
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if name.endswith("layers.1.mlp.linear_fc2.weight"):
                    group = mpu.get_tensor_model_parallel_group()
                    dist.all_reduce(parameter.main_grad, group=group)

    module._allreduce_non_tensor_model_parallel_grads = more


def pushed_twice() -> None:
    """Check a step without a fault, in which Megatron's rerun machine repeats the passes of each
    step. No gradient may be zeroed while servers send into its memory."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    should_run = RerunStateMachine.should_run_forward_backward

    def twice(self: RerunStateMachine, data_iterator: Any) -> bool:
        self.mode = RerunMode.REPORT_DETERMINISM_STATS
        self.rerun_requested = True
        return should_run(self, data_iterator)

    reset = _ParamAndGradBuffer.reset

    def reset_when_nothing_moves(self: _ParamAndGradBuffer) -> None:
        assert all(
            server_bucket._pushed is None
            for bucket in self.buckets
            for server_bucket in bucket.dpu_server_buckets
        )
        reset(self)

    RerunStateMachine.should_run_forward_backward = twice
    _ParamAndGradBuffer.reset = reset_when_nothing_moves


def lost() -> None:
    """End the last rank in its second step, when it has sent a part of its gradients."""
    from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer

    ready, steps = ServerOptimizer.bucket_is_ready, 0
    step = ServerOptimizer.step

    def is_ready(self: ServerOptimizer, bucket: Any) -> None:
        if (
            steps == 1
            and bucket is self._buckets[1]
            and dist.get_rank() == dist.get_world_size() - 1
        ):
            os._exit(7)
        ready(self, bucket)

    def counted(self: ServerOptimizer) -> Any:
        nonlocal steps
        steps += 1
        return step(self)

    ServerOptimizer.bucket_is_ready, ServerOptimizer.step = is_ready, counted


def sent_before_the_step() -> None:
    """Check a step without a fault. In the first step Megatron learns when buckets are ready. After
    it, all gradients that only data-parallel ranks sum must be sent when the step begins."""
    from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer

    step = ServerOptimizer.step

    def step_when_sent(self: ServerOptimizer) -> Any:
        if self._machine.steps > 0:
            waiting = [bucket for bucket in self._buckets if bucket._pushed is None]
            late = [parameter for bucket in waiting for _, parameter in bucket.places]
            assert all(getattr(parameter, "sequence_parallel", False) for parameter in late)
            assert len(late) > 0 and len(waiting) < len(self._buckets) / 2
        return step(self)

    ServerOptimizer.step = step_when_sent


def come_late(rank: int) -> None:
    """Check a step without a fault, in which one rank sends its gradients after the others. The
    result shows the order of the three additions: 2**30, 1 and -2**30 give 0 or 1."""
    from megatron.core.distributed.dpu_reduce import server_buckets, sums

    def late(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(group: Any, *args: Any, **kwargs: Any) -> Any:
            for bucket in group.buckets:
                bucket.grad_data[5] = (2.0**30, 1.0, -(2.0**30))[dist.get_rank()]
            if dist.get_rank() == rank:
                time.sleep(0.2)
            return start(group, *args, **kwargs)

        return started

    sums.start_grad_sync = late(sums.start_grad_sync)
    server_buckets.start_update = late(server_buckets.start_update)


BREAKS: dict[str, Callable[[], None]] = {
    **{f"late-{rank}": functools.partial(come_late, rank) for rank in range(3)},
    "undecayed": undecayed,
    "checked": checked,
    "pushed-too-early-checked": pushed_too_early_checked,
    "summed-once-more-checked": summed_once_more_checked,
    "pushed-twice": pushed_twice,
    "lost": lost,
    "sent-before-the-step": sent_before_the_step,
}
