"""What is made of the arguments of Megatron's functional tests (tests/layouts/functional)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import functional_tests
from tests.layouts.functional import arguments, upstream
from tests.layouts.functional.arguments import CannotRun, Value, small
from tests.layouts.functional.rows import CASES, QUICK
from tests.layouts.gpt.outcome import Report

GIVEN: dict[str, Value] = {
    "--num-layers": "12",
    "--hidden-size": "512",
    "--num-attention-heads": "4",
    "--seq-length": "1024",
    "--micro-batch-size": "4",
    "--global-batch-size": "32",
    "--train-iters": "50",
    "--tensor-model-parallel-size": "2",
    "--data-path": "${DATA_PATH}/some",
    "--transformer-impl": "transformer_engine",
    "--swiglu": True,
}


def made(**changes: Value) -> str:
    return " ".join(small({**GIVEN, **_flags(changes)}).arguments) + " "


def _flags(changes: dict[str, Value]) -> dict[str, Value]:
    return {f"--{name.replace('_', '-')}": value for name, value in changes.items()}


def test_what_is_changed_and_what_stays() -> None:
    found = small(GIVEN)
    assert found.ranks == 4
    assert " ".join(found.arguments) == (
        "--eval-interval 1000 --eval-iters 0 --global-batch-size 32 --hidden-size 64 "
        "--micro-batch-size 4 --mock-data --num-attention-heads 4 --num-layers 2 --num-workers 0 "
        "--seq-length 32 --swiglu "
        "--tensor-model-parallel-size 2 --train-iters 4"
    )
    assert found.left_out == ()
    assert small({**GIVEN, "--moe-grouped-gemm": True}).left_out == ("--moe-grouped-gemm",)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"pipeline_model_parallel_size": "4", "num_layers_per_virtual_pipeline_stage": "1"}, 8),
        ({"pipeline_model_parallel_size": "4", "num_virtual_stages_per_pipeline_rank": "2"}, 8),
        ({"decoder_first_pipeline_num_layers": "2"}, 12),
        ({"moe_layer_freq": "([0]*3+[1]*9)"}, 12),
        ({"num_layers": "2"}, 2),
    ],
)
def test_layers(changes: dict[str, Value], layers: int) -> None:
    changes = {"tensor_model_parallel_size": "1", **changes}
    assert f"--num-layers {layers} " in made(**changes)


@pytest.mark.parametrize(("given", "batch"), [("32", 32), ("64", 64), ("128", 32), ("2", 8)])
def test_batches(given: str, batch: int) -> None:
    assert f"--global-batch-size {batch} " in made(global_batch_size=given)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"context_parallel_size": "2"}, 4),
        ({"pipeline_model_parallel_size": "2"}, 8),
        ({"expert_model_parallel_size": "4", "expert_tensor_parallel_size": "1"}, 4),
    ],
)
def test_two_ranks_sum(changes: dict[str, Value], ranks: int) -> None:
    assert small({**GIVEN, **_flags(changes)}).ranks == ranks


def test_the_format_that_megatron_demands() -> None:
    assert "--ckpt-format torch " in made(overlap_param_gather_with_optimizer_step=True)
    assert "--ckpt-format" not in made(ckpt_format="torch")


def test_experts_are_split_over_the_ranks_that_there_are() -> None:
    words = made(expert_model_parallel_size="8", expert_tensor_parallel_size="1")
    assert "--expert-model-parallel-size 4 " in words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8_format": "hybrid"}, "--fp8-format needs fp8 of Transformer Engine"),
        ({"context_parallel_size": "4"}, "4 ranks share a sequence"),
        ({"pipeline_model_parallel_size": "8"}, "32 ranks, more than 16"),
        ({"expert_tensor_parallel_size": "8"}, "on 8 ranks"),
        ({"recompute_modules": ("mlp", "moe_act")}, "moe_act needs Transformer Engine's experts"),
        (
            {"expert_model_parallel_size": "2", "num_distributed_optimizer_instances": "2"},
            "2 optimizer instances",
        ),
        ({"error_injection_rate": "100"}, "--error-injection-rate needs a launcher"),
    ],
)
def test_what_a_cpu_cannot_run_is_told(changes: dict[str, Value], said: str) -> None:
    with pytest.raises(CannotRun, match=said):
        small({**GIVEN, **_flags(changes)})


def test_no_flag_is_treated_twice() -> None:
    tables = [
        *(arguments.SMALLER, arguments.DATA, arguments.LENGTH, arguments.FILES),
        *(arguments.REPLACED, arguments.LEFT_OUT, arguments.REFUSED),
    ]
    flags = [flag for table in tables for flag in table]
    assert len(set(flags)) == len(flags)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Of a Megatron with some functional tests."""

    def test(name: str, *lines: str) -> None:
        file = tmp_path / "tests/functional_tests/test_cases" / name / "model_config.yaml"
        file.parent.mkdir(parents=True)
        given = [f"  {flag}: {str(value).lower()}" for flag, value in GIVEN.items()]
        file.write_text("\n".join(["MODEL_ARGS:", *given, *(f"  {one}" for one in lines)]))

    test("gpt/one")
    test("gpt/one_resumed", "--load: ${LOAD}", "--no-mmap-bin-files: true")
    test("gpt/inference_of_one")
    test("moe/lists", "--recompute-modules: '[mlp core_attn]'", "--seed: ${REPEAT}")
    test("t5/fp8", "--fp8-format: hybrid")
    test("multimodal/another")
    return tmp_path


