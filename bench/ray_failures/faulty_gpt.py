"""Megatron's GPT pretraining with scripted faults, which jobs run that must fail.

``SCRIPTED_FAULTS`` holds a JSON list of faults, each with ``generation``, ``rank``, ``when`` and
``what``:

- ``when``: ``start``, ``save`` (while a checkpoint is written), ``memory:N`` (while the state of
  step N is written to memory), or the number of a step, which the fault prevents.
- ``what``: ``kill`` (kill this process), ``actor`` (kill the actor that owns it), ``freeze`` (stop
  the process), ``sleep`` (for ever), ``raise``, ``hold:FILE`` (wait until the file exists; the
  driver breaks something meanwhile), ``joiner:N`` (wait until replica N is ready to join), or
  ``told`` (wait until this rank is told to end).

A fault with ``replica`` affects only that replica.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.layouts.job import take_a_share

_HOLD_S = 120.0


def _recorded(folder: Path, step: int) -> bool:
    """Return whether the driver has recorded this step of the job in this folder."""
    record = folder / "steps.jsonl"
    whole_lines = record.read_text().rpartition("\n")[0] if record.exists() else ""
    return any(json.loads(line)["step"] >= step for line in whole_lines.splitlines())


def _do(what: str, after: int = 0) -> None:
    """Cause the fault. ``after``: number of the last completed step."""
    # Output that is not flushed now would be lost.
    sys.stdout.flush()
    print(f"fault: {what}", flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "actor":
        file = Path(os.environ["SCRIPTED_STATE"])
        # If an actor dies, steps that it has not reported to the driver are lost.
        _await(lambda: after == 0 or _recorded(file.parent, after))
        state = json.loads(file.read_text())
        os.kill(state["ranks"][int(os.environ["RANK"])]["pid"], signal.SIGKILL)
        time.sleep(_HOLD_S)  # the fork server ends this process when its actor is gone
    elif what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "sleep":
        while True:
            time.sleep(3600)
    elif what == "raise":
        raise RuntimeError("a fault that the script asked for")
    elif what.startswith("hold:"):
        _await(Path(what.partition(":")[2]).exists)
    elif what == "told":
        from megatron.core.distributed.dpu_reduce import replica_changes
        from megatron.training import get_args, get_signal_handler

        handler = get_signal_handler() if get_args().exit_signal_handler else None
        _await(
            lambda: replica_changes.was_asked_to_end() or bool(handler and handler._signal_received)
        )
    elif what.startswith("joiner:"):
        from byteps.torch import members

        joiner = int(what.partition(":")[2])
        _await(lambda: members.view().waiting[joiner])
    else:
        raise ValueError(f"unknown fault {what!r}")


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _HOLD_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _before(module: Any, name: str, call: Callable[[dict[str, Any]], None]) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        call(kwargs)
        return function(*args, **kwargs)

    setattr(module, name, called)


def _while_written(step: int, what: str) -> None:
    """Cause the fault when a part of that step's state is in memory."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

    manager = local_manager.LocalCheckpointManager
    whole = manager._save

    def save(self: Any, state: Any, identity: tuple[int, int, str]) -> None:
        if identity[0] == step:
            self._ensure_dir()
            self._local_ckpt_path_from_id(identity, True).touch()
            _do(what)
        whole(self, state, identity)

    manager._save = save


def main() -> None:
    import pretrain_dpu_gpt
    import torch
    from megatron.core import dist_checkpointing
    from megatron.training import training

    take_a_share()
    # Repeated steps are compared bit for bit, even on GPUs.
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, generation = int(os.environ["RANK"]), int(os.environ["MEGATRON_BYTEPS_GENERATION"])
    replica = int(os.environ.get("BYTEPS_REPLICA", "0/1").partition("/")[0])
    for fault in json.loads(os.environ.get("SCRIPTED_FAULTS", "[]")):
        if (fault["rank"], fault["generation"]) != (rank, generation):
            continue
        if fault.get("replica", replica) != replica:
            continue
        when, what = fault["when"], fault["what"]
        if when == "start":
            _do(what)
        elif when == "save":

            def save(_: dict[str, Any], what: str = what) -> None:
                _do(what)

            _before(dist_checkpointing, "save", save)
        elif str(when).startswith("memory:"):
            _while_written(int(when.partition(":")[2]), what)
        else:

            def strike(kwargs: dict[str, Any], when: int = when, what: str = what) -> None:
                if kwargs["iteration"] + 1 == when:
                    _do(what, after=when - 1)

            _before(training, "train_step", strike)
    pretrain_dpu_gpt.main()
