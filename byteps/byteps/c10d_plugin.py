"""Plugin that registers the backend ``byteps`` with torch.distributed. It needs only torch.

`install` is for scripts that do not know BytePS: groups that they create for NCCL or gloo then use
BytePS, and otherwise behave as before. The entry point `autoload` (group ``torch.backends``) is
called at the end of ``import torch``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NAME = "byteps"
MIXED = {"cpu": "gloo", "cuda": "nccl"}
"""Native backends inside a group whose script asks for ``byteps`` by name."""

SWITCH = "BYTEPS_C10D"
NEED_SWITCH = (
    f"{SWITCH}_BACKEND",
    f"{SWITCH}_MIN_BYTES",
    f"{SWITCH}_WIRE_DTYPE",
    "BYTEPS_FSDP_DTYPES",
)
"""Variables that need the switch in a script that does not import ``byteps.torch``."""

_logger = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class RequestedBackends:
    """Backend that a script has asked for."""

    name: str
    """The script's spelling: ``nccl``, ``cpu:gloo,cuda:nccl``; ``undefined`` if it names none."""
    backends: Mapping[str, str]
    """Backend by device, as torch parses the name."""

    @property
    def is_carried(self) -> bool:
        """Return whether a BytePS group can wrap these native backends."""
        return (
            bool(self.backends)
            and set(self.backends) <= {"cpu", "cuda"}
            and set(self.backends.values()) <= {"gloo", "nccl"}
        )

    @classmethod
    def of(cls, name: str) -> RequestedBackends:
        """Parse a backend's name. Raises ValueError if torch does not know it."""
        config = dist.distributed_c10d.BackendConfig(dist.Backend(name))
        backends = {device: str(of) for device, of in config.get_device_backend_map().items()}
        # For an undefined name, torch returns a backend for every kind of device.
        if name == dist.Backend.UNDEFINED:
            backends = {device: of for device, of in backends.items() if device in MIXED}
        return cls(name=name, backends=backends)


requested_backends: ContextVar[RequestedBackends | None] = ContextVar(
    "requested_backends", default=None
)
"""Backend that the script has asked for, while torch creates the group."""


def warn_not_carried(what: str) -> None:
    """Log once that the all-reduces of a group do not go through the servers."""
    if what not in _warned:
        _warned.add(what)
        _logger.warning("%s is not carried by BytePS: its all-reduces stay with its backend", what)


def register() -> None:
    """Register the backend ``byteps`` with torch.distributed. A second call does nothing."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def install() -> None:
    """Make every NCCL or gloo group a ``byteps`` group. A second call does nothing."""
    if not dist.is_available():
        return
    register()
    inside = dist.distributed_c10d
    # All code that creates a group calls this function, even modules that were imported before this
    # one.
    if not hasattr(inside._new_process_group_helper, "__wrapped__"):
        inside._new_process_group_helper = _carrying(inside._new_process_group_helper)


def _create(options: Any, backend_options: Any = None) -> Any:
    from byteps.torch.c10d.hooks import BytePSGroup

    return BytePSGroup(options, backend_options, requested=requested_backends.get())


def _carrying(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that creates a group, so that groups use BytePS."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def carrying(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named)
        name = str(call.arguments["backend"]).lower()
        # torch itself handles `byteps`, and reports invalid names.
        of = None if name == NAME or not _is_understood(name) else RequestedBackends.of(name)
        if of is None or not of.is_carried:
            if of is not None:
                warn_not_carried(f"a process group of the backend {name!r}")
            return make(*arguments, **named)
        call.arguments["backend"] = dist.Backend(NAME)
        token = requested_backends.set(of)
        try:
            group, store = make(*call.args, **call.kwargs)
        finally:
            requested_backends.reset(token)
        if isinstance(group, dist.ProcessGroup):  # this rank is a member of the new group
            _tell_as(group, name, call.arguments.get("device_id"))
        return group, store

    return carrying


def _is_understood(name: str) -> bool:
    try:
        RequestedBackends.of(name)
    except Exception:
        return False
    return True


def _tell_as(group: Any, name: str, device: torch.device | None) -> None:
    """Make torch name the group's backend as the script named it."""
    world = dist.distributed_c10d._world
    world.pg_map[group] = (name, world.pg_map[group][1])
    world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(dist.Backend(name)))
    if device is not None:
        group.bind(device)


def lacking_switch(environ: Mapping[str, str]) -> str:
    """Describe variables that do nothing without the switch; empty: there are none."""
    useless = " and ".join(name for name in NEED_SWITCH if environ.get(name))
    if SWITCH in environ or not useless:
        return ""
    return (
        f"{useless} without {SWITCH}=1: nothing of a script goes through BytePS. Set {SWITCH}=1 on "
        f"all hosts, or unset {useless}"
    )


def _warn_of_misspelt() -> None:
    """Warn of variables that look like a misspelt one of this module: a job without the switch
    reads none, and trains without BytePS."""
    known = (SWITCH, *NEED_SWITCH)
    for name in os.environ:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and (near or name.startswith(SWITCH[:-1])):
            _logger.warning("there is no variable %s: did you mean %s?", name, (near or known)[0])


def _warn_at_first_group(warning: str) -> None:
    """Log a warning when the script makes a process group, unless it has imported `byteps.torch`:
    its hooks, and Megatron with ``--use-dpu-reduce``, read the variables without the switch."""
    inside = dist.distributed_c10d
    make = inside._new_process_group_helper

    def warning_first(*arguments: Any, **named: Any) -> Any:
        if warning not in _warned and "byteps.torch" not in sys.modules:
            _logger.warning(warning)
        _warned.add(warning)
        return make(*arguments, **named)

    inside._new_process_group_helper = warning_first


def autoload() -> None:
    """Install this plugin if ``BYTEPS_C10D=1``. Under ``python -m byteps.trial``, also measure this
    process's steps."""
    if SWITCH not in os.environ and os.environ.get("RANK", "0") == "0":
        _warn_of_misspelt()
        if (warning := lacking_switch(os.environ)) and dist.is_available():
            _warn_at_first_group(warning)
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        import byteps.distribution  # noqa: F401  It refuses another distribution's files.

        install()
    if trial := os.environ.get("BYTEPS_TRIAL"):
        from byteps.trial import meter

        meter.install(trial)
