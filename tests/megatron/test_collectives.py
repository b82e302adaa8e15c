"""All collectives of Megatron over data-parallel ranks are on the list for replicas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.distributed.dpu_reduce.collectives import Over, collectives

from scripts.prepare_data import Dataset
from tests.layouts.job import Job, data_arguments

LISTED = {f"megatron.{collective.where}": collective for collective in collectives()}
_MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear "
RUNS = {
    "experts": (
        4,
        f"""{_MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
        --moe-z-loss-coeff 0.01 --expert-model-parallel-size 2 --moe-per-layer-logging
        --moe-token-dispatcher-type alltoall --use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather --log-num-zeros-in-grad --log-params-norm
        --calculate-per-token-loss --split 80,10,10 --eval-iters 1 --eval-interval 2
        --exit-duration-in-mins 100 --exit-signal-handler --timing-log-level 2
        --check-weight-hash-across-dp-replicas-interval 2""",
    ),
    "quantiles": (
        2,
        f"""{_MOE} --moe-router-load-balancing-type quantile_balancing --mtp-num-layers 1
        --moe-token-dispatcher-type allgather --position-embedding-type rope --bf16""",
    ),
    "instances": (
        4,
        f"""{_MOE} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01
        --moe-token-dispatcher-type alltoall --use-distributed-optimizer
        --num-distributed-optimizer-instances 2 --fp16 --initial-loss-scale 1024""",
    ),
    "muon": (2, "--optimizer muon --bf16 --tensor-model-parallel-size 1"),
}
"""Numbers of ranks, and arguments that together cover the collectives of training."""
MADE = {
    "experts": {"get_updated_expert_bias", "finalize_model_grads", "evaluate", "count_zeros_fp32"},
    "quantiles": {"_update_router_qb_beta"},
    "instances": {"get_tokens_per_expert_and_token_count"},
    "muon": {"train_step"},
}
"""Functions that must be seen. If one is not seen, the recording is broken."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "quantiles" else pytest.mark.thorough) for n in RUNS],
)
def test_what_training_calls_is_on_the_list(
    fork_server: None, dataset: Dataset, run_dir: Path, name: str
) -> None:
    ranks, words = RUNS[name]
    program = "tests.megatron.collective_programs:train_watched"
    arguments = [*data_arguments(dataset), *words.split()]
    job = Job(run_dir / "job", program, ranks, {"arguments": arguments, "environment": {}})
    job.run()
    seen = {where: callers for result in job.results() for where, callers in result.items()}
    unknown = {where: callers for where, callers in seen.items() if where not in LISTED}
    assert not unknown, "say in collectives.py what becomes of these with replicas"
    functions = {where.partition(":")[2].rpartition(".")[2] for where in seen}
    assert functions >= MADE[name]


# ------------------------------------------------------------------ the code, also parts that do
# not run


_OTHERS = (
    *("inference", "rl", "post_training", "resharding", "dist_checkpointing", "export"),
    *("fsdp", "models/mimo", "training/checkpointing.py", "core/parallel_state.py"),
)
"""Parts of Megatron that do not train with DDP, or that move a replica's own checkpoint."""
_CALLS = (
    *("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "broadcast"),
    *("all_gather_into_tensor", "all_gather_object", "all_to_all_single", "reduce"),
)


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Return all functions of a file by their qualified names."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from within(child, f"{name}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name + child.name, child
                yield from within(child, f"{name}{child.name}.<locals>.")
            else:
                yield from within(child, name)

    return within(ast.parse(path.read_text()), "")


def module_of(path: Path, tree: Path) -> str:
    return ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")


def test_the_list_names_functions_of_this_megatron(tree: Path) -> None:
    for where in LISTED:
        module, _, function = where.partition(":")
        path = tree / Path(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():  # The other Megatron of upstream.lock may have more functions.
            assert function in dict(functions(file)), where


def test_calls_with_a_data_parallel_group_are_on_the_list(tree: Path) -> None:
    """Search Megatron's source for calls that no run above makes. A new Megatron may have more of
    them."""
    unknown = []
    for folder in ("core", "training"):
        for path in sorted((tree / "megatron" / folder).rglob("*.py")):
            part = str(path.relative_to(tree / "megatron"))
            if "dpu_reduce" in part or any(f"/{other}" in f"/{part}" for other in _OTHERS):
                continue
            for name, function in functions(path):
                where = f"{module_of(path, tree)}:{name}"
                if where not in LISTED and _reduces_over_data(function):
                    unknown.append(where)
    assert not unknown


def _reduces_over_data(function: ast.AST) -> bool:
    body = list(ast.iter_child_nodes(function))
    while body:
        node = body.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        body += ast.iter_child_nodes(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        groups = [ast.unparse(word.value) for word in node.keywords if word.arg == "group"]
        if node.func.attr in _CALLS and any(
            part in group for group in groups for part in ("data_parallel", "dp_cp", "dp_group")
        ):
            return True
    return False


def test_what_is_refused_says_so() -> None:
    for collective in LISTED.values():
        assert (collective.refusal is not None) == (collective.over is Over.REFUSED), (
            collective.where
        )
