"""The check of a user's arguments, without a GPU and a model; gradients that Megatron sums late;
and the cost of a plan."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from byteps import cli
from byteps.torch import engine, nodes
from byteps.torch import operations as rank_groups
from megatron.core.distributed.dpu_reduce import check, job, parameters, plan, server_buckets
from megatron.core.distributed.dpu_reduce.parameters import Parallelism

from tests.layouts.job import Job
from tests.megatron.made_up import MadeUp
from tests.pages import lines_with

RECIPE = (
    *("--num-layers", "12", "--hidden-size", "1536", "--num-attention-heads", "12"),
    *("--seq-length", "1024", "--max-position-embeddings", "1024", "--micro-batch-size", "1"),
    *("--train-iters", "10", "--lr", "1e-4", "--bf16", "--vocab-size", "50257"),
    *("--grad-reduce-in-bf16", "--overlap-grad-reduce"),
)
SHARDED = ("--use-distributed-optimizer", "--overlap-param-gather")
HOSTS = ("--hosts", "4", "--gpus-per-host", "2", "--link-gbps", "10")
MACHINES = (*HOSTS, "--servers", "4")

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def judged(capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks arguments; returns the exit status and the output."""

    def run(*words: str, machines: tuple[str, ...] = MACHINES) -> tuple[int, str]:
        status = check.main([*machines, "--", *words])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_the_command_is_this_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *MACHINES, "--", *RECIPE]) == 0
    assert "--use-dpu-reduce: accepted" in capsys.readouterr().out


PAGES = lines_with(r"pretrain_(?:dpu_)?gpt\.py .*--(?:use-)?dpu-")


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_flags_of_the_pages_are_accepted(judged: Check, words: list[str]) -> None:
    (program,) = (at for at, word in enumerate(words) if re.search(r"pretrain_\w*gpt\.py$", word))
    flags = [word for word in words[program + 1 :] if not word.isupper() and word != "--"]
    status, text = judged(*RECIPE, *flags)
    assert status == 0 and "accepted" in text, text


def test_a_recipe_that_is_accepted(judged: Check) -> None:
    """16 bits x 418.8 million parameters: 7/8 leave a host in a ring of eight ranks, all of it with
    servers."""
    status, text = judged(*RECIPE, *SHARDED)
    assert status == 0
    assert "--use-dpu-reduce: accepted" in text
    assert "dense gradients: 418.8 million per rank in 16 bits, reduced over 8 ranks on 4" in text
    lines = text.splitlines()
    (plain,) = (line for line in lines if line.startswith("plain Megatron, as it is"))
    now = ["nothing", "0.733", "GB", "0.733", "GB", "-", "1172.7", "0.86", "1.00"]
    assert plain.split()[5:-2] == now
    local = next(line for line in lines if line.startswith("--use-dpu-reduce --num"))
    assert local.split()[3:] == [
        "dense",
        "0.838",
        "GB",
        "-",
        "0.838",
        "GB",
        "670.1",
        "1.50",
        "1.75",
    ]
    own = "add --use-dpu-reduce --num-distributed-optimizer-instances 4 (1.50 x as fast as plain"
    assert lines[-1].startswith(f"Answer: in 16 bits or more: {own}")


def test_servers_on_the_hosts_are_the_default(judged: Check) -> None:
    """Require that the table, the line on servers and the answer agree."""
    status, text = judged(*RECIPE, *SHARDED, machines=HOSTS)
    assert status == 0 and "; servers: 1 on each of 4 hosts\n" in text
    assert "0 on each" not in text and "gain nothing" not in text
    int8 = "--dpu-preset own-hosts"
    line = next(line for line in text.splitlines() if line.startswith(int8))
    assert line.endswith("few bits; loss -0.21..+0.08 % (8 seeds)")
    assert line.split("few bits")[0].split()[-2:] == ["1.97", "2.30"]
    assert f"; with fewer bits: add {int8} (1.97 x)" in text.splitlines()[-1]
    _, text = judged(*RECIPE, *SHARDED, machines=(*HOSTS, "--wire", "int8"))
    assert f"Answer: in int8 or more: add {int8} (1.97 x as fast" in text


