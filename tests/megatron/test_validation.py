"""Arguments that are incompatible with --use-dpu-reduce are refused by name; others are
accepted."""

from __future__ import annotations

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig, dpu_reduce
from megatron.core.distributed.dpu_reduce import bytepslib, parameters, server_checkpoint
from megatron.core.distributed.dpu_reduce.arguments import GONE
from megatron.training import arguments, cpu_platform

REFUSED = {
    "--inprocess-restart": (),
    "--fake-process-group": (),
}

ALLOWED = (
    ("--overlap-grad-reduce",),
    ("--ddp-bucket-size", "1000"),
    ("--ddp-average-in-collective",),
    ("--ddp-pad-buckets-for-high-nccl-busbw",),
    ("--ddp-param-name-patterns-for-fp32-local-accumulation", "all"),
    ("--accumulate-allreduce-grads-in-fp32",),
    ("--calculate-per-token-loss",),
    ("--num-experts", "4"),
    ("--use-tp-pp-dp-mapping",),
    ("--tensor-model-parallel-size", "2"),
    ("--pipeline-model-parallel-size", "2"),
    ("--expert-model-parallel-size", "2"),
    ("--expert-tensor-parallel-size", "2"),
    ("--context-parallel-size", "2"),
    ("--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "2"),
    ("--expert-tensor-parallel-size", "2", "--expert-tensor-parallel-num-weight-shards", "2"),
    ("--use-distributed-optimizer",),
    ("--fp8-param-gather",),
    ("--num-distributed-optimizer-instances", "2"),
    ("--overlap-param-gather",),
    ("--dpu-reduce-wire-dtype", "bf16"),
    ("--dpu-reduce-wire-dtype", "int8"),
    ("--dpu-optimizer", "--dpu-reduce-wire-dtype", "int8"),
    ("--dpu-optimizer", "--bf16", "--dpu-reduce-wire-dtype", "int4"),
    ("--dpu-reduce-wire-dtype", "int4", "--dpu-reduce-keep-bf16", "embedding", r"lora_.*"),
    ("--dpu-reduce-backend", "node-first"),
    ("--overlap-param-gather-with-optimizer-step",),
    ("--fp8-param-gather",),
    ("--fp4-param-gather",),
    ("--reuse-grad-buf-for-mxfp8-param-ag",),
    ("--use-nccl-ub",),
    ("--ddp-reduce-scatter-with-fp32-accumulation",),
    ("--optimizer", "dist_muon"),
    ("--cuda-graph-impl", "full_iteration"),
    ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"),
    ("--tensor-parallel-num-weight-shards", "2"),
    ("--use-megatron-fsdp",),
    ("--use-torch-fsdp2",),
)

OPTIMIZER_REFUSED = {
    "--dpu-reduce-backend": ("collective",),
    "--optimizer": ("lion",),
    "--muon-scalar-optimizer": ("lion",),
    "--save-wgrads-interval": ("2",),
    "--qk-clip": (),
    "--use-megatron-fsdp": (),
    "--use-torch-fsdp2": (),
    "--tensor-parallel-num-weight-shards": ("2",),
    "--expert-tensor-parallel-num-weight-shards": ("2",),
}

OPTIMIZER_TAKES = {
    "--use-distributed-optimizer": (),
    "--num-distributed-optimizer-instances": ("2",),
    "--overlap-param-gather-with-optimizer-step": (),
    "--use-precision-aware-optimizer": (),
    "--optimizer-cpu-offload": (),
    "--optimizer-cuda-graph": (),
    "--fp8-param-gather": (),
    "--fp4-param-gather": (),
    "--reuse-grad-buf-for-mxfp8-param-ag": (),
}

OPTIMIZER_ALLOWED = (
    ("--fp16",),
    ("--fp16", "--loss-scale", "1024"),
    ("--mtp-num-layers", "1", "--mtp-detach-heads"),
    ("--ckpt-format", "torch"),
    ("--optimizer", "muon"),
    ("--optimizer", "adaptive_muon"),
)

CONFIG_REFUSED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_custom_fsdp": "--use-custom-fsdp",
}

