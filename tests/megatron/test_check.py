"""The check of a user's arguments, without a GPU and without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.distributed.dpu_reduce import check, parameters, quantized
from megatron.core.distributed.dpu_reduce.layout import Parallelism

from tests.layouts.job import Job

RECIPE = (
    *("--num-layers", "12", "--hidden-size", "1536", "--num-attention-heads", "12"),
    *("--seq-length", "1024", "--max-position-embeddings", "1024", "--micro-batch-size", "1"),
    *("--train-iters", "10", "--lr", "1e-4", "--bf16", "--vocab-size", "50257"),
    *("--grad-reduce-in-bf16", "--overlap-grad-reduce"),
)
SHARDED = ("--use-distributed-optimizer", "--overlap-param-gather")
MACHINES = ("--hosts", "4", "--gpus-per-host", "2", "--link-gbps", "10")

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Check:
    """Asks for the check of arguments; returns its exit status and all that it printed."""

    def run(*words: str, machines: tuple[str, ...] = MACHINES) -> tuple[int, str]:
        status = check.main([*machines, "--", *words])
        told = capsys.readouterr()
        return status, told.out + told.err

    return run


def test_a_recipe_that_is_accepted(asked: Check) -> None:
    """16 bits x 418.8 million: 7/8 leave a host in a ring of eight ranks, all of it by servers."""
    status, text = asked(*RECIPE, *SHARDED)
    assert status == 0
    assert "--use-dpu-reduce: accepted" in text
    assert "dense gradients: 418.8 million per rank in 16 bits, reduced over 8 ranks on 4" in text
    lines = text.splitlines()
    plain = next(line for line in lines if line.startswith("torch.distributed"))
    assert plain.split()[1:] == ["nothing", "0.733", "GB", "0.733", "GB", "-", "1172.7", "1.00"]
    local = next(line for line in lines if "instances 4  " in line)
    assert local.split()[3:] == ["dense", "0.838", "GB", "-", "0.838", "GB", "670.1", "1.75"]
    assert lines[-1].startswith("Advice: shortest change for the best of these: add --use-dpu")


def test_a_recipe_that_is_refused(asked: Check) -> None:
    status, text = asked(*RECIPE, "--inprocess-restart")
    assert status == 1
    assert "--use-dpu-reduce: refused. --use-dpu-reduce does not work with --inprocess-" in text


def test_a_fully_sharded_recipe_stays_with_its_collectives(asked: Check) -> None:
    words = [word for word in RECIPE if word != "--grad-reduce-in-bf16"]
    status, text = asked(*words, "--use-torch-fsdp2", "--untie-embeddings-and-output-weights",
                         "--no-gradient-accumulation-fusion")  # fmt: skip
    assert status == 0
    assert "torch FSDP2 reduces all gradients by itself" in text and "Advice" not in text
    status, text = asked(*words, "--use-megatron-fsdp", "--untie-embeddings-and-output-weights",
                         "--num-distributed-optimizer-instances", "2",
                         "--ckpt-format", "fsdp_dtensor")  # fmt: skip
    assert status == 0 and "over 2 replicas goes through servers" in text


def test_arguments_that_megatron_does_not_take(asked: Check) -> None:
    status, text = asked(*RECIPE, "--tensor-model-parallel-size", "3")
    assert status == 2 and text.startswith("Megatron does not take these arguments: world size (8)")
    status, text = asked(*RECIPE, "--lr", "much")
    assert status == 2 and "--lr" in text


def test_bad_use(asked: Check) -> None:
    status, text = asked(*RECIPE, machines=("--hosts", "0", "--link-gbps", "10"))
    assert status == 2 and text.strip() == "error: --hosts: there must be one at least"
    with pytest.raises(SystemExit):
        check.main([*MACHINES])


def test_groups_are_those_that_megatron_makes() -> None:
    """Two hosts of four: tensor parallelism inside a pair, experts over the pairs of a host."""
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
    """Keeps a multiple of a quarter, and what it was made of until somebody asks."""

    kept: torch.Tensor | None = None

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        return self.kept

    def clear_high_precision_init_val(self) -> None:
        self.kept = None


def test_quantized_parameters_begin_with_what_they_were_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    exact = torch.tensor([0.3, 0.6])
    parameter = _Fp8(torch.tensor([0.25, 0.5]))
    parameter.kept = exact
    other = torch.nn.Parameter(torch.zeros(2))
    monkeypatch.setattr(
        param_and_grad_buffer, "_param_uses_quantized_storage", lambda one: one is parameter
    )
    monkeypatch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda one: one.detach().clone())
    monkeypatch.setattr(
        fp8_utils,
        "copy_tensor_to_quantized_param",
        lambda one, values: one.data.copy_((values * 4).round() / 4),
    )
    codecs = quantized.codecs_of([parameter, other])
    assert list(codecs) == [parameter]
    assert torch.equal(codecs[parameter].read(), exact)
    assert torch.equal(codecs[parameter].read(), torch.tensor([0.25, 0.5])), "then as it is"
    codecs[parameter].write(torch.tensor([0.9, 0.1]))
    assert torch.equal(parameter.detach(), torch.tensor([1.0, 0.0]))


def test_latent_experts_and_next_tokens_are_counted() -> None:
    """Worked out by hand: 8 wide, 4 experts of 6 inside 4, a head for the token after next."""
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