def test_a_recipe_with_the_preset(judged: Check) -> None:
    """The forecast knows the preset, and the flag that the preset has replaced."""
    status, text = judged(*RECIPE, *SHARDED, "--dpu-preset", "own-hosts", machines=HOSTS)
    assert status == 0
    answer = "Answer: in int8 or more: change nothing: what runs is 1.97 x as fast as plain"
    assert text.splitlines()[-1].startswith(answer)
    four = "--use-dpu-reduce --dpu-reduce-wire-dtype int4 --num-distributed-optimizer-instances 4"
    assert f"add {four} and drop --dpu-preset own-hosts (3.88 x)" in text
    _, text = judged(*RECIPE, "--dpu-preset", "own-hosts", "--qk-clip", machines=HOSTS)
    assert "--dpu-optimizer (of --dpu-preset own-hosts) does not work with --qk-clip" in text


def test_a_recipe_that_is_refused(judged: Check) -> None:
    status, text = judged(*RECIPE, "--inprocess-restart")
    assert status == 1
    assert "--use-dpu-reduce: refused. --use-dpu-reduce does not work with --inprocess-" in text


def test_a_fully_sharded_recipe_stays_with_its_collectives(judged: Check) -> None:
    words = [word for word in RECIPE if word != "--grad-reduce-in-bf16"]
    status, text = judged(*words, "--use-torch-fsdp2", "--untie-embeddings-and-output-weights",
                         "--no-gradient-accumulation-fusion")  # fmt: skip
    assert status == 0
    assert "torch FSDP2 reduces all gradients by itself" in text and "Advice" not in text
    status, text = judged(*words, "--use-megatron-fsdp", "--untie-embeddings-and-output-weights",
                         "--num-distributed-optimizer-instances", "2",
                         "--ckpt-format", "fsdp_dtensor")  # fmt: skip
    assert status == 0 and "over 2 replicas goes through servers" in text


def test_arguments_that_megatron_does_not_take(judged: Check) -> None:
    status, text = judged(*RECIPE, "--tensor-model-parallel-size", "3")
    assert status == 2 and text.startswith("Megatron does not take these arguments: world size (8)")
    status, text = judged(*RECIPE, "--lr", "much")
    assert status == 2 and "--lr" in text


def test_bad_use(judged: Check) -> None:
    status, text = judged(*RECIPE, machines=("--hosts", "0", "--link-gbps", "10"))
    assert status == 2 and text.strip() == "error: --hosts 0: there must be 1 to 65535"
    with pytest.raises(SystemExit):
        check.main([*MACHINES])


def test_groups_are_those_that_megatron_makes() -> None:
    """Two hosts have four ranks each; tensor parallelism is in pairs, experts over a host's
    pairs."""
    split = Parallelism(world=8, tensor=2, expert=2, expert_tensor=2, experts=4)
    assert split.groups("dense") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert split.groups("expert") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert split.by_host("dense", 4) == {(0, 0, 1, 1): 2}
    assert split.by_host("expert", 4) == {(0, 1): 4}
    assert split.has_expert_groups
    stages = Parallelism(world=8, pipeline=2)
    assert stages.by_host("dense", 4) == {(0,) * 4: 1, (1,) * 4: 1}
    mapped = Parallelism(world=8, pipeline=2, pipeline_last=False)
    assert mapped.by_host("dense", 4) == {(0, 0, 1, 1): 2}
    with pytest.raises(ValueError, match="8 ranks cannot be split by 3"):
        Parallelism(world=8, tensor=3)


def test_parameters_are_counted_as_a_model_has_them(fork_server: None, run_dir: Path) -> None:
    job = Job(run_dir / "counts", "tests.megatron.recipe_programs:core_counts", 1, {})
    job.run()
    counts = job.result(0)
    for name, (dense, expert, real_dense, real_expert) in counts.items():
        assert (dense, expert) == (real_dense, real_expert), name
    assert counts["experts"][3] > 0


class _Fp8(torch.nn.Parameter):
    """Stores a multiple of a quarter, and keeps the original value until it is read."""

    exact: torch.Tensor | None = None

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        return self.exact

    def clear_high_precision_init_val(self) -> None:
        self.exact = None


def test_quantized_parameters_begin_with_what_they_were_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    exact = torch.tensor([0.3, 0.6])
    parameter = _Fp8(torch.tensor([0.25, 0.5]))
    parameter.exact = exact
    other = torch.nn.Parameter(torch.zeros(2))
    monkeypatch.setattr(
        param_and_grad_buffer, "_param_uses_quantized_storage", lambda given: given is parameter
    )
    monkeypatch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda given: given.detach().clone())
    monkeypatch.setattr(
        fp8_utils,
        "copy_tensor_to_quantized_param",
        lambda given, values: given.data.copy_((values * 4).round() / 4),
    )
    codecs = server_buckets.codecs_of([parameter, other])
    assert list(codecs) == [parameter]
    assert torch.equal(codecs[parameter].read(), exact)
    assert torch.equal(codecs[parameter].read(), torch.tensor([0.25, 0.5])), "then as it is"
    codecs[parameter].write(torch.tensor([0.9, 0.1]))
    assert torch.equal(parameter.detach(), torch.tensor([1.0, 0.0]))