SMALL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    *("--train-iters", "4", "--lr", "1e-2"),
)
"""Arguments that Megatron requires of any job."""


Parse = Callable[..., Namespace]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parses a command line like Megatron, on a machine with an assumed GPU."""
    monkeypatch.setattr(cpu_platform, "is_wanted", lambda: False)

    def parsed(*words: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["test", *words])
        return arguments.parse_args()

    return parsed


@pytest.fixture
def byteps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in module: validation only imports it, and uses the names of routes."""
    # These two modules are kept, whichever test runs first.
    assert bytepslib.routes.ROUTES and not bytepslib.fsdp.is_asked()
    monkeypatch.setitem(sys.modules, "byteps", ModuleType("byteps"))
    monkeypatch.setitem(sys.modules, "byteps.torch", ModuleType("byteps.torch"))
    vars(sys.modules["byteps"])["torch"] = sys.modules["byteps.torch"]


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(("flag", "values"), REFUSED.items(), ids=REFUSED)
def test_unsupported_flags_are_refused(parse: Parse, flag: str, values: tuple[str, ...]) -> None:
    args = parse("--use-dpu-reduce", flag, *values)
    shown = "=".join([flag, *values])
    pattern = rf"--use-dpu-reduce does not work with {re.escape(shown)}: \w.* Drop one of the two"
    with pytest.raises(ValueError, match=pattern):
        dpu_reduce.validate_args(args)
    with pytest.raises(parameters.NotMegatrons, match=pattern):
        parameters.parse([*SMALL, "--use-dpu-reduce", flag, *values], world=2)


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--optimizer", "dist_muon"), "optimizer", "muon"),
        (("--optimizer", "dist_muon"), "use_layer_wise_distributed_optimizer", True),
        (
            ("--optimizer", "muon", "--use-distributed-optimizer"),
            *("use_layer_wise_distributed_optimizer", True),
        ),
        (
            ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"),
            *("cuda_graph_impl", "full_iteration"),
        ),
        (("--enable-cuda-graph",), "cuda_graph_impl", "local"),
        (("--external-cuda-graph",), "cuda_graph_impl", "transformer_engine"),
    ],
)
def test_rules_see_arguments_as_megatron_has_renamed_and_derived_them(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], name: str, value: object
) -> None:
    """After the translation, each setting has a single name, whatever its name on the command line
    was."""
    seen: list[object] = []
    monkeypatch.setattr(dpu_reduce, "validate_args", lambda args: seen.append(getattr(args, name)))
    parameters.parse([*SMALL, "--no-check-for-nan-in-loss-and-grad", *words], world=2)
    assert seen == [value]


@pytest.mark.parametrize(("flag", "values"), REFUSED.items(), ids=REFUSED)
def test_not_refused_without_the_flag(parse: Parse, flag: str, values: tuple[str, ...]) -> None:
    dpu_reduce.validate_args(parse(flag, *values))


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize("words", ALLOWED, ids=lambda words: words[0])
def test_supported_flags_are_allowed(parse: Parse, words: tuple[str, ...]) -> None:
    dpu_reduce.validate_args(parse("--use-dpu-reduce", *words))


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(("flag", "values"), OPTIMIZER_REFUSED.items(), ids=OPTIMIZER_REFUSED)
def test_refused_with_the_optimizer_on_the_servers(
    parse: Parse, flag: str, values: tuple[str, ...]
) -> None:
    words = ("--use-dpu-reduce", flag, *values)
    dpu_reduce.validate_args(parse(*words))
    shown = re.escape("=".join([flag, *values]))
    with pytest.raises(ValueError, match=rf"--dpu-optimizer does not work with {shown}: \w"):
        dpu_reduce.validate_args(parse(*words, "--dpu-optimizer"))


