# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Forecasts what ``--use-dpu-reduce`` would do for a job, without a GPU: see ``-h``.

Exit status: 0 the flag is accepted, 1 it is refused, 2 bad use or arguments that Megatron rejects.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from byteps import sizing
from byteps.forecast import (
    WIRE_BYTES,
    Forecast,
    Kind,
    Machines,
    Training,
    answer,
    break_even,
    forecast,
    limit_text,
    servers_text,
    table,
)
from byteps.forecast.training import USE

from . import advice, parameters, refusals, replica_refusals, translations
from .parameters import NotMegatrons, Parallelism, parse


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the check of a job."""

    refused: str
    """Reason why ``--use-dpu-reduce`` is refused; empty if it is accepted."""
    optimizer_refused: str
    """Reason why ``--dpu-optimizer`` is refused in addition; empty if it is accepted."""
    left: str
    """Message that a wrapper shards gradients by itself; empty if no wrapper does."""
    training: Training
    forecast: Forecast | None
    """The forecast; None if a wrapper shards gradients by itself."""

    @property
    def reaches_servers(self) -> bool:
        """Return whether ``--use-dpu-reduce`` alone sends a bucket to servers."""
        if self.forecast is None:
            return False
        row = next(row for row in self.forecast.rows if row.flags == (USE,))
        return bool(row.through_servers)


def judge(args: Any, machines: Machines, accepts: str | None = None) -> Verdict:
    """Return what BytePS's flags would do for a job.

    Args:
        args: Megatron's arguments, validated.
        machines: machines of the job.
        accepts: wire dtype that the user accepts.

    Raises:
        ValueError: the ranks cannot be split as the arguments ask.
    """
    training = replace(_training(args, machines), accepts=accepts)
    left = next(
        (
            refusals.left_by(name, args)
            for attribute, name in (
                ("use_torch_fsdp2", "torch FSDP2"),
                ("use_megatron_fsdp", "Megatron-FSDP"),
            )
            if getattr(args, attribute, False)
        ),
        "",
    )
    optimizer_refused = _refused(args, use_dpu_reduce=True, dpu_optimizer=True)
    return Verdict(
        refused=_refused(args, use_dpu_reduce=True),
        optimizer_refused=optimizer_refused,
        left=left,
        training=training,
        forecast=None if left else forecast(training, machines, optimizer_refused),
    )


def _refused(args: Any, **flags: bool) -> str:
    checked = copy.copy(args)
    vars(checked).update(flags)
    try:
        refusals.refuse(checked)
    except ValueError as error:
        return str(error)
    return ""


def _training(args: Any, machines: Machines) -> Training:
    split = Parallelism(
        world=machines.world,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        experts=args.num_experts or 0,
        pipeline_last=not args.use_tp_pp_dp_mapping,
        weight_shards=getattr(args, "gtp_weight_remat_size", 1),
        expert_weight_shards=getattr(args, "expert_gtp_weight_remat_size", 1),
    )
    held = parameters.count(args)
    given: translations.Given = args.dpu_given  # by `parse`
    half = args.bf16 or args.fp16
    return Training(
        kinds=kinds_of(split, held, machines, args.optimizer),
        gradient_bytes=2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4,
        parameter_bytes=1 if args.fp8_param_gather else 2 if half else 4,
        sharded=bool(
            args.use_distributed_optimizer
            or args.use_layer_wise_distributed_optimizer
            or given.instances
        ),
        instances=given.instances or args.num_distributed_optimizer_instances,
        updated=args.dpu_optimizer,
        used=args.use_dpu_reduce,
        preset=given.preset,
        wire=args.dpu_reduce_wire_dtype,
        bf16=args.bf16,
        can_shard=args.optimizer == "adam",
        missing_overlaps=advice.missing_overlaps(args),
    )


def kinds_of(
    split: Parallelism, held: parameters.Count, machines: Machines, optimizer: str
) -> tuple[Kind, ...]:
    """Return the kinds of gradients of a model with this parallelism: "dense" and, if experts have
    data-parallel groups of their own, "expert"."""
    own, on_ranks = split.has_expert_groups, optimizer in replica_refusals.OF_MATRICES
    elements = held.dense if own else held.dense + held.expert
    dense = Kind(
        name="dense",
        groups=split.by_host("dense", machines.gpus),
        elements=elements,
        left=elements - held.embedding if on_ranks else 0.0,
    )
    if not own:
        return (dense,)
    groups = split.by_host("expert", machines.gpus)
    left = held.expert if on_ranks else 0.0
    return (dense, Kind(name="expert", groups=groups, elements=held.expert, left=left))


def render(verdict: Verdict, machines: Machines) -> str:
    lines = []
    for flag, refused in (
        ("--use-dpu-reduce", verdict.refused),
        ("--dpu-optimizer", verdict.optimizer_refused),
    ):
        lines.append(f"{flag}: {f'refused. {refused}' if refused else 'accepted'}")
    if verdict.left:
        lines.append(verdict.left)
        return "\n".join(lines)
    gpus = f"{machines.gpus} GPU{'s' if machines.gpus > 1 else ''}"
    spare = f" with {machines.server_gbps:g} Gbit/s" if machines.spare else ""
    lines += [
        "",
        f"{machines.hosts} {'hosts' if machines.hosts > 1 else 'host'} with {gpus} and "
        f"{machines.nics} x {machines.link_gbps:g} Gbit/s each; "
        f"{servers_text(machines.network.servers)}{spare}",
    ]
    for kind in verdict.training.kinds:
        members = max((len(hosts) for hosts in kind.groups), default=0)
        where = f"{kind.most_hosts} hosts" if kind.most_hosts > 1 else "one host"
        lines.append(
            f"{kind.name} gradients: {kind.elements / 1e6:,.1f} million per rank in "
            f"{'fp32' if verdict.training.gradient_bytes == 4 else '16 bits'}, reduced over "
            f"{members} ranks on {where}"
        )
    assert verdict.forecast is not None
    lines += [
        "",
        "Bytes over a host's NICs each way, and over a spare machine's, per step; times at best, "
        "nothing overlapping;",
        "how many times as fast as plain Megatron at its best, and as plain Megatron as it is now:",
        table(verdict.forecast),
        "",
        *filter(None, [break_even(verdict.forecast), limit_text(verdict.forecast, machines)]),
        f"Answer: {answer(verdict.forecast)}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-byteps check",
        usage="%(prog)s --hosts N --link-gbps B [options] (--recipe NAME | -- ARGUMENTS)",
        description="Says whether --use-dpu-reduce and --dpu-optimizer are accepted, which "
        "gradients cross hosts, and what each flag gains. Needs no GPU, and builds no model.",
        epilog="Example: megatron-byteps check --hosts 4 --link-gbps 25 -- --num-layers 32 "
        "... (the arguments of your pretrain_gpt.py)",
    )
    add = parser.add_argument
    sizing.add_machines(parser)
    add(
        "--machines", "--servers", type=int, default=0, metavar="K",
        help="spare machines for servers (default: 0, servers on the workers' hosts)",
    )  # fmt: skip
    add(
        "--wire", choices=tuple(WIRE_BYTES),
        help="type in which you accept that gradients are sent (default: 16 bits, or the job's)",
    )  # fmt: skip
    add("--blackwell", action="store_true", help="GPUs are of that architecture, not Hopper")
    add("--recipe", metavar="NAME", help="of Megatron-Bridge, which has to be installed")
    add("arguments", nargs="*", metavar="ARGUMENTS", help="of Megatron's training script")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Print the verdict and return the exit status."""
    parser = _parser()
    options = parser.parse_args(words)
    if bool(options.arguments) == bool(options.recipe):
        parser.error("give either Megatron's ARGUMENTS after --, or --recipe NAME")
    try:
        machines = sizing.machines_of(options, options.machines)
        if options.recipe:
            verdict = judge_recipe(recipe(options.recipe), machines, options.wire)
        else:
            architecture = 10 if options.blackwell else 9
            args = parse(options.arguments, world=machines.world, architecture=architecture)
            verdict = judge(args, machines, options.wire)
    except NotMegatrons as error:
        print(f"Megatron does not take these arguments: {error}", file=sys.stderr)
        return 2
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(verdict, machines))
    return 1 if verdict.refused else 0


