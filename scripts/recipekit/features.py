"""Features of a recipe that affect the path of its gradients, results per recipe, and their tables.

The tables are those of docs/results/recipes.md.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result for a functional test, an example, or a recipe of a library."""

    name: str
    hosts: int
    """Number of hosts of the recipe. Each has the recipe's number of GPUs."""
    refused: str = ""
    """Reason why ``--use-dpu-reduce`` is refused; empty if it is accepted."""
    optimizer_refused: str = ""
    """Reason why ``--dpu-optimizer`` is refused, with all other arguments unchanged."""
    reaches_servers: bool = False
    """Whether, on the recipe's hosts, a bucket goes to servers with ``--use-dpu-reduce`` alone."""
    most_hosts: int = 1
    """Largest number of hosts that a group of its dense gradients spans."""
    left: str = ""
    """Message that a wrapper shards gradients by itself; empty if none does."""
    features: tuple[str, ...] = ()
    """Names of the recipe's FEATURES."""
    not_read: str = ""
    """Error of Megatron or Megatron-Bridge if it rejects the recipe here."""


_RESULTS = ("correctness.md", "recipes.md")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Setting that affects gradients, and the layouts in which it was compared with all-reduce."""

    name: str
    is_used: Callable[[Mapping[str, Any]], bool]
    """Function of a setup, as `setup_of_arguments` returns it, that says whether the feature is
    used."""
    rows: tuple[str, ...] = ()
    """Layouts in the tables of correctness, those of Transformer Engine first. Empty: the feature
    cannot run here."""


def _is(name: str, value: object = True) -> Callable[[Mapping[str, Any]], bool]:
    return lambda setup: bool(setup.get(name) == value)


def _above(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda setup: (setup.get(name) or 1) > 1


FEATURES: tuple[Feature, ...] = (
    Feature(name="Transformer Engine", is_used=_is("te"), rows=("te-dp2",)),
    Feature(name="local layers", is_used=_is("te", False), rows=("dp2",)),
    Feature(name="tensor parallelism", is_used=_above("tensor"),
            rows=("te-tp2-dp2-overlap", "tp2-dp2-overlap")),
    Feature(name="pipeline", is_used=_above("pipeline"), rows=("pp2-dp2-tied-acc2",)),
    Feature(name="virtual stages", is_used=_above("virtual"), rows=("pp2-vpp2-dp2-overlap-acc4",)),
    Feature(name="context parallelism", is_used=_above("context"),
            rows=("te-cp2-overlap", "cp2-overlap")),
    Feature(name="expert parallelism", is_used=_above("expert"),
            rows=("te-ep2-dp2-overlap", "ep2-dp2")),
    Feature(name="alltoall dispatcher", is_used=_is("dispatcher", "alltoall"),
            rows=("te-ep2-dp2-overlap", "ep2-dp2-alltoall-overlap-acc2")),
    Feature(name="flex dispatcher", is_used=_is("dispatcher", "flex")),
    Feature(name="distributed optimizer", is_used=_is("sharded"),
            rows=("te-dp2-do-overlap-gather", "dp2-do")),
    Feature(name="optimizer instances", is_used=_above("instances"), rows=("dp2-do-inst2",)),
    Feature(name="overlapped reductions", is_used=_is("overlap"),
            rows=("te-dp2-wire-overlap-acc2", "dp4-overlap")),
    Feature(name="overlapped gathering", is_used=_is("gather"),
            rows=("te-dp2-do-overlap-gather", "dp4-do-bf16-overlap-gather")),
    Feature(name="16-bit gradients", is_used=_is("gradients", 2),
            rows=("te-dp2-wire-overlap-acc2", "dp2-bf16-wire-overlap-acc2")),
    Feature(name="loss per token", is_used=_is("tokens"), rows=("dp2-token-loss-acc3",)),
    Feature(name="fp32 accumulation", is_used=_is("fp32_scatter"),
            rows=("dp2-do-bf16-wire-fp32-scatter-overlap",)),
    Feature(name="fp8, delayed", is_used=_is("fp8", "delayed"),
            rows=("te-dp2-fp8-delayed-overlap",)),
    Feature(name="fp8, tensorwise", is_used=_is("fp8", "tensorwise"),
            rows=("te-dp2-do-fp8-tensorwise-stored",)),
    Feature(name="fp8, blockwise", is_used=_is("fp8", "blockwise"),
            rows=("te-dp2-do-fp8-blockwise-stored",)),
    Feature(name="mxfp8", is_used=_is("fp8", "mxfp8")),
    Feature(name="fp4", is_used=_is("fp4")),
    Feature(name="fp8 parameters gathered", is_used=_is("stored"),
            rows=("te-dp2-do-fp8-tensorwise-stored",)),
    Feature(name="gradient buffer lent to parameters", is_used=_is("reuse")),
    Feature(name="buffers registered with NCCL", is_used=_is("nccl_ub")),
    Feature(name="CUDA graphs of Transformer Engine", is_used=_is("graphs", "transformer_engine"),
            rows=("te-dp2-graphs-te-overlap",)),
    Feature(name="CUDA graphs of each layer", is_used=_is("graphs", "local"),
            rows=("te-dp2-graphs-local-overlap",)),
    Feature(name="CUDA graph of a whole step", is_used=_is("graphs", "full_iteration"),
            rows=("te-dp2-graphs-full-overlap",)),
    Feature(name="precision-aware optimizer", is_used=_is("precision_aware"),
            rows=("te-dp2-do-precision-aware", "dp2-do-precision-aware-overlap")),
    Feature(name="Muon", is_used=_is("optimizer", "muon"), rows=("dp2-muon-overlap",)),
    Feature(name="layer-wise optimizer", is_used=_is("layer_wise"), rows=("dp2-do-muon-overlap",)),
    Feature(name="MLA", is_used=_is("mla"),
            rows=("te-dp2-mla-mtp-overlap", "dp2-mla-do-overlap")),
    Feature(name="multi-token prediction", is_used=_above("mtp"),
            rows=("te-dp2-mla-mtp-overlap", "dp2-mtp-overlap-acc2")),
    Feature(name="weight shards", is_used=_is("shards")),
)  # fmt: skip


def rows_of_results(docs: Path) -> set[str]:
    """Return the first cells of all result tables, which name the layouts that were run."""
    rows: set[str] = set()
    for name in _RESULTS:
        page = docs / "results" / name
        if page.is_file():
            rows |= set(re.findall(r"^\| ([a-z0-9][\w.+-]*) \|", page.read_text(), re.M))
    return rows


def row_of(feature: Feature, rows: set[str]) -> str:
    """Return the layout in which a feature was run; empty if there is none."""
    return next((row for row in feature.rows if row in rows), "")


def used(setup: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the features of a setup."""
    return tuple(feature.name for feature in FEATURES if feature.is_used(setup))