def translated(args: Namespace) -> Namespace:
    """Translate arguments as the beginning of Megatron's own validation does."""
    dpu_reduce.translate_args(args)
    dpu_reduce.validate_args(args)
    return args


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(("flag", "values"), OPTIMIZER_TAKES.items(), ids=OPTIMIZER_TAKES)
def test_servers_do_what_a_recipe_has_ranks_do(
    parse: Parse, capsys: pytest.CaptureFixture[str], flag: str, values: tuple[str, ...]
) -> None:
    """The flag is switched off before values are derived from it. Only rank 0 logs this."""
    parsed = parse("--dpu-optimizer", flag, *values)
    args, elsewhere, without = (copy.copy(parsed) for _ in range(3))
    translated(args)
    changed = {name for name, value in vars(args).items() if value != getattr(parsed, name)}
    assert changed - {"main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"} == {
        "use_dpu_reduce",
        flag.removeprefix("--").replace("-", "_"),
    }
    assert args.num_distributed_optimizer_instances == 1 and not args.overlap_param_gather
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"--dpu-optimizer takes the place of {flag} (" in said
    elsewhere.rank = 1
    dpu_reduce.translate_args(elsewhere)
    assert capsys.readouterr().out == ""
    without.dpu_optimizer = False
    before = copy.copy(without)
    dpu_reduce.translate_args(without)
    assert vars(before) == vars(without)


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(
    ("reader", "says"),
    [
        ((), ""),
        (("--log-params-norm",), "--log-params-norm"),
        (("--check-weight-hash-across-dp-replicas-interval", "2"), "--check-weight-hash-across"),
    ],
)
def test_steps_return_while_parameters_come_down_unless_something_reads_them(
    parse: Parse, capsys: pytest.CaptureFixture[str], reader: tuple[str, ...], says: str
) -> None:
    args = translated(parse("--dpu-optimizer", "--overlap-param-gather", *reader))
    assert not args.overlap_param_gather
    assert getattr(args, "dpu_optimizer_overlap", False) is not bool(reader)
    said = capsys.readouterr().out
    assert (says in said and "steps wait for all parameters" in said) if reader else said == ""


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(
    ("words", "by_layer"),
    [
        (("--optimizer", "muon"), False),
        (("--optimizer", "muon", "--use-distributed-optimizer", "--overlap-param-gather"), True),
        (("--optimizer", "dist_muon", "--overlap-param-gather"), True),
    ],
)
def test_matrices_stay_on_the_ranks_with_muon(words: tuple[str, ...], by_layer: bool) -> None:
    """With Muon, matrices are split over ranks by layer, and gradient buffers are not sharded."""
    args = parameters.parse([*SMALL, "--dpu-optimizer", *words], world=2)
    assert args.optimizer == "muon" and not args.use_distributed_optimizer
    assert args.use_layer_wise_distributed_optimizer is by_layer
    assert args.use_layer_wise_param_layout is not by_layer and not args.overlap_param_gather
    assert args.dpu_optimizer_matrices is False
    plain = parameters.parse([*SMALL, "--dpu-optimizer"], world=2)
    assert not hasattr(plain, "dpu_optimizer_matrices")


@pytest.mark.parametrize(("optimizer", "matrices"), [("muon", True), ("adam", False)])
def test_a_model_that_is_not_wrapped_for_its_optimizer(optimizer: str, matrices: bool) -> None:
    from megatron.core.distributed.dpu_reduce import server_making
    from megatron.core.optimizer import OptimizerConfig

    ddp = DistributedDataParallelConfig(dpu_optimizer=True, dpu_optimizer_matrices=matrices)
    with pytest.raises(ValueError, match=rf"dpu_optimizer_matrices={not matrices}"):
        server_making.are_ranks_to_update(OptimizerConfig(optimizer=optimizer), ddp)


@pytest.mark.usefixtures("byteps")
def test_the_types_of_a_precision_aware_optimizer(parse: Parse) -> None:
    """The state is fp32; gradients keep their type."""
    dtypes = ("--bf16", "--exp-avg-dtype", "fp8", "--main-params-dtype", "fp16")
    plain = parse("--dpu-optimizer", "--use-precision-aware-optimizer", *dtypes)
    args = copy.copy(plain)
    args.main_grads_dtype = "bf16"
    translated(args)
    assert args.main_params_dtype == args.exp_avg_dtype == args.exp_avg_sq_dtype == torch.float32
    assert args.grad_reduce_in_bf16 and args.main_grads_dtype == torch.float32
    assert not translated(copy.copy(plain)).grad_reduce_in_bf16
    # Megatron refuses these two, and still does.
    plain.main_grads_dtype, plain.accumulate_allreduce_grads_in_fp32 = "bf16", True
    assert translated(plain).main_grads_dtype == "bf16"


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize("words", OPTIMIZER_ALLOWED, ids=" ".join)
def test_allowed_with_the_optimizer_on_the_servers(parse: Parse, words: tuple[str, ...]) -> None:
    translated(parse("--dpu-optimizer", *words))


