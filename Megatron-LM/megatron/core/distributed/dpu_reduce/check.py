# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What ``--use-dpu-reduce`` would do for a job, without a GPU: ``-h`` says how to ask.

Exit status: 0 the flag is accepted, 1 it is refused, 2 bad use, or arguments that Megatron itself
does not take.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import advice, bytepslib, parameters, refusals, replica_refusals
from .advice import Advice, Kind, Training, advise, wire_bytes
from .parameters import NotMegatrons, Parallelism, parse

if TYPE_CHECKING:
    from byteps.torch.routes import Network


_GBPS = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a job runs on."""

    hosts: int
    gpus_per_host: int
    nics: int
    """Of a host. NCCL uses all of them, and so does BytePS over TCP."""
    link_gbps: float
    """Of one NIC, each way."""
    servers: int
    """Machines with servers and no ranks."""
    server_link_gbps: float
    """Of such a machine's NICs together."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no size."""
        for name in ("hosts", "gpus_per_host", "nics"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: there must be one at least")
        if self.servers < 0:
            raise ValueError("--servers: there cannot be fewer than 0")
        for name in ("link_gbps", "server_link_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.hosts * self.gpus_per_host

    @property
    def network(self) -> Network:
        from byteps import cost_model

        rate = self.link_gbps * _GBPS
        return bytepslib.routes.Network(
            servers=cost_model.best_servers(self.hosts, self.servers),
            host_rate=self.nics * rate,
            server_rate=self.server_link_gbps * _GBPS,
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about a job."""

    refused: str
    """Why ``--use-dpu-reduce`` does not go with its arguments; empty: it does."""
    optimizer_refused: str
    """The same of ``--dpu-optimizer`` on top."""
    left: str
    """That a wrapper shards gradients by itself; empty: none does."""
    training: Training
    advice: Advice | None
    """None where a wrapper shards gradients by itself."""

    @property
    def reaches_servers(self) -> bool:
        """Whether ``--use-dpu-reduce`` alone sends a bucket to servers."""
        return self.advice is not None and bool(self.advice.ways[1].through_servers)


def judge(args: Any, machines: Machines) -> Verdict:
    """What the flags would do for a job.

    Args:
        args: Megatron's, checked by it.
        machines: that the job runs on.

    Raises:
        ValueError: the ranks cannot be split as the arguments want.
    """
    training = _training(args, machines)
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
        advice=None if left else advise(training, machines.network, optimizer_refused),
    )


def _refused(args: Any, **flags: bool) -> str:
    asked = copy.copy(args)
    vars(asked).update(flags)
    try:
        refusals.refuse(asked)
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
    half = args.bf16 or args.fp16
    return Training(
        kinds=kinds_of(split, held, machines, args.optimizer),
        gradient_bytes=2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4,
        parameter_bytes=1 if args.fp8_param_gather else 2 if half else 4,
        sharded=bool(args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer),
        instances=args.num_distributed_optimizer_instances,
        updated=args.dpu_optimizer,
        used=args.use_dpu_reduce,
        wire_bytes=wire_bytes(args.dpu_reduce_wire_dtype),
    )


def kinds_of(
    split: Parallelism, held: parameters.Count, machines: Machines, optimizer: str
) -> tuple[Kind, ...]:
    """The gradients of a model that is split so: dense, and expert where they have groups of their
    own."""
    own, on_ranks = split.has_expert_groups, optimizer in replica_refusals.OF_MATRICES
    elements = held.dense if own else held.dense + held.expert
    dense = Kind(
        name="dense",
        groups=split.by_host("dense", machines.gpus_per_host),
        elements=elements,
        left=elements - held.embedding if on_ranks else 0.0,
    )
    if not own:
        return (dense,)
    groups = split.by_host("expert", machines.gpus_per_host)
    left = held.expert if on_ranks else 0.0
    return (dense, Kind(name="expert", groups=groups, elements=held.expert, left=left))


def render(verdict: Verdict, machines: Machines) -> str:
    """The verdict as text."""
    lines = []
    for flag, refused in (
        ("--use-dpu-reduce", verdict.refused),
        ("--dpu-optimizer", verdict.optimizer_refused),
    ):
        lines.append(f"{flag}: {f'refused. {refused}' if refused else 'accepted'}")
    if verdict.left:
        lines.append(verdict.left)
        return "\n".join(lines)
    servers = machines.network.servers
    gpus = f"{machines.gpus_per_host} GPU{'s' if machines.gpus_per_host > 1 else ''}"
    lines += [
        "",
        f"{machines.hosts} hosts with {gpus} and {machines.nics} x {machines.link_gbps:g} Gbit/s "
        f"each; servers: {servers.per_machine if servers.extra else 0} on each of {servers.extra} "
        f"machines with {machines.server_link_gbps:g} Gbit/s, {servers.local} on each host",
    ]
    for kind in verdict.training.kinds:
        members = max((len(hosts) for hosts in kind.groups), default=0)
        where = f"{kind.most_hosts} hosts" if kind.most_hosts > 1 else "one host"
        lines.append(
            f"{kind.name} gradients: {kind.elements / 1e6:,.1f} million per rank in "
            f"{'fp32' if verdict.training.gradient_bytes == 4 else '16 bits'}, reduced over "
            f"{members} ranks on {where}"
        )
    assert verdict.advice is not None
    lines += [
        "",
        "Bytes over a host's NICs each way, and over a server's, per step; times at best, nothing "
        "overlapping:",
        advice.compared(verdict.training, verdict.advice, machines.network),
        "",
        f"Advice: {advice.change(verdict.advice)}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.core.distributed.dpu_reduce.check",
        usage="%(prog)s --hosts N --link-gbps B [options] (--recipe NAME | -- ARGUMENTS)",
        description="Says whether --use-dpu-reduce and --dpu-optimizer are accepted, which "
        "gradients cross hosts, and what each flag gains. Needs no GPU, and builds no model.",
    )
    add = parser.add_argument
    add("--hosts", type=int, required=True, help="hosts with ranks")
    add("--gpus-per-host", type=int, default=8, metavar="G", help="default: 8")
    add("--nics", type=int, default=1, metavar="R", help="NICs per host (default: 1)")
    add("--link-gbps", type=float, required=True, metavar="B", help="of one NIC, each way")
    add("--servers", type=int, metavar="K", help="machines for servers (default: as --hosts)")
    add(
        "--server-link-gbps", type=float, metavar="B",
        help="of the NICs of one together (default: as --link-gbps)",
    )  # fmt: skip
    add("--blackwell", action="store_true", help="GPUs are of that architecture, not Hopper")
    add("--recipe", metavar="NAME", help="of Megatron-Bridge, which has to be installed")
    add("arguments", nargs="*", metavar="ARGUMENTS", help="of Megatron's training script")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Print the verdict. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(words)
    if bool(options.arguments) == bool(options.recipe):
        parser.error("give either Megatron's ARGUMENTS after --, or --recipe NAME")
    try:
        machines = Machines(
            hosts=options.hosts,
            gpus_per_host=options.gpus_per_host,
            nics=options.nics,
            link_gbps=options.link_gbps,
            servers=options.hosts if options.servers is None else options.servers,
            server_link_gbps=options.server_link_gbps or options.link_gbps,
        )
        if options.recipe:
            verdict = judge_recipe(recipe(options.recipe), machines)
        else:
            architecture = 10 if options.blackwell else 9
            args = parse(options.arguments, world=machines.world, architecture=architecture)
            verdict = judge(args, machines)
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


# The same for a recipe of Megatron-Bridge, which has configs and no arguments.


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


def judge_recipe(config: Any, machines: Machines) -> Verdict:
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
    optimizer_refused = _recipe_refused(config, wrapper, dpu_optimizer=True)
    training = _training_of_recipe(config, machines)
    return Verdict(
        refused=_recipe_refused(config, wrapper),
        optimizer_refused=optimizer_refused,
        left=refusals.left_by(wrapper, config.ddp) if wrapper else "",
        training=training,
        advice=None if wrapper else advise(training, machines.network, optimizer_refused),
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
        wire_bytes=wire_bytes(ddp.dpu_reduce_wire_dtype),
    )
