"""Megatron sums no gradient late that ``dpu_reduce/summed_later.py`` does not know.

Which gradients ``finalize_model_grads`` sums or scales it decides as it goes; `SummedLater` repeats
the decision. Here the code of the assembled tree is read, and what it looks at is held against what
`SummedLater` looks at: a mark of a parameter, a part of its name, a step that it takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = "finalize_model_grads"
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
}

READ = ("param", "parameter", "model_module", "weight", "config")
"""Names of what it reads."""

NOT_A_CHOICE = {
    "grad": "where a gradient is",
    "main_grad": "where a gradient is",
    "requires_grad": "what is frozen is in no bucket",
    "use_megatron_fsdp": "refused",
    "data": "of a gradient",
    "timers": "of the log",
    "barrier_with_L1_time": "of the log",
    "qk_layernorm": "a model without it has no such names",
    "has_cond_embedder": "a model without it has no such marks",
    "flextron": "a model without it has no such marks",
    "share_embeddings_and_output_weights": "embeddings are taken to be shared by stages",
    "shared_embedding_or_output_weight": "an embedding or the output layer, by name",
    "position_embeddings": "an embedding, by name",
    "weight": "of an embedding",
    "pre_process": "the stage's part of the model",
    "mtp_num_layers": "which stages share an embedding",
    "is_gtp_weight_remat": "with shards of weights all gradients wait",
    "allreduce": "which group sums over shards: with them all gradients wait",
    "ddp_config": "of DDP",
}
"""What it reads of parameters, models and configs without choosing a gradient by it alone."""

NOT_OF_GRADIENTS = {
    "_update_router_expert_bias": "counts of tokens",
    "_update_router_qb_beta": "quantiles of a router",
    "reset_model_temporary_tensors": "counts of tokens",
}
"""Steps that leave gradients alone; what they read is theirs."""

STEPS = {
    "finish_grad_sync": "the sum that BytePS makes",
    "_allreduce_conditional_embedding_grads": "by its mark",
    "_allreduce_router_grads": "by its mark",
    "_allreduce_non_tensor_model_parallel_grads": "by marks and names",
    "_allreduce_replicated_grads_over_gtp_remat_group": "all gradients",
    "_allreduce_word_embedding_grads": "by name",
    "_allreduce_position_embedding_grads": "by name",
    "scale_gradients": "all gradients",
    **NOT_OF_GRADIENTS,
}
"""What it does to models or with collectives; how `SummedLater` knows whose gradients change."""


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Of a module, by name."""
    tree = ast.parse(source)
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def used(node: ast.AST, known: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """The functions of its module that a function names."""
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in known)


def reached(start: str, known: dict[str, ast.FunctionDef]) -> set[str]:
    """A function of a module, and those that it leads to."""
    found, left = set[str](), [start]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += used(known[name], known)
    return found


def named(node: ast.AST) -> str:
    """The name that an expression is; nothing for any other."""
    return node.id if isinstance(node, ast.Name) else ""


def looked_at(node: ast.AST) -> Iterator[str]:
    """Attributes that are asked for by ``getattr`` or ``hasattr``, all that are read of parameters,
    models and configs, and texts that are sought in names."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and named(one.func) in ("getattr", "hasattr"):
            yield from (str(a.value) for a in one.args[1:2] if isinstance(a, ast.Constant))
        elif isinstance(one, ast.Attribute) and named(one.value) in READ:
            yield one.attr
        elif isinstance(one, ast.Compare) and isinstance(one.left, ast.Constant):
            yield from (str(one.left.value) for op in one.ops if isinstance(op, ast.In))


def steps(known: dict[str, ast.FunctionDef]) -> set[str]:
    """What ``finalize_model_grads`` calls of model chunks, and of functions that lead to a
    collective or are handed the model."""
    found = set[str]()
    for call in ast.walk(known[TOP]):
        if not isinstance(call, ast.Call):
            continue
        name = named(call.func)
        if name in known:
            given = {n.id for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
            if "model" in given or any(sums(known[one]) for one in reached(name, known)):
                found.add(name)
        elif isinstance(call.func, ast.Attribute) and named(call.func.value) == "model_chunk":
            found.add(call.func.attr)
    return found


def sums(node: ast.AST) -> bool:
    """Whether there is a collective in it."""
    attributes = (n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return any(name in COLLECTIVES for name in attributes)


def unknown(upstream: str, ours: str) -> list[str]:
    """What upstream's module does or looks at, and ours does not."""
    known, mine = functions(upstream), ast.parse(ours)
    taken = steps(known)
    strange = [f"the step {name}" for name in sorted(taken - STEPS.keys())]
    left = {*taken - NOT_OF_GRADIENTS.keys()} & known.keys()
    seen = {what for step in left for one in reached(step, known) for what in looked_at(known[one])}
    covered = {*looked_at(mine), *NOT_A_CHOICE}
    covered |= {str(n.value) for n in ast.walk(mine) if isinstance(n, ast.Constant)}
    return strange + [f"the mark or name {what}" for what in sorted(seen - covered)]


@pytest.fixture
def upstream(tree: Path) -> str:
    return (tree / "megatron/core/distributed/finalize_model_grads.py").read_text()


@pytest.fixture
def ours(tree: Path) -> str:
    return (tree / "megatron/core/distributed/dpu_reduce/summed_later.py").read_text()


def test_every_sum_after_the_backward_pass_is_known(upstream: str, ours: str) -> None:
    assert unknown(upstream, ours) == []
    # The code was read: it is of this form, and takes these steps.
    assert steps(functions(upstream)) == STEPS.keys()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            'getattr(param, "sequence_parallel", False)',
            'getattr(param, "summed_over_experts", False)',
            "the mark or name summed_over_experts",
        ),
        ('"q_layernorm" in name', '"v_layernorm" in name', "the mark or name v_layernorm"),
        (
            "    _allreduce_word_embedding_grads(model, config, embd_group, pp_group)\n",
            "    _allreduce_bias_grads(model)\n",
            "the step _allreduce_bias_grads",
        ),
        ("model_chunk.scale_gradients(scaling)", "model_chunk.share(1)", "the step share"),
        ("config.sequence_parallel and", "config.split_norms and", "the mark or name split_norms"),
    ],
)
def test_a_sum_that_is_new_is_named(
    upstream: str, ours: str, before: str, after: str, said: str
) -> None:
    assert before in upstream
    new = upstream.replace(before, after)
    new += "\n\ndef _allreduce_bias_grads(model):\n    torch.distributed.all_reduce(model)\n"
    assert said in unknown(new, ours)


@pytest.mark.parametrize("forgotten", ["sequence_parallel", "k_layernorm", "pipeline_parallel"])
def test_what_we_forget_is_named(upstream: str, ours: str, forgotten: str) -> None:
    said = unknown(upstream, ours.replace(f'"{forgotten}"', '"nothing"'))
    assert said == [f"the mark or name {forgotten}"]