@pytest.mark.usefixtures("byteps")
def test_the_optimizer_on_the_servers_needs(parse: Parse) -> None:
    assert translated(parse("--dpu-optimizer")).use_dpu_reduce
    assert DistributedDataParallelConfig(dpu_optimizer=True).use_dpu_reduce
    words = ("--use-dpu-reduce", "--dpu-optimizer", "--dpu-reduce-wire-dtype", "bf16")
    with pytest.raises(ValueError, match="wire-dtype=bf16 without --bf16"):
        dpu_reduce.validate_args(parse(*words))
    dpu_reduce.validate_args(parse(*words, "--bf16"))
    other = ("--use-dpu-reduce", "--dpu-optimizer", "--ckpt-format", "torch", "--save", "x")
    with pytest.raises(ValueError, match=r"--ckpt-format=torch: .* --no-save-optim"):
        dpu_reduce.validate_args(parse(*other))
    dpu_reduce.validate_args(parse(*other, "--no-save-optim"))


def test_a_checkpoint_of_another_form_is_refused() -> None:
    server_checkpoint.check_metadata({"distrib_optim_sharding_type": "fully_reshardable"})
    with pytest.raises(ValueError, match=r"form is 'dp_reshardable'.*fully-reshardable"):
        server_checkpoint.check_metadata({"distrib_optim_sharding_type": "dp_reshardable"})
    with pytest.raises(ValueError, match="form is 'none of the distributed optimizer'"):
        server_checkpoint.check_metadata(None)


def test_missing_byteps_is_an_error_of_the_arguments(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "byteps", None)
    monkeypatch.delitem(sys.modules, "byteps.torch", raising=False)
    args = parse("--use-dpu-reduce")
    with pytest.raises(RuntimeError, match=r"needs the package byteps .* Install it with"):
        dpu_reduce.validate_args(args)


@pytest.mark.parametrize(("name", "flag"), CONFIG_REFUSED.items(), ids=CONFIG_REFUSED)
def test_config_refused(name: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"--dpu-optimizer does not work with {flag}: "):
        DistributedDataParallelConfig(use_dpu_reduce=True, dpu_optimizer=True, **{name: True})
    DistributedDataParallelConfig(use_dpu_reduce=True, **{name: True})


def test_wire_dtype_needs_the_flag(parse: Parse) -> None:
    args = parse("--dpu-reduce-wire-dtype", "bf16")
    with pytest.raises(ValueError, match="--dpu-reduce-wire-dtype=bf16 needs --use-dpu-reduce"):
        dpu_reduce.validate_args(args)
    with pytest.raises(ValueError, match="--dpu-reduce-wire-dtype=bf16 needs --use-dpu-reduce"):
        DistributedDataParallelConfig(dpu_reduce_wire_dtype="bf16")


@pytest.mark.usefixtures("byteps")
def test_a_preset_stands_for_flags(parse: Parse) -> None:
    """A flag on the command line wins, before the preset and after it."""
    preset, four_bits = ("--dpu-preset", "own-hosts"), ("--dpu-reduce-wire-dtype", "int4")
    for given, wire in (
        (preset, "int8"),
        ((*preset, *four_bits), "int4"),
        ((*four_bits, *preset), "int4"),
    ):
        args = parse("--bf16", *given)
        assert args.use_dpu_reduce and args.dpu_optimizer and args.dpu_reduce_wire_dtype == wire
        dpu_reduce.validate_args(args)
    assert not parse().use_dpu_reduce and parse("--use-dpu-reduce").dpu_reduce_wire_dtype is None


