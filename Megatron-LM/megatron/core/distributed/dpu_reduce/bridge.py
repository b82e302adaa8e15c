# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The same check for a recipe of Megatron-Bridge, which has configs and no arguments."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import parameters, refusals
from .advice import Training, advise, wire_bytes
from .check import Machines, Verdict, kinds_of
from .layout import Parallelism

LIBRARY, PERFORMANCE = "megatron.bridge.recipes", "megatron.bridge.perf_recipes"
"""Packages with recipes."""


def recipes(package: str) -> Mapping[str, Callable[[], Any]]:
    """The recipes of a package that can be made without an argument, by their names. One that has
    several names is there under the longest, which says more.

    Raises:
        ImportError: Megatron-Bridge is not installed.
    """
    longest: dict[Any, str] = {}
    for name, function in _functions(package):
        needed = inspect.signature(function).parameters.values()
        if any(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in needed):
            continue
        longest[function] = max(name, longest.get(function, ""), key=lambda text: (len(text), text))
    return {name: function for function, name in sorted(longest.items(), key=lambda one: one[1])}


def _functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All functions of the modules of a package whose names are those of recipes; modules that make
    parts of recipes aside."""
    top = importlib.import_module(package)
    modules = [top] + [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(top.__path__, f"{package}.")
        if not re.search(r"\.(utils|common|environment)\b", info.name)
    ]
    names = {module.__name__ for module in modules}
    for module in modules:
        for name, function in vars(module).items():
            if not name.endswith("_config") or name.startswith("_"):
                continue
            if inspect.isfunction(function) and function.__module__ in names:
                yield name, function


def recipe(name: str) -> Any:
    """The recipe's configs, as they are before training settles them.

    Raises:
        ImportError: Megatron-Bridge is not installed.
        ValueError: it has no such recipe; the text names those that are like it.
    """
    known = [one for package in (LIBRARY, PERFORMANCE) for one in _functions(package)]
    for other, function in known:
        if other == name:
            return function()
    near = difflib.get_close_matches(name, {other for other, _ in known}, n=3)
    like = f"; like it are {', '.join(near)}" if near else ""
    raise ValueError(f"Megatron-Bridge has no recipe {name}{like}")


def settle(config: Any, ranks: int) -> None:
    """Do what Megatron-Bridge does first when it trains: types, and what overlaps.

    Args:
        config: of a recipe; it is changed.
        ranks: of the job.
    """
    precision = config.mixed_precision
    if isinstance(precision, str):
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        precision = config.mixed_precision = get_mixed_precision_config(precision)
    if precision is not None:
        precision.finalize()
        precision.setup(config.model, config.optimizer, config.ddp)
    if config.comm_overlap is not None:
        split = _split(config.model, ranks)
        config.comm_overlap.data_parallel_size = len(split.groups("dense")[0])
        config.comm_overlap.finalize()
        config.comm_overlap.setup(config.model, config.optimizer, config.ddp)
    if config.ddp.use_distributed_optimizer or config.optimizer.use_distributed_optimizer:
        config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    if config.ddp.overlap_param_gather or config.optimizer.overlap_param_gather:
        config.ddp.overlap_param_gather = config.optimizer.overlap_param_gather = True


def judge(config: Any, machines: Machines) -> Verdict:
    """What the flags would do for a recipe.

    Args:
        config: of the recipe; it is settled here.
        machines: that the job runs on.

    Raises:
        ValueError: the ranks cannot be split as the recipe wants.
    """
    settle(config, machines.world)
    dist = getattr(config, "dist", None)
    fully = config.ddp.use_megatron_fsdp or getattr(dist, "use_megatron_fsdp", False)
    wrapper = "Megatron-FSDP" if fully else ""
    if getattr(dist, "use_torch_fsdp2", False):
        wrapper = "torch FSDP2"
    optimizer_refused = _refused(config, wrapper, dpu_optimizer=True)
    training = _training(config, machines)
    return Verdict(
        refused=_refused(config, wrapper),
        optimizer_refused=optimizer_refused,
        left=refusals.left_by(wrapper, config.ddp) if wrapper else "",
        training=training,
        advice=None if wrapper else advise(training, machines.network, optimizer_refused),
    )


def _refused(config: Any, wrapper: str, **flags: bool) -> str:
    ddp = copy.copy(config.ddp)
    vars(ddp).update(use_dpu_reduce=True, **flags)
    try:
        refusals.validate_ddp_config(ddp)
        refusals.validate_model_config(config.model, ddp)
        if ddp.dpu_optimizer:
            refusals.validate_optimizer_config(config.optimizer)
    except ValueError as error:
        return str(error)
    if wrapper and ddp.dpu_optimizer:
        return f"--dpu-optimizer does not work with {wrapper}"
    return ""


def _split(model: Any, ranks: int) -> Parallelism:
    return Parallelism(
        world=ranks,
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        context=model.context_parallel_size,
        expert=model.expert_model_parallel_size or 1,
        expert_tensor=model.expert_tensor_parallel_size,
        experts=getattr(model, "num_moe_experts", None) or 0,
    )


def _training(config: Any, machines: Machines) -> Training:
    model, ddp = config.model, config.ddp
    half = bool(model.bf16 or model.fp16)
    return Training(
        kinds=kinds_of(
            *(_split(model, machines.world), parameters.count(model), machines),
            config.optimizer.optimizer,
        ),
        gradient_bytes=2 if half and not ddp.grad_reduce_in_fp32 else 4,
        parameter_bytes=1 if ddp.fp8_param_gather else 2 if half else 4,
        sharded=ddp.use_distributed_optimizer,
        instances=ddp.num_distributed_optimizer_instances,
        updated=ddp.dpu_optimizer,
        used=ddp.use_dpu_reduce,
        wire_bytes=wire_bytes(ddp.dpu_reduce_wire_dtype),
    )
