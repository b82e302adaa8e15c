"""Measures times and losses of a rank's steps in a trial. The script is not changed.

A step ends with Megatron's ``train_step``, or with the step of the script's first optimizer. The
loss is the value that Megatron returns, or the one on which the script calls ``backward()``. After
the last step the ranks exchange their figures through torch.distributed's store. One rank per host
reports the figures of all ranks, and every rank ends with status 0.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from byteps.launcher.places import host_name
from byteps.trial.reports import Settings, tell
from torch.optim.optimizer import register_optimizer_step_post_hook

MEGATRON = "megatron.training.training"
TORCH = "torch"
_LIMIT_S = 120.0
"""Time in seconds for all ranks to end their last step."""
_LOSS = "lm loss"

_meter: Meter | None = None


def install(text: str) -> None:
    """Measure the steps of this process, if it makes steps. A second call does nothing.

    Args:
        text: text form of :class:`Settings`.
    """
    global _meter
    if _meter is None:
        _meter = Meter(Settings.of(text))
        register_optimizer_step_post_hook(_meter.optimizer_stepped)
        torch.autograd.backward = _meter.seeing_losses(torch.autograd.backward)
        if MEGATRON in sys.modules:
            _meter.wrap_train_step(sys.modules[MEGATRON])
        else:
            sys.meta_path.insert(0, _MegatronFinder(_meter))
        atexit.register(_meter.report_early_end)


class Meter:
    """Measures the steps of this rank."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kind = TORCH
        self._optimizer: int | None = None
        """Id of the first optimizer that stepped. Each of its steps ends a training step."""
        self._marks: list[Any] = []
        """End of each step, as a CUDA event or as a time in seconds."""
        self._losses: list[Any] = []
        self._seen: list[Any] = []
        """Losses of the current step's micro-batches so far."""
        self._is_over = False

    # ----- ends of steps

    def optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Hook of every optimizer's step."""
        if self._kind != TORCH:
            return
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) == self._optimizer:
            seen, self._seen = self._seen, []
            self._end_step(sum(seen) / len(seen) if seen else None)

    def seeing_losses(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.autograd.backward`` so that it records the loss, which is a tensor with one
        number."""

        @functools.wraps(backward)
        def seeing(tensors: Any, *arguments: Any, **named: Any) -> Any:
            if self._kind == TORCH and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._seen.append(tensors.detach().float().reshape(()))
            return backward(tensors, *arguments, **named)

        return seeing

    def wrap_train_step(self, module: ModuleType) -> None:
        """Wrap `train_step` in the module of Megatron's training loop, so that it reports its
        steps."""
        train_step: Callable[..., Any] = module.train_step

        @functools.wraps(train_step)
        def measured(*arguments: Any, **named: Any) -> Any:
            self._kind = MEGATRON
            result = train_step(*arguments, **named)
            losses = result[0]
            self._end_step(losses.get(_LOSS, next(iter(losses.values()), None)))
            return result

        module.train_step = measured  # type: ignore[attr-defined]

    def _end_step(self, loss: Any) -> None:
        if self._is_over:  # the script may have caught the exception that ends it
            raise SystemExit(0)
        self._marks.append(_now())
        self._losses.append(loss)
        if len(self._marks) == self._settings.skipped + self._settings.steps:
            self._finish()

    # ----- the end

    def _finish(self) -> NoReturn:
        self._is_over = True
        marks = self._marks[self._settings.skipped - 1 :]
        if isinstance(marks[0], torch.cuda.Event):
            torch.cuda.synchronize()
        own = {
            "times": [_between(earlier, later) for earlier, later in itertools.pairwise(marks)],
            "loss": None if self._losses[-1] is None else float(self._losses[-1]),
            "joined": _is_joined(),
            "pushed": _pushed_bytes(),
            "lacks_fsdp": _lacks_fsdp(),
            "launch": self._settings.token,
            "host": host_name(),
        }
        if dist.is_initialized() and dist.get_world_size() > 1:
            all_, is_first = self._exchange(own)
        else:
            all_, is_first = self._summary([own], "", None), True
        if is_first:
            tell(self._settings, {"report": all_})
        raise SystemExit(0)

    def _exchange(self, own: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Exchange figures; return those of all ranks, and whether this is the first rank of its
        launcher."""
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        limit = timedelta(seconds=_LIMIT_S)
        keys = [f"byteps/trial/{self._settings.number}/{other}" for other in range(size)]
        whole = f"byteps/trial/{self._settings.number}/all"
        store.set(keys[rank], json.dumps(own))
        if rank == 0:
            # The wait is ended by the last step of all ranks; deadline: _LIMIT_S.
            store.wait(keys, limit)
            reports = [json.loads(text) for text in store.multi_get(keys)]
            store.set(whole, json.dumps(self._summary(reports, dist.get_backend(), store)))
        # The wait is ended by rank 0; deadline: _LIMIT_S.
        store.wait([whole], limit)
        summary = json.loads(store.get(whole))
        left = [f"{key}/left" for key in keys]
        store.set(left[rank], "")
        if rank == 0:  # rank 0's process may hold the store
            # The wait is ended by all ranks, once they have read the summary; deadline: _LIMIT_S.
            store.wait(left, limit)
        return summary, rank == summary["firsts"][self._settings.token]

    def _summary(
        self, reports: Sequence[dict[str, Any]], backend: str, store: Any
    ) -> dict[str, Any]:
        losses = [report["loss"] for report in reports if report["loss"] is not None]
        hosts = len({report["host"] for report in reports})
        firsts: dict[str, int] = {}
        for rank, report in enumerate(reports):
            firsts.setdefault(report["launch"], rank)
        return {
            "is_megatron": self._kind == MEGATRON,
            "missing": self._missing_flags(len(reports), hosts),
            "backend": backend,
            "ranks": len(reports),
            "hosts": hosts,
            # The slowest rank decides how long a step takes.
            "times": [
                max(times) for times in zip(*(report["times"] for report in reports), strict=True)
            ],
            "loss": statistics.fmean(losses) if losses else None,
            "joined": any(report["joined"] for report in reports),
            "pushed": sum(report["pushed"] for report in reports),
            "lacks_fsdp": any(report["lacks_fsdp"] for report in reports),
            "firsts": firsts,
            "leader": {
                "token": self._settings.token,
                "port": self._settings.port,
                "hosts": _addresses(store, self._settings),
            },
        }

    def _missing_flags(self, ranks: int, hosts: int) -> list[str]:
        """Return flags of Megatron that this plain job lacks, and that would make it faster."""
        module = sys.modules.get(MEGATRON)
        if self._kind != MEGATRON or module is None:
            return []
        return missing_flags(module.get_args(), ranks, hosts)

    def report_early_end(self) -> None:
        """Report, at the end of the process, if the job has made too few steps."""
        if not self._is_over and self._marks:
            with suppress(OSError):
                tell(self._settings, {"steps": len(self._marks)})


def missing_flags(args: Any, ranks: int, hosts: int) -> list[str]:
    """Return flags of Megatron that these arguments lack, and that send fewer bytes or overlap
    communication. `ranks`, `hosts`: their numbers in the job."""
    flags = []
    if not args.use_distributed_optimizer and args.optimizer == "adam":
        flags.append("--use-distributed-optimizer")
    is_sharded = args.use_distributed_optimizer or bool(flags)
    # Sharded inside each host, the optimizer needs more memory of GPUs, and no parameter crosses
    # hosts.
    if is_sharded and ranks > hosts > 1 and args.num_distributed_optimizer_instances == 1:
        flags.append(f"--num-distributed-optimizer-instances {hosts}")
    if not args.overlap_grad_reduce:
        flags.append("--overlap-grad-reduce")
    if not args.overlap_param_gather and is_sharded:
        flags.append("--overlap-param-gather")
    if args.bf16 and args.accumulate_allreduce_grads_in_fp32:
        flags.append("--grad-reduce-in-bf16")
    return flags


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Import hook through which a meter wraps Megatron's training loop when its module is
    imported."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the loop's module, with a loader that wraps the loop; None for other
        modules."""
        del path, target
        if name != MEGATRON:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                self._meter.wrap_train_step(module)

            spec.loader.exec_module = execute_and_wrap
        return spec


def _now() -> Any:
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(earlier: Any, later: Any) -> float:
    """Return the seconds between two marks."""
    if isinstance(earlier, torch.cuda.Event):
        return float(earlier.elapsed_time(later)) / 1000
    return float(later - earlier)


def _is_joined() -> bool:
    """Return whether this rank is a worker of a BytePS job."""
    if "byteps.torch" not in sys.modules:
        return False
    from byteps.torch import session

    return session.is_initialized()


def _lacks_fsdp() -> bool:
    """Return whether FSDP2 reduces gradients although no variable sends them through the
    servers."""
    fsdp = sys.modules.get("byteps.torch.fsdp")
    return fsdp is not None and fsdp.was_advised()


def _pushed_bytes() -> int:
    """Return the bytes that this rank has sent to servers."""
    if "byteps.torch" not in sys.modules:
        return 0
    from byteps.torch import figures

    return int(figures.get_metrics()["byteps_worker_pushed_bytes_total"])


def _addresses(store: Any, settings: Settings) -> list[str]:
    """Return names of this host by which other hosts may reach the process that has launched this
    rank."""
    from byteps.launcher.addresses import own_address

    addresses = [socket.gethostname(), *settings.hosts]
    with suppress(RuntimeError):
        addresses.insert(0, own_address(os.environ, store))
    return list(dict.fromkeys(addresses))
