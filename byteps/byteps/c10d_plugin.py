"""The backend ``byteps`` of torch.distributed, as a plugin: it needs no more than torch.

`install` is for scripts that do not know of BytePS: groups that they make for NCCL or gloo then
carry that backend and are told apart by nothing but their speed. An entry point of the group
``torch.backends`` names `autoload`: ``import torch`` ends with it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

NAME = "byteps"
_MIXED = "cpu:gloo,cuda:nccl"
_CARRIED = ("nccl", "gloo", _MIXED, "cuda:nccl,cpu:gloo", "undefined")
"""The backends whose groups are carried when a script asks for them."""

asked: ContextVar[str] = ContextVar("asked", default=_MIXED)
"""The backend that a script has asked for, while its group is made."""


def register() -> None:
    """Make the backend ``byteps`` known to torch.distributed. Again: do nothing."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def install() -> None:
    """Have every group of NCCL or gloo made by the backend ``byteps``. Again: do nothing."""
    if not dist.is_available():
        return
    register()
    inside = dist.distributed_c10d
    # Whatever makes a group calls this, also modules that were imported before this one.
    if not hasattr(inside._new_process_group_helper, "__wrapped__"):
        inside._new_process_group_helper = _carrying(inside._new_process_group_helper)


def _create(options: Any, backend_options: Any = None) -> Any:
    from byteps.torch.c10d.hooks import BytePSGroup

    return BytePSGroup(options, backend_options, asked=asked.get())


def _carrying(make: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that makes a group, whose groups carry the backend that is asked for."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def carrying(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named)
        name = str(call.arguments["backend"]).lower()
        if name not in _CARRIED:
            return make(*arguments, **named)
        call.arguments["backend"] = dist.Backend(NAME)
        token = asked.set(name)
        try:
            group, store = make(*call.args, **call.kwargs)
        finally:
            asked.reset(token)
        if isinstance(group, dist.ProcessGroup):  # this rank is a member
            _tell_as(group, name, call.arguments.get("device_id"))
        return group, store

    return carrying


def _tell_as(group: Any, name: str, device: torch.device | None) -> None:
    """torch tells scripts that the group is one of the backend that they have asked for."""
    world = dist.distributed_c10d._world
    world.pg_map[group] = (name, world.pg_map[group][1])
    world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(dist.Backend(name)))
    if device is not None:
        group.bound_device_id = device


def autoload() -> None:
    """With ``BYTEPS_C10D=1``, have torch.distributed make process groups that use BytePS."""
    if os.environ.get("BYTEPS_C10D", "0") not in ("", "0"):
        install()
