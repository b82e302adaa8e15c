"""Turns a functional test of Megatron into a small run on two CPU cores, and into a row of a table.

The data below say which arguments change, and why. All other arguments stay as they are in the
test.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.progress import aligned

from ..gpt.compare import compare
from ..gpt.layout import Report
from ..gpt.rows import STEPS, Family, Layout
from ..gpt.runs import train
from ..table import Table

Value = str | bool | Sequence[str]
"""True for a flag without a value; several words for a flag with several values."""

SMALLER = {
    "--hidden-size": 64,
    "--mup-base-hidden-size": 32,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 8,
    "--num-query-groups": 8,
    "--kv-channels": 8,
    "--q-lora-rank": 16,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 8,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 8,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--seq-length": 32,
    "--encoder-seq-length": 32,
    "--decoder-seq-length": 16,
    "--max-position-embeddings": 32,
    "--encoder-num-layers": 2,
    "--decoder-num-layers": 2,
}
"""Largest widths and the longest sequence of a small run."""

MICRO_BATCHES = 8
"""Largest number of micro-batches of a rank in a step. A test with more gets half as many as it
has, at least 1."""

PLACES_OF_LAYERS = (
    "--account-for-embedding-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--moe-layer-freq",
    "--pipeline-model-parallel-layout",
)
"""Flags that assign layers to pipeline stages. A test with any of them keeps its number of
layers."""

DATA = (
    *("--data-cache-path", "--data-path", "--fim-data", "--fim-rate", "--fim-spm-rate"),
    *("--make-vocab-size-divisible-by", "--merge-file", "--mock-data", "--no-mmap-bin-files"),
    *("--num-workers", "--split"),
    *("--tokenizer-model", "--tokenizer-type", "--vocab-file", "--vocab-size"),
)
"""Flags that mock data replace."""

LENGTH = (
    *("--eval-global-batch-size", "--eval-interval", "--eval-iters", "--exit-duration-in-mins"),
    *("--exit-interval", "--lr-decay-samples", "--lr-warmup-samples", "--train-iters"),
    *("--train-samples",),
)
"""Flags that set the length of a run. A small run makes a few steps and no evaluation."""

FILES = (
    *("--async-save", "--async-ckpt-use-cpu-shm", "--async-strategy", "--auto-detect-ckpt-format"),
    *("--ckpt-assume-constant-structure", "--ckpt-format", "--ckpt-fully-parallel-load"),
    *("--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable"),
    *("--dist-ckpt-strictness", "--finetune", "--load", "--no-ckpt-fully-parallel-save"),
    *("--no-load-optim", "--override-opt_param-scheduler", "--save", "--save-interval"),
    *("--save-retain-interval", "--tensorboard-dir", "--use-checkpoint-args"),
    *("--use-checkpoint-opt_param-scheduler", "--use-persistent-ckpt-worker"),
    *("--verify-integrity", "--wandb-entity", "--wandb-exp-name", "--wandb-project"),
    *("--wandb-save-dir",),
)
"""Flags of checkpoints and logs. A small run saves and loads nothing."""

REPLACED = {
    "--attention-backend": "unfused: other kernels of attention need a GPU",
    "--distributed-backend": "gloo: NCCL needs GPUs",
    "--no-persist-layer-norm": "so it is anyway",
    "--transformer-impl": "local: Transformer Engine needs a GPU",
}
"""Flags that a CPU cannot serve and for which ``MEGATRON_CPU=1`` has another value: the value and
the reason."""

LEFT_OUT = {
    "--apply-layernorm-1p": "Transformer Engine's norms",
    "--cp-comm-type": "Transformer Engine's attention",
    "--ddp-average-in-collective": "averages of NCCL",
    "--defer-embedding-wgrad-compute": "kernels of Apex",
    "--wgrad-deferral-limit": "kernels of Apex",
    "--delay-wgrad-compute": "Transformer Engine's layers",
    "--fine-grained-activation-offloading": "copies from a GPU",
    "--offload-modules": "copies from a GPU",
    "--moe-grouped-gemm": "Transformer Engine's experts",
    "--moe-permute-fusion": "kernels of Transformer Engine",
    "--moe-router-fusion": "kernels of Transformer Engine",
    "--use-flash-attn": "a kernel for GPUs",
}
"""Flags that a CPU cannot serve and that a small run omits: what each flag needs."""

REFUSED = {
    "--cuda-graph-impl": "CUDA graphs",
    "--error-injection-rate": "a launcher: a wrong result is made up, and the run stops itself",
    "--experimental-attention-variant": "attention of Transformer Engine, or for GPUs",
    "--export-kd-cfg": "a teacher's weights",
    "--fp8-format": "fp8 of Transformer Engine",
    "--moe-flex-dispatcher-backend": "DeepEP or HybridEP",
    "--sft": "data of its own",
    "--step-batch-size-schedule": "steps of millions of tokens",
    "--tp-comm-overlap": "Transformer Engine's layers",
    "--use-megatron-fsdp": "Megatron-FSDP, which sums gradients by itself",
    "--use-torch-fsdp2": "FSDP2, which sums gradients by itself",
    "--use-transformer-engine-op-fuser": "Transformer Engine's layers",
}
"""Flags that are the subject of a test and that a CPU cannot serve: what each flag needs."""

UNCUT = tuple(
    f"--{kind}-parallel-size"
    for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
"""Sizes that are 1 unless the test sets them."""

LARGEST = 16
"""Largest number of ranks of a run."""


class CannotRun(ValueError):
    """Raised for a test that a CPU cannot run. The text has the reason."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """A run that fits on two cores."""

    ranks: int
    arguments: tuple[str, ...]
    """Megatron's arguments, sorted by flag."""
    left_out: tuple[str, ...]
    """Flags of the test that a CPU cannot serve, and that are not among the arguments."""


