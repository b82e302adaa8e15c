"""The CPU platform: when it is on, its defaults, refusals and replacements."""

from __future__ import annotations

import argparse
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.training import arguments, cpu_layers, cpu_platform

from scripts.prepare_data import Dataset
from tests.layouts.job import Job
from tests.megatron.training_jobs import Trained


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def present(value: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: value)

    return present


@pytest.fixture
def parse(
    clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Namespace]]:
    """Parses a command line like Megatron; removes the replacements at the end."""

    def parsed(*words: str) -> Namespace:
        clean_environment.setattr(sys, "argv", ["test", *words])
        return arguments.parse_args()

    yield parsed
    cpu_platform.stop()


@pytest.mark.parametrize(
    ("variable", "has_gpu", "wanted"),
    [
        (None, False, False),
        (None, True, False),
        ("", True, False),
        ("", False, False),
        ("1", True, True),
        ("1", False, True),
        ("0", False, False),
        ("0", True, False),
    ],
)
def test_when_it_is_wanted(
    clean_environment: pytest.MonkeyPatch,
    gpu: Callable[[bool], None],
    variable: str | None,
    has_gpu: bool,
    wanted: bool,
) -> None:
    gpu(has_gpu)
    if variable is not None:
        clean_environment.setenv("MEGATRON_CPU", variable)
    assert cpu_platform.is_wanted() is wanted


@pytest.mark.parametrize("junk", ["yes", "2", " 1", "true"])
def test_junk_is_an_error(clean_environment: pytest.MonkeyPatch, junk: str) -> None:
    clean_environment.setenv("MEGATRON_CPU", junk)
    with pytest.raises(ValueError, match=f"MEGATRON_CPU='{junk}'"):
        cpu_platform.is_wanted()


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ((), []),
        (("--context-parallel-size", "2"), ["context"]),
        (("--sequence-parallel",), ["sequence"]),
    ],
)
def test_sequences_are_split_where_asked_to(
    parse: Callable[..., Namespace],
    clean_environment: pytest.MonkeyPatch,
    words: tuple[str, ...],
    allowed: list[str],
) -> None:
    """Megatron's local layers, which train on a CPU, would refuse it."""
    clean_environment.setenv("MEGATRON_CPU", "1")
    called: list[str] = []
    for name in ("context", "sequence"):
        function = functools.partial(called.append, name)
        clean_environment.setattr(cpu_layers, f"allow_{name}_parallel", function)
    parse(*words)
    assert called == allowed


def test_every_default_is_an_argument_of_megatron() -> None:
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {action.dest: action.option_strings for action in parser._actions}
    for default in cpu_platform._required_defaults():
        assert default.flag in known[default.attribute]