if __name__ == "__main__":
    sys.exit(main())


# The check of a recipe of Megatron-Bridge, which has configs instead of arguments.


LIBRARY, PERFORMANCE = "megatron.bridge.recipes", "megatron.bridge.perf_recipes"
"""Packages that contain recipes."""


def recipes(package: str) -> Mapping[str, Callable[[], Any]]:
    """Return a package's recipes that need no argument, by name. A recipe with several names is
    listed under the longest one, which says most.

    Raises:
        ImportError: Megatron-Bridge is not installed.
    """
    longest: dict[Any, str] = {}
    for name, function in _functions(package):
        needed = inspect.signature(function).parameters.values()
        if any(
            parameter.default is parameter.empty and parameter.kind < parameter.VAR_POSITIONAL
            for parameter in needed
        ):
            continue
        longest[function] = max(name, longest.get(function, ""), key=lambda text: (len(text), text))
    return {name: function for function, name in sorted(longest.items(), key=lambda pair: pair[1])}


def _functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all recipe functions of a package's modules. Modules that only define parts of recipes
    are left out."""
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
    """Return the configs of a recipe. Training has not yet derived values from them.

    Raises:
        ImportError: Megatron-Bridge is not installed.
        ValueError: Megatron-Bridge has no such recipe; the text suggests similar names.
    """
    known = [
        named_function
        for package in (LIBRARY, PERFORMANCE)
        for named_function in _functions(package)
    ]
    for other, function in known:
        if other == name:
            return function()
    near = difflib.get_close_matches(name, {other for other, _ in known}, n=3)
    like = f"; like it are {', '.join(near)}" if near else ""
    raise ValueError(f"Megatron-Bridge has no recipe {name}{like}")


def settle(config: Any, ranks: int) -> None:
    """Derive types and overlap settings, as Megatron-Bridge does at the start of training.

    Args:
        config: configs of a recipe, which are changed in place.
        ranks: number of ranks of the job.
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


