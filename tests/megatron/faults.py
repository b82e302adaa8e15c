"""Kills a rank or a server within a step of a training job."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed.dpu_reduce.server_optimizer import ServerOptimizer

from tests.layouts.job import LIMIT_S

STEP = 3
"""In which somebody is killed."""


def install(folder: Path, victim: str, phase: str) -> None:
    """Have rank 1 kill itself or a server, and every rank note its parameters after each step, and
    those that a failed step left.

    Args:
        victim: "rank", "server", or "" for nobody.
        phase: "pushed", when rank 0 alone has sent its gradients; "answered", when all ranks know
            the norm and none has said what becomes of the step.
    """
    # Not before: a process that imports this file may be without byteps.
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
        found = norm(self)
        if len(digests) == STEP - 1 and phase == "answered":
            meet(folder, wait=True)
            if rank == 1:
                _kill(victim)
        return found

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
    """Have the last rank kill one of these processes in each step from the second on: servers that
    rank 0 has pushed to, and the last rank has not."""
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

    # All ways to begin a sum, and a step of servers that keep the optimizer.
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
    """Note that this rank is here; wait for all of them."""
    (folder / f"here.{dist.get_rank()}").touch()
    deadline = time.monotonic() + LIMIT_S
    while wait and len(list(folder.glob("here.*"))) < dist.get_world_size():
        assert time.monotonic() < deadline, "the other rank does not come"
        time.sleep(0.01)


def _kill(victim: str) -> None:
    if victim == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    # Of this job: processes that its first rank started have its store's port.
    mark = f"MASTER_PORT={os.environ['MASTER_PORT']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if mark in environment and b"--role" in command and b"server" in command:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("this job has no server")
