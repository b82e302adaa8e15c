"""Error feedback for DistributedDataParallel in programs that know nothing of BytePS.

With feedback, the rounding loss of a gradient is added to the next gradient of the same parameters.
A process group sees only the length and the type of an all-reduce, so buckets of equal length would
exchange their losses. A communication hook knows its bucket, so each model gets a hook.
"""

# Annotations are evaluated in this module, because DDP looks at the annotations of a hook.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch import session
from byteps.torch.c10d.hooks import BytePSGroup, ddp_comm_hook
from byteps.torch.c10d.reductions import Settings
from byteps.torch.c10d.replaced import replace_method
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

Call = Callable[..., None]
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

_BUILT_IN = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class _Chosen:
    """The hook that a model's reducer calls, and its state."""

    def __init__(self, hook: Hook, state: object) -> None:
        self.hook, self.state = hook, state


_models = WeakIdKeyDictionary()
"""The `_Chosen` of each model that has the hook of this module."""


def install() -> None:
    """Give `ddp_comm_hook` to each DDP model that is made from now on. A script may then register
    another hook. A second call does nothing."""
    model = DistributedDataParallel
    replace_method(model, "__init__", _make)
    replace_method(model, "register_comm_hook", _register)
    replace_method(model, "_register_builtin_comm_hook", _register_built_in)


def _register(native: Call, model: DistributedDataParallel, state: object, hook: Hook) -> None:
    if model in _models:
        _choose(model, state, hook)
    else:
        native(model, state, hook)


def _register_built_in(
    native: Call, model: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType
) -> None:
    if model in _models:
        _choose(model, model.process_group, _BUILT_IN[comm_hook_type])
    else:
        native(model, comm_hook_type)


def _make(native: Call, model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
    native(model, *arguments, **named)
    if (
        model._comm_hooks  # a model with mixed precision has a hook
        or not isinstance(model.process_group, BytePSGroup)
        or not session.is_initialized()
        or not Settings.read().wire_of(torch.float32).feedback
    ):
        return
    chosen = _Chosen(ddp_comm_hook, model.process_group)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return chosen.hook(chosen.state, bucket)

    model.register_comm_hook(None, hook)
    model._comm_hooks.clear()  # the script has registered no hook
    _models[model] = chosen


def _choose(model: DistributedDataParallel, state: object, hook: Hook) -> None:
    model._check_comm_hook(hook)
    if model._comm_hooks:
        raise RuntimeError("register_comm_hook was called already: a model has one hook")
    model._comm_hooks.append((hook, state))
    _models[model].hook, _models[model].state = hook, state