def small(given: Mapping[str, Value]) -> Small:
    """Make a functional test's arguments (by flag) small.

    At most two ranks sum each gradient, so that there is a single right result: two data-parallel
    ranks, or one data-parallel rank of two context-parallel ranks.

    Raises:
        CannotRun: The test needs something that a CPU cannot do, or too many ranks.
    """
    for flag, needs in REFUSED.items():
        if flag in given:
            raise CannotRun(f"{flag} needs {needs}")
    modules = given.get("--recompute-modules", ())
    if not isinstance(modules, bool) and "moe_act" in modules:
        raise CannotRun("--recompute-modules moe_act needs Transformer Engine's experts")
    tp, pp, cp, ep = (int(str(given.get(flag, 1))) for flag in UNCUT)
    dp = 2 if cp == 1 else 1
    if dp * cp > 2:
        raise CannotRun(f"--context-parallel-size {cp}: more than two ranks sum each gradient")
    ranks = tp * pp * cp * dp
    if ranks > LARGEST:
        raise CannotRun(f"{ranks} ranks, more than {LARGEST}")
    etp = int(str(given.get("--expert-tensor-parallel-size", tp)))
    # Experts are split over data-parallel ranks, and there are two.
    ep = min(ep, max(1, ranks // pp // etp))
    expert = ep * etp
    if ranks // pp % expert:
        raise CannotRun(f"experts on {expert} ranks: more than two sum each gradient of the rest")
    instances = int(str(given.get("--num-distributed-optimizer-instances", 1)))
    if ranks // pp // expert % instances:
        raise CannotRun(f"{instances} optimizer instances: one rank alone has each expert")

    changed = {
        flag: value
        for flag, value in given.items()
        if flag not in (*DATA, *LENGTH, *FILES, *REPLACED, *LEFT_OUT)
        and (flag not in UNCUT or value != "1")
    }
    if UNCUT[3] in changed:
        changed[UNCUT[3]] = str(ep)
    for flag, most in SMALLER.items():
        if flag in changed:
            changed[flag] = str(min(int(str(changed[flag])), most))
    if "--num-layers" in changed:
        changed["--num-layers"] = str(_layers(changed, pp))
    batch = int(str(changed["--micro-batch-size"])) * dp
    total = int(str(changed["--global-batch-size"]))
    if total > MICRO_BATCHES * batch:
        total = MICRO_BATCHES // 2 * batch
    changed["--global-batch-size"] = str(max(total, batch))
    changed |= {"--eval-interval": "1000", "--eval-iters": "0", "--train-iters": str(STEPS)}
    changed |= {"--mock-data": True, "--num-workers": "0"}
    if "--overlap-param-gather-with-optimizer-step" in changed:
        changed["--ckpt-format"] = "torch"  # Megatron refuses torch_dist with this flag.
    if "--fp16" in changed:
        # With Megatron's initial scale of 2^32, all steps of a short run would be skipped.
        changed["--initial-loss-scale"] = "1024"
    return Small(
        ranks=ranks,
        arguments=tuple(words(changed)),
        left_out=tuple(sorted(LEFT_OUT.keys() & given.keys())),
    )


def _layers(given: Mapping[str, Value], pp: int) -> int:
    """Get the smallest possible number of layers, at least two."""
    layers = int(str(given["--num-layers"]))
    if any(flag in given for flag in PLACES_OF_LAYERS):
        return layers
    chunk = given.get("--num-layers-per-virtual-pipeline-stage")
    stages = int(str(given.get("--num-virtual-stages-per-pipeline-rank", 1)))
    if chunk is not None:
        return min(layers, 2 * pp * int(str(chunk)))  # a virtual pipeline has at least two chunks
    return min(layers, max(2, pp * stages))


def words(given: Mapping[str, Value]) -> list[str]:
    """Make a command line, sorted by flag."""
    flags: list[str] = []
    for flag, value in sorted(given.items()):
        flags.append(flag)
        if isinstance(value, str):
            flags.append(value)
        elif not isinstance(value, bool):
            flags += value
    return flags


@dataclass(frozen=True, kw_only=True)
class Case(Layout):
    """A functional test, made small, or several tests with equal arguments."""

    arguments: tuple[str, ...]
    """All of Megatron's arguments, sorted by flag."""
    left_out: tuple[str, ...] = ()
    """Flags of the test that a CPU cannot serve."""
    others: tuple[str, ...] = ()
    """Other tests that have the same arguments once they are small."""

    def megatron_arguments(self) -> list[str]:
        return list(self.arguments)


def check(case: Case, folder: Path) -> Report:
    """Train the case through both backends, in a new folder, and compare.

    Raises:
        JobFailed: A run failed.
    """
    folder.mkdir(parents=True)
    ours = train(case, folder / "byteps", (), through_byteps=True)
    theirs = train(case, folder / "all-reduce", (), through_byteps=False)
    report = compare(case, ours.results(), theirs.results())
    if not report.misses and not report.same_bits:
        report.misses.append("not the same bits")
    return report


# ----- a checkout of Megatron-LM


FAMILIES: dict[str, Family] = {
    "bert": "bert",
    "gpt": "gpt",
    "mixtral": "gpt",
    "moe": "gpt",
    "t5": "t5",
}
"""Folders of tests whose models can be trained here, and the model family of each."""
_CASES = "tests/functional_tests/test_cases"
_NO_TRAINING = re.compile(r"inference|grpo")


@dataclass(frozen=True, kw_only=True)
class Test:
    """A functional test that trains."""

    name: str
    family: Family
    arguments: dict[str, Value]
    """Values by flag."""


def tests_of(checkout: Path) -> Iterator[Test]:
    """Yield the tests that train a model of FAMILIES.

    Raises:
        ValueError: The folder has no functional tests.
    """
    files = sorted((checkout / _CASES).glob("*/*/model_config.yaml"))
    if not files:
        raise ValueError(
            f"{checkout} has no {_CASES}: give a checkout of Megatron-LM with its tests"
        )
    for file in files:
        folder, name = file.parts[-3:-1]
        if folder not in FAMILIES or _NO_TRAINING.search(name):
            continue
        given = yaml.safe_load(file.read_text(encoding="utf-8"))["MODEL_ARGS"]
        arguments = {flag: _value(value) for flag, value in given.items()}
        yield Test(name=name, family=FAMILIES[folder], arguments=arguments)


def cases_of(checkout: Path) -> tuple[list[Case], dict[str, str]]:
    """Find the cases of a checkout that a CPU can run, and the reasons why it cannot run the rest.

    Tests with equal arguments are one case. The reasons are keyed by the test's name.

    Raises:
        ValueError: The folder has no functional tests.
    """
    cases: dict[object, Case] = {}
    cannot: dict[str, str] = {}
    for test in tests_of(checkout):
        try:
            made = small(test.arguments)
        except CannotRun as reason:
            cannot[test.name] = str(reason)
            continue
        key = (test.family, made.ranks, made.arguments)
        if key in cases:
            cases[key] = replace(cases[key], others=(*cases[key].others, test.name))
            continue
        cases[key] = Case(
            name=test.name,
            family=test.family,
            ranks=made.ranks,
            arguments=made.arguments,
            left_out=made.left_out,
        )
    return sorted(cases.values(), key=lambda case: (case.ranks, case.name)), cannot


def strange(rows: Sequence[Case], cases: Sequence[Case]) -> list[str]:
    """Describe differences between rows and the tests of a checkout that they repeat."""
    known = {name: case for case in cases for name in (case.name, *case.others)}
    wrong = []
    for row in rows:
        twin = known.get(row.name)
        if twin is None:
            wrong.append(f"{row.name}: the checkout has no such test that a CPU can run")
            continue
        ours, theirs = _pairs(row), _pairs(twin)
        if apart := sorted(ours ^ theirs):
            differing = "; ".join(
                f"{'the row' if pair in ours else 'the checkout'} has {pair}" for pair in apart
            )
            wrong.append(f"{row.name}: {differing}")
    return wrong


def _pairs(case: Case) -> set[str]:
    """Pair each flag with its values, as text."""
    text = " ".join(case.arguments)
    pairs = {f"--{part.strip()}" for part in (" " + text).split(" --") if part.strip()}
    return {*pairs, f"{case.ranks} ranks", f"a {case.family}"}


def _value(given: Any) -> Value:
    """Convert a value from a test's YAML like the tests' launcher does in its first run.

    Brackets hold several words, parentheses one.
    """
    if given is True:
        return True
    text = str(given).strip().replace("${REPEAT}", "1")
    if text.startswith("[") and text.endswith("]"):
        return tuple(text[1:-1].split())
    return text


# ----- tables


_MADE_BY = "made by `make functional MEGATRON=CHECKOUT MARKDOWN=docs/results/recipes.md`"
_MARK = f"<!-- {{}}: {_MADE_BY}; not to be edited by hand -->"
_MISS = " (MISS)"
"""Mark after the name of a test whose two runs differ."""


def put(document: Path, report: Report, case: Case, cases: Sequence[Case]) -> None:
    """Write a test's row into the document.

    Raises:
        SystemExit: The document has no place for the row.
    """
    missed = report.misses or not report.same_bits
    table = Table(
        begin=_MARK.format("run"),
        head=("test", "also", "left out"),
        align="lrl",
        keys=[case.name for case in cases],
        key_of=lambda cells: cells[0].removesuffix(_MISS),
    )
    row = [
        case.name + _MISS * bool(missed),
        str(len(case.others) or ""),
        " ".join(case.left_out),
    ]
    table.put(document, [row])


def put_others(document: Path, cannot: Mapping[str, str]) -> None:
    """Write into the document how many tests a CPU cannot run, and why."""
    tests = Counter(cannot.values())
    reasons = sorted(tests, key=lambda why: (-tests[why], why))
    table = Table(begin=_MARK.format("not run"), head=("why", "tests"), align="lr", keys=reasons)
    table.put(document, [[why, str(tests[why])] for why in reasons])


def listing(cases: Sequence[Case], cannot: Mapping[str, str]) -> str:
    """List the cases, and the tests that cannot run."""
    rows = [[case.name, str(case.ranks), " ".join(case.arguments)] for case in cases]
    rows += [[name, "-", why] for name, why in cannot.items()]
    return aligned([["test", "ranks", "arguments"], *rows], left=3)