def judge_recipe(config: Any, machines: Machines, accepts: str | None = None) -> Verdict:
    """Return what BytePS's flags would do for a recipe.

    Args:
        config: configs of the recipe, which :func:`settle` changes.
        machines: machines of the job.
        accepts: wire dtype that the user accepts.

    Raises:
        ValueError: the ranks cannot be split as the recipe asks.
    """
    settle(config, machines.world)
    dist = getattr(config, "dist", None)
    fully = config.ddp.use_megatron_fsdp or getattr(dist, "use_megatron_fsdp", False)
    wrapper = "Megatron-FSDP" if fully else ""
    if getattr(dist, "use_torch_fsdp2", False):
        wrapper = "torch FSDP2"
    optimizer_refused = _recipe_refused(config, wrapper, dpu_optimizer=True)
    training = replace(_training_of_recipe(config, machines), accepts=accepts)
    return Verdict(
        refused=_recipe_refused(config, wrapper),
        optimizer_refused=optimizer_refused,
        left=refusals.left_by(wrapper, config.ddp) if wrapper else "",
        training=training,
        forecast=None if wrapper else forecast(training, machines, optimizer_refused),
    )


def _recipe_refused(config: Any, wrapper: str, **flags: bool) -> str:
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


def _training_of_recipe(config: Any, machines: Machines) -> Training:
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
        wire=ddp.dpu_reduce_wire_dtype,
        bf16=bool(model.bf16),
        can_shard=config.optimizer.optimizer == "adam",
        missing_overlaps=advice.missing_overlaps(ddp),
    )