def setup_of_arguments(args: Any) -> dict[str, Any]:
    """Return the properties of Megatron's arguments that features use."""
    half = args.bf16 or args.fp16
    return {
        "te": args.transformer_impl == "transformer_engine",
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual": args.virtual_pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "dispatcher": args.moe_token_dispatcher_type if args.num_experts else "",
        "sharded": args.use_distributed_optimizer,
        "instances": args.num_distributed_optimizer_instances,
        "overlap": args.overlap_grad_reduce,
        "gather": args.overlap_param_gather,
        "gradients": 2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4,
        "tokens": args.calculate_per_token_loss,
        "fp32_scatter": args.ddp_reduce_scatter_with_fp32_accumulation,
        "fp8": args.fp8_recipe if args.fp8 else "",
        "fp4": bool(args.fp4),
        "stored": args.fp8_param_gather,
        "reuse": args.reuse_grad_buf_for_mxfp8_param_ag,
        "nccl_ub": args.nccl_ub,
        "graphs": args.cuda_graph_impl,
        "precision_aware": args.use_precision_aware_optimizer,
        "optimizer": args.optimizer,
        "layer_wise": args.use_layer_wise_distributed_optimizer,
        "mla": args.multi_latent_attention,
        "mtp": (args.mtp_num_layers or 0) + 1,
        "shards": args.gtp_weight_remat_size > 1 or args.expert_gtp_weight_remat_size > 1,
    }


def setup_of_recipe(config: Any) -> dict[str, Any]:
    """Return the properties of a recipe's configs that features use."""
    model, ddp, optimizer = config.model, config.ddp, config.optimizer
    half = bool(model.bf16 or model.fp16)
    graphs = model.cuda_graph_impl or "none"
    return {
        "te": (getattr(model, "transformer_impl", None) or "transformer_engine") != "local",
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size,
        "dispatcher": model.moe_token_dispatcher_type if model.num_moe_experts else "",
        "sharded": ddp.use_distributed_optimizer,
        "instances": ddp.num_distributed_optimizer_instances,
        "overlap": ddp.overlap_grad_reduce,
        "gather": ddp.overlap_param_gather,
        "gradients": 2 if half and not ddp.grad_reduce_in_fp32 else 4,
        "tokens": model.calculate_per_token_loss,
        "fp32_scatter": ddp.reduce_scatter_with_fp32_accumulation,
        "fp8": model.fp8_recipe if model.fp8 else "",
        "fp4": bool(model.fp4),
        "stored": ddp.fp8_param_gather,
        "reuse": ddp.reuse_grad_buf_for_mxfp8_param_ag,
        "nccl_ub": ddp.nccl_ub,
        "graphs": graphs,
        "precision_aware": optimizer.use_precision_aware_optimizer,
        "optimizer": str(optimizer.optimizer).removeprefix("dist_"),
        "layer_wise": str(optimizer.optimizer) == "dist_muon",
        "mla": model.multi_latent_attention,
        "mtp": (model.mtp_num_layers or 0) + 1,
        "shards": False,
    }


