"""Arguments that do not go with --use-dpu-reduce are refused by name, the others are not."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

import pytest
from megatron.core.distributed import DistributedDataParallelConfig, dpu_reduce
from megatron.core.distributed.dpu_reduce import server_checkpoint
from megatron.training import arguments, cpu_platform

REFUSED = {
    "--use-megatron-fsdp": (),
    "--use-torch-fsdp2": (),
    "--fp4-param-gather": (),
    "--reuse-grad-buf-for-mxfp8-param-ag": (),
    "--ddp-reduce-scatter-with-fp32-accumulation": (),
    "--use-nccl-ub": (),
    "--tensor-parallel-num-weight-shards": ("2",),
    "--expert-tensor-parallel-num-weight-shards": ("2",),
    "--optimizer": ("dist_muon",),
    "--cuda-graph-impl": ("full_iteration",),
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
    ("--dpu-reduce-route", "node-first"),
    ("--overlap-param-gather-with-optimizer-step",),
)

OPTIMIZER_REFUSED = {
    "--use-distributed-optimizer": (),
    "--overlap-param-gather": (),
    "--fp16": (),
    "--loss-scale": ("1024.0",),
    "--dpu-reduce-route": ("collective",),
    "--optimizer": ("muon",),
    "--use-precision-aware-optimizer": (),
    "--optimizer-cpu-offload": (),
    "--save-wgrads-interval": ("2",),
    "--mtp-num-layers": ("1",),
    "--qk-clip": (),
}

CONFIG_REFUSED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_custom_fsdp": "--use-custom-fsdp",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "nccl_ub": "--use-nccl-ub",
    "fp4_param_gather": "--fp4-param-gather",
}


Parse = Callable[..., Namespace]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parses a command line as Megatron does, on a machine that is taken to have a GPU."""
    monkeypatch.setattr(cpu_platform, "is_wanted", lambda: False)

    def parsed(*words: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["test", *words])
        return arguments.parse_args()

    return parsed


@pytest.fixture
def byteps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that can be imported; validation asks for no more."""
    monkeypatch.setitem(sys.modules, "byteps", ModuleType("byteps"))
    monkeypatch.setitem(sys.modules, "byteps.torch", ModuleType("byteps.torch"))
    vars(sys.modules["byteps"])["torch"] = sys.modules["byteps.torch"]


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize(("flag", "values"), REFUSED.items(), ids=REFUSED)
def test_refused(parse: Parse, flag: str, values: tuple[str, ...]) -> None:
    args = parse("--use-dpu-reduce", flag, *values)
    shown = "=".join([flag, *values])
    pattern = rf"--use-dpu-reduce does not work with {re.escape(shown)}: \w.* Drop one of the two"
    with pytest.raises(ValueError, match=pattern):
        arguments.validate_args(args)


@pytest.mark.parametrize(("flag", "values"), REFUSED.items(), ids=REFUSED)
def test_not_refused_without_the_flag(parse: Parse, flag: str, values: tuple[str, ...]) -> None:
    dpu_reduce.validate_args(parse(flag, *values))


@pytest.mark.usefixtures("byteps")
@pytest.mark.parametrize("words", ALLOWED, ids=lambda words: words[0])
def test_allowed(parse: Parse, words: tuple[str, ...]) -> None:
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


@pytest.mark.usefixtures("byteps")
def test_the_optimizer_on_the_servers_needs(parse: Parse) -> None:
    with pytest.raises(ValueError, match="--dpu-optimizer needs --use-dpu-reduce"):
        dpu_reduce.validate_args(parse("--dpu-optimizer"))
    with pytest.raises(ValueError, match="clip=guess is not known; it can be speculate or wait"):
        DistributedDataParallelConfig(
            use_dpu_reduce=True, dpu_optimizer=True, dpu_optimizer_clip="guess"
        )
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
        arguments.validate_args(args)


@pytest.mark.parametrize(("name", "flag"), CONFIG_REFUSED.items(), ids=CONFIG_REFUSED)
def test_config_refused(name: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"--use-dpu-reduce does not work with {flag}: "):
        DistributedDataParallelConfig(use_dpu_reduce=True, **{name: True})
    DistributedDataParallelConfig(**{name: True})


def test_wire_dtype_needs_the_flag(parse: Parse) -> None:
    args = parse("--dpu-reduce-wire-dtype", "bf16")
    with pytest.raises(ValueError, match="--dpu-reduce-wire-dtype=bf16 needs --use-dpu-reduce"):
        arguments.validate_args(args)
    with pytest.raises(ValueError, match="--dpu-reduce-wire-dtype=bf16 needs --use-dpu-reduce"):
        DistributedDataParallelConfig(dpu_reduce_wire_dtype="bf16")


def test_unknown_wire_dtype() -> None:
    with pytest.raises(ValueError, match=r"--dpu-reduce-wire-dtype=int8 is not known; .* bf16"):
        DistributedDataParallelConfig(use_dpu_reduce=True, dpu_reduce_wire_dtype="int8")


def test_a_route_needs_the_flag_and_must_be_known(parse: Parse) -> None:
    with pytest.raises(ValueError, match="--dpu-reduce-route=flat needs --use-dpu-reduce"):
        arguments.validate_args(parse("--dpu-reduce-route", "flat"))
    with pytest.raises(ValueError, match="--dpu-reduce-route=node-first needs --use-dpu-reduce"):
        DistributedDataParallelConfig(dpu_reduce_route="node-first")
    with pytest.raises(ValueError, match=r"--dpu-reduce-route=ring is not known; .* node-first"):
        DistributedDataParallelConfig(use_dpu_reduce=True, dpu_reduce_route="ring")


def test_fully_sharded_wrappers_refuse() -> None:
    dpu_reduce.refuse_fsdp(DistributedDataParallelConfig())
    with pytest.raises(ValueError, match="fully sharded"):
        dpu_reduce.refuse_fsdp(DistributedDataParallelConfig(use_dpu_reduce=True))


def test_the_flag_reaches_the_config(parse: Parse) -> None:
    from megatron.training.training import get_megatron_ddp_config

    for words, expected in (((), False), (("--use-dpu-reduce",), True)):
        args = parse(*words)
        args.megatron_fsdp_main_params_dtype = None
        assert get_megatron_ddp_config(args).use_dpu_reduce is expected
