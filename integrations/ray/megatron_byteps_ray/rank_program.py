"""Program of a rank's process: runs the user's script unchanged, and watches its progress.

It can also run a script, or ``module:function``, under torchrun: ``torchrun ... -m
megatron_byteps_ray.rank_program ENTRY ARGUMENTS``.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import inspect
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import memory, report, send
from .profiling import asked_for, profiled

BEAT_S = 1.0
STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a rank write the stacks of its threads to its log. It works even if the rank
hangs outside Python."""


def run(order: dict[str, Any]) -> int:
    """Run as the rank that the order describes. Return the exit status."""
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Output is line-buffered, so that the log of a killed rank has its last lines.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.path.isdir(order["folder"]):
        os.chdir(order["folder"])
    if "megatron.training" in sys.modules:
        _prepare_checkpoints()
        _watch_megatron()
    memory.prepare(order["arguments"], int(os.environ["RANK"]))
    threading.Thread(target=_beat, name="progress", daemon=True).start()
    try:
        with profiled():
            call_entry(order["entry"], order["arguments"])
        send("mark", mark="leaving")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def call_entry(entry: str, arguments: Sequence[str]) -> None:
    """Run ``module:function`` or a script path, with these arguments in ``sys.argv``.

    Raises:
        ValueError: there is no such script, module or function.
    """
    if not entry.endswith(".py"):
        name, _, function = entry.partition(":")
        sys.argv = [name, *arguments]
        try:
            called = getattr(importlib.import_module(name), function)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"the entry {entry!r} is not there: {error}") from error
        called()
        return
    path = Path(entry).resolve()
    if not path.is_file():
        raise ValueError(f"the entry {entry!r} is no file on this machine ({path})")
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _beat() -> None:
    """Report from time to time that this process is alive, and how much it has pushed. Ranks that
    wait have pushed more than the rank for which they wait."""
    while True:
        pushed = 0
        bps = sys.modules.get("byteps.torch")
        if bps is not None and bps.is_initialized():
            pushed = bps.get_metrics().get("byteps_worker_pushed_bytes_total", 0)
        send("beat", pushed=pushed)
        time.sleep(BEAT_S)


def _prepare_checkpoints() -> None:
    """Fork the process in which Megatron collects reports of checkpoint writers.

    Megatron would spawn it at the first checkpoint. In each generation that takes seconds, to
    import torch. The fork must come before threads and CUDA are started.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue("fork")


def _watch_megatron() -> None:
    """Report Megatron's start, steps and checkpoints. For this, wrap functions that its loop
    calls."""
    import byteps.torch
    import torch.distributed
    from megatron.training import training

    _mark_after(torch.distributed, "init_process_group", "groups")
    _mark_after(byteps.torch, "init", "byteps")
    _mark_after(training, "load_checkpoint", "loaded")
    _mark_after(training, "save_checkpoint_and_time", "saved", before="saving")
    _mark_after(training, "evaluate_and_print_results", "evaluated", before="evaluating")
    _mark_after(training, "train", "trained")
    report_megatron_steps()


def report_megatron_steps() -> None:
    """Report each step of Megatron's loop."""
    from megatron.training import training

    training.training_log = _reporting(training.training_log)


def _mark_after(module: Any, name: str, mark: str, before: str = "") -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if before:
            send("mark", mark=before)
        result = function(*args, **kwargs)
        send("mark", mark=mark)
        return result

    setattr(module, name, marked)


def _reporting(training_log: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's step log so that it also reports the step. Every rank calls the log after
    each step."""
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log_and_report(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        values = signature.bind(*args, **kwargs).arguments
        settings = get_args()
        losses = {name: float(loss) for name, loss in values["loss_dict"].items()}
        tokens = settings.global_batch_size * settings.seq_length
        report(values["iteration"], tokens=tokens, **losses)
        return training_log(*args, **kwargs)

    return log_and_report


if __name__ == "__main__":
    if asked_for() is not None and importlib.util.find_spec("megatron"):
        report_megatron_steps()
    with profiled():
        call_entry(sys.argv[1], sys.argv[2:])