def test_tests_of_a_checkout(checkout: Path) -> None:
    cases, cannot = upstream.cases_of(checkout)
    assert [(case.name, case.others) for case in cases] == [
        ("lists", ()),
        ("one", ("one_resumed",)),
    ]
    assert "--recompute-modules mlp core_attn --seed 1 " in " ".join(cases[0].arguments)
    assert list(cannot) == ["fp8"]
    with pytest.raises(ValueError, match="give a checkout of Megatron-LM"):
        upstream.cases_of(checkout / "tests")


def test_a_row_that_differs_from_its_test_is_told(checkout: Path) -> None:
    cases, _ = upstream.cases_of(checkout)
    assert upstream.strange(cases, cases) == []
    (one,) = (case for case in cases if case.name == "one")
    assert upstream.strange([one], [case for case in cases if case is not one]) == [
        "one: the checkout has no such test that a CPU can run"
    ]
    arguments = tuple("3" if word == "64" else word for word in one.arguments)
    row = type(one)(name="one_resumed", ranks=4, arguments=arguments)
    assert upstream.strange([row], cases) == [
        "one_resumed: the row has --hidden-size 3; the checkout has --hidden-size 64"
    ]


def test_rows_have_names_of_their_own() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) >= 40
    assert len(set(QUICK)) == 10 and names >= set(QUICK)


DOCUMENT = """# Tests

<!-- run: {by}; not to be edited by hand -->
<!-- end -->

<!-- not run: {by}; not to be edited by hand -->
<!-- end -->
"""


def test_the_command(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.layouts.functional import runs

    misses: list[str] = []

    def check(case: runs.Case, folder: Path) -> Report:
        return Report(layout=case, buckets=3, same_bits=not misses, misses=list(misses))

    monkeypatch.setattr(runs, "check", check)
    monkeypatch.setattr(functional_tests, "CASES", ())
    by = "made by `make functional MEGATRON=CHECKOUT MARKDOWN=docs/results/functional.md`"
    document = checkout / "functional.md"
    document.write_text(DOCUMENT.format(by=by))
    words = ["--megatron", str(checkout), "--markdown", str(document)]
    assert functional_tests.main(words) == 0
    text = document.read_text()
    assert "| one | 1 |  |" in text
    assert "| --fp8-format needs fp8 of Transformer Engine | 1 |" in text
    # A miss is told in its row, until the test meets again what is required.
    misses.append("other bits")
    assert functional_tests.main([*words, "--layout", "one"]) == 1
    assert "| one (MISS) | 1 |  |" in document.read_text()
    misses.clear()
    assert functional_tests.main([*words, "--layout", "one"]) == 0
    assert document.read_text() == text
    # A row that the checkout does not have is a failure.
    row = upstream.cases_of(checkout)[0][0]
    monkeypatch.setattr(functional_tests, "CASES", [type(row)(name="x", ranks=2, arguments=())])
    assert functional_tests.main(words[:2]) == 1
    assert "x: the checkout has no such test" in capsys.readouterr().err
    for wrong in (words[2:], ["--megatron", str(checkout / "tests")]):
        with pytest.raises(SystemExit) as stopped:
            functional_tests.main(wrong)
        assert stopped.value.code == 2