def test_latent_experts_and_next_tokens_are_counted() -> None:
    """Computed by hand: 8 wide, 4 experts of 6 inside 4, a head for the token after next."""
    model = Model()
    attention, norms = 4 * 64, 8
    experts = 4 * (4 * 12 + 6 * 4)
    layer = attention + norms + norms + 8 * 4 + 2 * 8 * 4
    head = layer + 3 * norms + 2 * 64
    count = parameters.count(model)
    assert count.expert == 3 * experts
    assert count.dense == 2 * layer + head + norms + 2 * 80


class Model:
    """Arguments of a small model."""

    num_layers, hidden_size, num_attention_heads, ffn_hidden_size = 2, 8, 2, 16
    num_experts, moe_layer_freq, moe_ffn_hidden_size, moe_latent_size = 4, 1, 6, 4
    mtp_num_layers, normalization, swiglu, add_bias_linear = 1, "RMSNorm", True, False
    padded_vocab_size, untie_embeddings_and_output_weights = 10, True
    tensor_model_parallel_size = pipeline_model_parallel_size = 1
    expert_model_parallel_size = expert_tensor_parallel_size = 1


# Every gradient that Megatron sums after the backward pass, in ``finalize_model_grads``, is known
# to ``dpu_reduce/summed_later.py``.


TOP = "finalize_model_grads"
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
}

READ = ("param", "parameter", "model_module", "weight", "config")
"""Variables of ``finalize_model_grads`` whose attributes may select a gradient."""

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
"""Attributes of parameters, models and configs that ``finalize_model_grads`` reads without
selecting a gradient by them."""

NOT_OF_GRADIENTS = {
    "_update_router_expert_bias": "counts of tokens",
    "_update_router_qb_beta": "quantiles of a router",
    "reset_model_temporary_tensors": "counts of tokens",
}
"""Steps that do not change gradients; their reads are ignored."""

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
"""Calls of finalize_model_grads on models or with collectives, and how `SummedLater` covers
them."""


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name."""
    tree = ast.parse(source)
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def used(node: ast.AST, known: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Return the functions of the same module that a function names."""
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in known)


def reached(start: str, known: dict[str, ast.FunctionDef]) -> set[str]:
    """Return a function of a module, and all functions that it reaches."""
    names, left = set[str](), [start]
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            left += used(known[name], known)
    return names


def named(node: ast.AST) -> str:
    """Return the name of an expression, or "" if it has no name."""
    return node.id if isinstance(node, ast.Name) else ""


def looked_at(node: ast.AST) -> Iterator[str]:
    """Return attributes read by ``getattr`` or ``hasattr``, attributes of parameters, models and
    configs, and texts searched in names."""
    for syntax in ast.walk(node):
        if isinstance(syntax, ast.Call) and named(syntax.func) in ("getattr", "hasattr"):
            yield from (str(a.value) for a in syntax.args[1:2] if isinstance(a, ast.Constant))
        elif isinstance(syntax, ast.Attribute) and named(syntax.value) in READ:
            yield syntax.attr
        elif isinstance(syntax, ast.Compare) and isinstance(syntax.left, ast.Constant):
            yield from (str(syntax.left.value) for op in syntax.ops if isinstance(op, ast.In))