MARKS = ("counts", "features", "refused")


def write(
    page: Path, outcomes: Mapping[str, Sequence[Outcome]], sources: Mapping[str, str]
) -> None:
    """Write the tables of these kinds of recipes into the page. Other text is unchanged.

    Args:
        page: page that has a mark for each table.
        outcomes: outcomes of each kind, in the order of the tables.
        sources: origin of the recipes of each kind.

    Raises:
        ValueError: a mark is missing in the page.
    """
    rows = rows_of_results(page.parents[1])
    text = page.read_text()
    for mark, table in zip(
        MARKS,
        (_counts(outcomes, sources, rows), _features(outcomes, rows), _refused(outcomes)),
        strict=True,
    ):
        begin, end = f"<!-- {mark}: ", "<!-- end -->"
        if text.count(begin) != 1:
            raise ValueError(f"{page} has no mark {begin.strip()}")
        head, rest = text.split(begin)
        note, _, tail = rest.partition("-->\n")
        text = f"{head}{begin}{note}-->\n{table}\n{end}{tail.split(end, 1)[1]}"
    page.write_text(text)


def _counts(
    outcomes: Mapping[str, Sequence[Outcome]], sources: Mapping[str, str], rows: set[str]
) -> str:
    head = (
        *("recipes", "from", "number", "accepted", "accepted with `--dpu-optimizer`"),
        *("a bucket goes to servers", "dense gradients on 3 hosts or more", "run"),
    )
    lines = []
    for kind, all_of_kind in outcomes.items():
        known = [outcome for outcome in all_of_kind if not outcome.not_read]
        accepted = [outcome for outcome in known if not outcome.refused]
        lines.append(
            (
                *(kind, sources[kind], str(len(known))),
                _part(len(accepted), known),
                _part(sum(not outcome.optimizer_refused for outcome in known), known),
                str(sum(outcome.reaches_servers for outcome in accepted)),
                str(sum(outcome.most_hosts > 2 for outcome in known)),
                _part(sum(was_run(outcome, rows) for outcome in accepted), known),
            )
        )
    return _table(head, lines)


def was_run(outcome: Outcome, rows: set[str]) -> bool:
    """Return whether every feature that affects the recipe's gradients was run with servers."""
    by_name = {feature.name: feature for feature in FEATURES}
    return not outcome.left and all(row_of(by_name[name], rows) for name in outcome.features)


def _part(count: int, whole: Sequence[Outcome]) -> str:
    return f"{count} ({100 * count / len(whole):.1f} %)" if whole else "0"


def _features(outcomes: Mapping[str, Sequence[Outcome]], rows: set[str]) -> str:
    used = {
        kind: Counter(
            name for outcome in all_of_kind if not outcome.refused for name in outcome.features
        )
        for kind, all_of_kind in outcomes.items()
    }
    lines = [
        (
            feature.name,
            row_of(feature, rows) or "accepted, never run",
            *(str(used[kind][feature.name]) for kind in outcomes),
        )
        for feature in FEATURES
        if any(used[kind][feature.name] for kind in outcomes)
    ]
    return _table(("feature", "run in the layout", *outcomes), lines)


def _refused(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    counts: Counter[tuple[str, str, str]] = Counter()
    for kind, all_of_kind in outcomes.items():
        for outcome in all_of_kind:
            for flag, reason in (
                ("`--use-dpu-reduce`", outcome.refused),
                ("`--dpu-optimizer`", outcome.optimizer_refused),
                ("not read", outcome.not_read),
            ):
                if reason and not (flag == "`--dpu-optimizer`" and outcome.refused):
                    counts[kind, flag, _short(reason)] += 1
    lines = [
        (kind, flag, reason, str(count))
        for (kind, flag, reason), count in sorted(
            counts.items(),
            key=lambda item: (list(outcomes).index(item[0][0]), item[0][1], -item[1]),
        )
    ]
    return _table(("recipes", "flag", "why", "number"), lines)


def _short(reason: str) -> str:
    """Shorten a reason: remove common parts, and characters that break a table."""
    text = re.sub(r"^--[\w-]+ does not work with ", "", reason)
    text = re.sub(r" Drop one of the two\.$", "", text)
    text = re.sub(r"'?https?://\S+", "the hub", " ".join(text.split()))
    text = re.sub(r"/(?:[\w.@+-]+/)+", "", text)  # removes paths of this machine
    return textwrap.shorten(text.replace("|", "/"), 90, placeholder=" …")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)
    )
