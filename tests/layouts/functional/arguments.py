"""From the arguments of one of Megatron's functional tests, as a checkout has them, to those of a
run on two cores through either backend, and to its row of a table.

What is changed is said here, as data, with the reason; every other argument stays as it stands.
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
"""True for a flag alone, several words for one that takes several."""

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
"""Width and sequence length: at most this."""

MICRO_BATCHES = 8
"""Of a rank, at most: above, half as many. At least one."""

PLACES_OF_LAYERS = (
    "--account-for-embedding-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--moe-layer-freq",
    "--pipeline-model-parallel-layout",
)
"""With one of these every layer has its place, and their number stays."""

DATA = (
    *("--data-cache-path", "--data-path", "--fim-data", "--fim-rate", "--fim-spm-rate"),
    *("--make-vocab-size-divisible-by", "--merge-file", "--mock-data", "--no-mmap-bin-files"),
    *("--num-workers", "--split"),
    *("--tokenizer-model", "--tokenizer-type", "--vocab-file", "--vocab-size"),
)
"""Mock data take their place."""

LENGTH = (
    *("--eval-global-batch-size", "--eval-interval", "--eval-iters", "--exit-duration-in-mins"),
    *("--exit-interval", "--lr-decay-samples", "--lr-warmup-samples", "--train-iters"),
    *("--train-samples",),
)
"""Some steps are made, and no evaluation."""

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
"""Nothing is saved or loaded."""

REPLACED = {
    "--attention-backend": "unfused: other kernels of attention need a GPU",
    "--distributed-backend": "gloo: NCCL needs GPUs",
    "--no-persist-layer-norm": "so it is anyway",
    "--transformer-impl": "local: Transformer Engine needs a GPU",
}
"""What a CPU cannot do: what ``MEGATRON_CPU=1`` sets in its place, and why."""

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
"""What a CPU cannot do, and what it needs."""

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
"""Without these nothing of the test would be left: what it needs."""

UNCUT = tuple(
    f"--{kind}-parallel-size"
    for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
"""Without these there is one part."""

LARGEST = 16
"""Ranks of a run."""


class CannotRun(ValueError):
    """A test that a CPU cannot run; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """A run that two cores can make."""

    ranks: int
    arguments: tuple[str, ...]
    """Of Megatron, in the order of the flags."""
    left_out: tuple[str, ...]
    """Flags that a CPU cannot serve, which are not among the arguments."""


def small(given: Mapping[str, Value]) -> Small:
    """What is run of a functional test's arguments, by flag.

    Two ranks sum each gradient, so that there is one right result: two data-parallel ranks, or one
    where two share each sequence.

    Raises:
        CannotRun: it needs something that a CPU cannot do, or too many ranks.
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
        raise CannotRun(f"{cp} ranks share a sequence: more than two sum each gradient")
    ranks = tp * pp * cp * dp
    if ranks > LARGEST:
        raise CannotRun(f"{ranks} ranks, more than {LARGEST}")
    etp = int(str(given.get("--expert-tensor-parallel-size", tp)))
    # Experts are split over data-parallel ranks, of which there are two.
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
        changed["--ckpt-format"] = "torch"  # Megatron refuses the other one with it
    if "--fp16" in changed:
        # From Megatron's 2^32 all steps of a short run would be skipped.
        changed["--initial-loss-scale"] = "1024"
    return Small(
        ranks=ranks,
        arguments=tuple(words(changed)),
        left_out=tuple(sorted(LEFT_OUT.keys() & given.keys())),
    )


def _layers(given: Mapping[str, Value], pp: int) -> int:
    """As few as there can be, but two."""
    layers = int(str(given["--num-layers"]))
    if any(flag in given for flag in PLACES_OF_LAYERS):
        return layers
    chunk = given.get("--num-layers-per-virtual-pipeline-stage")
    stages = int(str(given.get("--num-virtual-stages-per-pipeline-rank", 1)))
    if chunk is not None:
        return min(layers, 2 * pp * int(str(chunk)))  # at least two chunks make it virtual
    return min(layers, max(2, pp * stages))


def words(given: Mapping[str, Value]) -> list[str]:
    """A command line, in the order of the flags."""
    found: list[str] = []
    for flag, value in sorted(given.items()):
        found.append(flag)
        if isinstance(value, str):
            found.append(value)
        elif not isinstance(value, bool):
            found += value
    return found


@dataclass(frozen=True, kw_only=True)
class Case(Layout):
    """A functional test, made small; or several with the same arguments."""

    arguments: tuple[str, ...]
    """Of Megatron: all of them, in the order of the flags."""
    left_out: tuple[str, ...] = ()
    """Flags of the test that a CPU cannot serve."""
    others: tuple[str, ...] = ()
    """Tests whose arguments come to the same."""

    def megatron_arguments(self) -> list[str]:
        return list(self.arguments)


def check(case: Case, folder: Path) -> Report:
    """Train it both ways, in a new folder, and compare.

    Raises:
        JobFailed: a run failed.
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
"""Folders of tests whose models can be trained here: which model each has."""
_CASES = "tests/functional_tests/test_cases"
_NO_TRAINING = re.compile(r"inference|grpo")