def test_defaults_on_the_cpu(
    parse: Callable[..., Namespace],
    clean_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean_environment.setenv("MEGATRON_CPU", "1")
    args = parse()
    assert cpu_platform.is_active()
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")
    assert args.attention_backend == AttnBackend.unfused
    assert not args.gradient_accumulation_fusion
    lines = [line for line in capsys.readouterr().out.splitlines() if "training on the CPU" in line]
    assert len(lines) == 1 and "MEGATRON_CPU=1" in lines[0]
    assert "distributed_backend=gloo" in lines[0]
    parse()
    assert "training on the CPU" not in capsys.readouterr().out, "said once"


@pytest.mark.parametrize("has_gpu", [True, False], ids=["gpu", "broken driver"])
def test_nothing_happens_unasked(
    parse: Callable[..., Namespace], gpu: Callable[[bool], None], has_gpu: bool
) -> None:
    gpu(has_gpu)
    factory, device = torch.zeros, torch.cuda.current_device
    args = parse()
    assert not cpu_platform.is_active()
    assert (args.distributed_backend, args.transformer_impl) == ("nccl", "transformer_engine")
    assert torch.zeros is factory and torch.cuda.current_device is device


@pytest.mark.parametrize(
    "words",
    [
        ("--distributed-backend", "nccl"),
        ("--transformer-impl", "transformer_engine"),
        ("--attention-backend", "flash"),
        ("--cuda-graph-impl", "local"),
    ],
    ids=lambda words: words[0],
)
def test_a_contradiction_is_an_error(
    parse: Callable[..., Namespace], clean_environment: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    clean_environment.setenv("MEGATRON_CPU", "1")
    with pytest.raises(ValueError, match=f"{words[0]} {words[1]} needs a GPU"):
        parse(*words)
    assert not cpu_platform.is_active()


def test_saying_what_is_set_anyway_is_no_contradiction(
    parse: Callable[..., Namespace], clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv("MEGATRON_CPU", "1")
    parse("--distributed-backend", "gloo", "--no-rope-fusion", "--use-cpu-initialization")
    assert parse("--attention-backend", "local").attention_backend == AttnBackend.local


@pytest.fixture
def active(parse: Callable[..., Namespace], clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("MEGATRON_CPU", "1")
    parse()


@pytest.mark.usefixtures("active")
def test_stand_ins_and_their_removal() -> None:
    before = torch.zeros
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1], device="cuda:0").device.type == "cpu"
    assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.tensor([1], device="cpu", pin_memory=True).item() == 1
    assert torch.zeros(1, device="meta").device.type == "meta"
    tensor = torch.zeros(1)
    assert tensor.cuda() is tensor
    assert tensor.to("cuda").device.type == "cpu"
    assert tensor.to(torch.float64).dtype == torch.float64
    module = torch.nn.Linear(1, 1)
    assert module.cuda() is module
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
    tensor.record_stream(stream)
    assert torch.cuda.memory_allocated() == 0
    assert not torch.cuda.is_available()

    cpu_platform.stop()
    assert not cpu_platform.is_active()
    assert torch.zeros is not before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@pytest.mark.usefixtures("active")
def test_the_random_numbers_of_the_gpu_are_those_of_the_cpu() -> None:
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)

    tracker = random.CudaRNGStatesTracker()
    tracker.add("test", 11)
    outside = torch.get_rng_state()
    with tracker.fork("test"):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("test"):
        assert not torch.equal(torch.rand(3), inside), "the forked state moves on"


@pytest.mark.usefixtures("active")
def test_iterating_over_data_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    numbers: Any = [1, 2]  # Any sequence works here, although torch does not declare it.
    assert list(torch.utils.data.DataLoader(numbers, batch_size=None)) == [1, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_compiles_beside_them(run_job: Callable[..., Job]) -> None:
    job = run_job("compiles", 1)
    assert job.result(0) == (6.0, 1)


@pytest.mark.parametrize(("sizes", "waits"), [((3, 5), False), ((4, 0), True), ((2, 2), True)])
def test_tensors_of_any_size_are_gathered(
    run_job: Callable[..., Job], sizes: tuple[int, int], waits: bool
) -> None:
    for gathered in run_job("gathers", 2, sizes=sizes, waits=waits).results():
        expected = [[1.0] * sizes[0], [2.0] * sizes[1]]
        assert [each.tolist() for each in gathered] == expected


@pytest.mark.usefixtures("active")
def test_counts_of_tokens_are_numbers_of_the_host() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    counts = torch.tensor([3, 1])
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True).tolist() == [3, 1]
    assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True), np.ndarray)
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_megatron_trains_evaluates_and_logs_on_a_cpu(train: Callable[..., Trained]) -> None:
    run = train("--eval-iters", "1", "--eval-interval", "2", "--split", "80,20,0", "--swiglu")
    log = run.job.log_of(1).read_text()  # Megatron logs losses on the last rank.
    assert run.losses[-1] < run.losses[0]
    assert log.count("validation loss at iteration") >= 2
    assert f"lm loss: {run.losses[-1]:.6E}" in log


def test_switched_off_megatron_says_that_it_needs_cuda(
    run_job: Callable[..., Job], dataset: Dataset
) -> None:
    job = run_job(
        "train",
        1,
        fails=True,
        arguments=["--data-path", str(dataset.prefix)],
        environment={"MEGATRON_CPU": ""},
    )
    assert "Megatron requires CUDA" in job.log_of(0).read_text()