@pytest.mark.parametrize("flag", GONE)
def test_a_flag_that_is_gone_is_an_error(
    parse: Parse, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """The error names the replacement, for any text after the flag."""
    for words in ((flag,), (flag, "1"), (f"{flag}=1",)):
        with pytest.raises(SystemExit):
            parse("--use-dpu-reduce", *words)
        assert f"{flag} is gone: {GONE[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dpu-reduce-keep-bf16", "x"), "--dpu-reduce-keep-bf16 needs .* int8 or int4"),
        (
            ("--dpu-reduce-wire-dtype", "int8", "--dpu-reduce-keep-bf16", "("),
            r"--dpu-reduce-keep-bf16: '\(' is no regular expression",
        ),
        (
            ("--dpu-reduce-wire-dtype", "int8", "--dpu-reduce-keep-bf16", "1024", "x", "2048"),
            "--dpu-reduce-keep-bf16: 1024 and 2048 are two numbers of bytes",
        ),
    ],
)
@pytest.mark.usefixtures("byteps")
def test_few_bits_are_refused_where_they_do_nothing(
    parse: Parse, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        dpu_reduce.validate_args(parse("--use-dpu-reduce", *words))


def test_unknown_wire_dtype() -> None:
    with pytest.raises(ValueError, match=r"--dpu-reduce-wire-dtype=int3 is not known; .* bf16"):
        DistributedDataParallelConfig(use_dpu_reduce=True, dpu_reduce_wire_dtype="int3")


def test_a_route_needs_the_flag_and_must_be_known(parse: Parse) -> None:
    with pytest.raises(ValueError, match="--dpu-reduce-backend=flat needs --use-dpu-reduce"):
        dpu_reduce.validate_args(parse("--dpu-reduce-backend", "flat"))
    with pytest.raises(ValueError, match="--dpu-reduce-backend=node-first needs --use-dpu-reduce"):
        DistributedDataParallelConfig(dpu_reduce_backend="node-first")
    with pytest.raises(ValueError, match=r"--dpu-reduce-backend=ring is not known; .* node-first"):
        DistributedDataParallelConfig(use_dpu_reduce=True, dpu_reduce_backend="ring")


def test_fully_sharded_wrappers_say_that_they_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    dpu_reduce.fully_sharded(DistributedDataParallelConfig(), "a wrapper")
    assert not capsys.readouterr().out
    for _ in range(2):
        dpu_reduce.fully_sharded(DistributedDataParallelConfig(use_dpu_reduce=True), "a wrapper")
    printed = capsys.readouterr().out
    assert (
        printed.count("a wrapper shards gradients by reduce-scatters of its own: all of them") == 1
    )
    config = DistributedDataParallelConfig(use_dpu_reduce=True, dpu_optimizer=True)
    with pytest.raises(ValueError, match="--dpu-optimizer does not work with a wrapper"):
        dpu_reduce.fully_sharded(config, "a wrapper")


def test_replicas_of_a_sharded_model_go_through_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    joined: list[int] = []
    monkeypatch.setattr(
        bytepslib, "reductions", SimpleNamespace(joined=lambda: joined.append(1)), raising=False
    )
    config = DistributedDataParallelConfig(use_dpu_reduce=True)
    config.num_distributed_optimizer_instances = 4
    dpu_reduce.fully_sharded(config, "Megatron-FSDP")
    assert joined == [1] and "over 4 replicas goes through servers" in capsys.readouterr().out
    # The second implementation has no replicas, and a wrapper that shards these too has no
    # all-reduce.
    dpu_reduce.fully_sharded(config, "Megatron-FSDP 2")
    config.outer_dp_sharding_strategy = "optim"
    dpu_reduce.fully_sharded(config, "Megatron-FSDP")
    printed = capsys.readouterr().out
    assert joined == [1] and printed.count("all of them stay with torch.distributed") == 2


def test_the_flag_reaches_the_config(parse: Parse) -> None:
    from megatron.training.training import get_megatron_ddp_config

    for words, expected in (((), False), (("--use-dpu-reduce",), True)):
        args = parse(*words)
        args.megatron_fsdp_main_params_dtype = None
        assert get_megatron_ddp_config(args).use_dpu_reduce is expected