@dataclass(frozen=True, kw_only=True)
class Test:
    """A functional test that trains."""

    name: str
    family: Family
    arguments: dict[str, Value]
    """By flag."""


def tests_of(checkout: Path) -> Iterator[Test]:
    """The tests that train one of the models of FAMILIES.

    Raises:
        ValueError: the folder has no functional tests.
    """
    found = sorted((checkout / _CASES).glob("*/*/model_config.yaml"))
    if not found:
        raise ValueError(
            f"{checkout} has no {_CASES}: give a checkout of Megatron-LM with its tests"
        )
    for file in found:
        folder, name = file.parts[-3:-1]
        if folder not in FAMILIES or _NO_TRAINING.search(name):
            continue
        given = yaml.safe_load(file.read_text(encoding="utf-8"))["MODEL_ARGS"]
        arguments = {flag: _value(value) for flag, value in given.items()}
        yield Test(name=name, family=FAMILIES[folder], arguments=arguments)


def cases_of(checkout: Path) -> tuple[list[Case], dict[str, str]]:
    """What a CPU can run of a checkout, tests with equal arguments as one case; and why it cannot
    run the others, by name.

    Raises:
        ValueError: the folder has no functional tests.
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
    """How rows differ from the tests of a checkout that they repeat."""
    known = {name: case for case in cases for name in (case.name, *case.others)}
    found = []
    for row in rows:
        twin = known.get(row.name)
        if twin is None:
            found.append(f"{row.name}: the checkout has no such test that a CPU can run")
            continue
        mine, theirs = _pairs(row), _pairs(twin)
        if apart := sorted(mine ^ theirs):
            told = "; ".join(
                f"{'the row' if pair in mine else 'the checkout'} has {pair}" for pair in apart
            )
            found.append(f"{row.name}: {told}")
    return found


def _pairs(case: Case) -> set[str]:
    """The arguments, each flag with its values."""
    text = " ".join(case.arguments)
    pairs = {f"--{part.strip()}" for part in (" " + text).split(" --") if part.strip()}
    return {*pairs, f"{case.ranks} ranks", f"a {case.family}"}


def _value(given: Any) -> Value:
    """As the tests' own launcher hands it over, in its first run: words in brackets are several, in
    parentheses one."""
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
"""After the name of a test whose two runs differ."""


def put(document: Path, report: Report, case: Case, cases: Sequence[Case]) -> None:
    """Write a test's row into the document.

    Raises:
        SystemExit: the document has no place for it.
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
    """Write how many tests a CPU cannot run, and why."""
    tests = Counter(cannot.values())
    reasons = sorted(tests, key=lambda why: (-tests[why], why))
    table = Table(begin=_MARK.format("not run"), head=("why", "tests"), align="lr", keys=reasons)
    table.put(document, [[why, str(tests[why])] for why in reasons])


def listing(cases: Sequence[Case], cannot: Mapping[str, str]) -> str:
    """What there is to run, and what cannot be."""
    rows = [[case.name, str(case.ranks), " ".join(case.arguments)] for case in cases]
    rows += [[name, "-", why] for name, why in cannot.items()]
    return aligned([["test", "ranks", "arguments"], *rows], left=3)