def steps(known: dict[str, ast.FunctionDef]) -> set[str]:
    """Return calls of ``finalize_model_grads`` on model chunks, and of functions that lead to a
    collective or get the model."""
    called = set[str]()
    for call in ast.walk(known[TOP]):
        if not isinstance(call, ast.Call):
            continue
        name = named(call.func)
        if name in known:
            given = {n.id for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
            if "model" in given or any(sums(known[step]) for step in reached(name, known)):
                called.add(name)
        elif isinstance(call.func, ast.Attribute) and named(call.func.value) == "model_chunk":
            called.add(call.func.attr)
    return called


def sums(node: ast.AST) -> bool:
    """Return whether the code contains a collective."""
    attributes = (n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return any(name in COLLECTIVES for name in attributes)


def unknown(upstream: str, ours: str) -> list[str]:
    """Return actions or reads of upstream's module that this module does not cover."""
    known, own_tree = functions(upstream), ast.parse(ours)
    taken = steps(known)
    strange = [f"the step {name}" for name in sorted(taken - STEPS.keys())]
    left = {*taken - NOT_OF_GRADIENTS.keys()} & known.keys()
    seen = {
        what for step in left for name in reached(step, known) for what in looked_at(known[name])
    }
    covered = {*looked_at(own_tree), *NOT_A_CHOICE}
    covered |= {str(n.value) for n in ast.walk(own_tree) if isinstance(n, ast.Constant)}
    return strange + [f"the mark or name {what}" for what in sorted(seen - covered)]


@pytest.fixture
def upstream(tree: Path) -> str:
    return (tree / "megatron/core/distributed/finalize_model_grads.py").read_text()


@pytest.fixture
def ours(tree: Path) -> str:
    return (tree / "megatron/core/distributed/dpu_reduce/summed_later.py").read_text()


def test_every_sum_after_the_backward_pass_is_known(upstream: str, ours: str) -> None:
    assert unknown(upstream, ours) == []
    # The parser has understood the code, and found these steps in it.
    assert steps(functions(upstream)) == STEPS.keys()


# The cost of a plan and a push grows with the number of ranks, not with its square.


looks = 0
"""Number of uses of rank and host numbers: comparisons, and look-ups in sets and dictionaries."""


class Counted(int):
    """An integer that counts its uses."""

    def __eq__(self, other: object) -> bool:
        global looks
        looks += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        global looks
        looks += 1
        return int(self) < other

    def __hash__(self) -> int:
        global looks
        looks += 1
        return hash(int(self))


def planned(ranks: int, instances: int) -> tuple[int, Any]:
    """Return the uses that a plan takes, and its model."""
    global looks
    made_up = MadeUp(ranks=ranks, per_host=4, groups=3, elements=64 * ranks, instances=instances)
    model = made_up.model()
    for group in (model.dp_cp_group, model.buffers[0].data_parallel_group):
        group.ranks = [Counted(rank) for rank in group.ranks]
    with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
        assert job._job is not None
        job._job = replace(job._job, hosts=tuple(Counted(host) for host in job._job.hosts))
        looks = 0
        plan.register(model)
        return looks, model


@pytest.mark.parametrize("optimizer", ["whole", "sharded", "sharded in each host"])
def test_a_plan_looks_at_each_rank_a_few_times(optimizer: str) -> None:
    counts = []
    for ranks in (256, 512):
        instances = {"whole": 0, "sharded": 1}.get(optimizer, ranks // 4)
        counts.append(planned(ranks, instances)[0])
    assert counts[1] < 2.5 * counts[0], counts
    assert counts[1] < 512 * 3 * 100, counts


def test_a_push_of_a_known_group_does_not_look_at_its_ranks() -> None:
    made_up = MadeUp(ranks=4096, per_host=1, groups=1, elements=4096)
    group, tensor = tuple(range(4096)), torch.zeros(8)
    with (
        made_up.joined(),
        mock.patch.object(rank_groups, "ranks_of", wraps=rank_groups.ranks_of) as walked,
    ):
        for _ in range(50):
            engine.start(
                *(tensor, tensor),
                average=False,
                name="bucket",
                priority=0,
                group=group,
                placement=0,
            )
    assert walked.call_count == 1


def test_a_group_that_may_change_is_looked_at_each_time() -> None:
    group = [0, 1]
    assert len(rank_groups.engine_ranks(group)) == 2
    group.append(2)
    assert len(rank_groups.engine_ranks(group)) == 3
    known = rank_groups.RanksCache()
    for count in range(1, 2 * known.MOST):
        assert len(known.ranks(tuple(range(count)))) == count
    assert len(known._known) == known.MOST


def test_a_sum_inside_hosts_knows_what_it_pushes() -> None:
    made_up = MadeUp(ranks=64, per_host=4, groups=1, elements=64 * 64)
    model = made_up.model()
    with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
        plan.register(model)
        node_sum = model.buffers[0].buckets[0].dpu_reduce_op.node_whole
        assert isinstance(node_sum, nodes.NodeSum)
        first = node_sum.pushes(5, 4)
        assert node_sum.pushes(5, 4) is first
        assert {push.group for push in first} == {tuple(range(1, 64, 4))}
        assert len({id(push.group) for push in first}) == 1
        assert node_sum.pushes(6, 4) != first
