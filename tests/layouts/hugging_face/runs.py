"""Trains tiny Hugging Face models through both backends, fully or by adapters, and checks the
written files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.layouts.job import THROUGH_SERVERS, TWO_SERVERS, Job

from ..table import Row

VOCABULARY = 320
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # The values are larger than in a real model, so that a wrong layer shows in the logits.
    "initializer_range": 0.1,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True))


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=32))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, **experts, head_dim=16, norm_topk_prob=True)
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,  # tied embedding and output layer
    "qwen2": _qwen2,  # biases in attention
    "qwen3": _qwen3,  # norms of queries and keys, heads wider than hidden / heads
    "qwen3-moe": _qwen3_moe,  # experts
}


def make(name: str, folder: Path) -> None:
    """Write a tiny model of this kind."""
    import torch

    torch.manual_seed(11)
    model = MAKERS[name]()
    # In a new model all biases are zeros and all norms ones. If a test mixed up two of them, it
    # would not notice.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)


# ----- layouts


STEPS = 3
SEQUENCE = 32
LORA_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Layout(Row):
    """A model and its parallelism."""

    model: str
    """A name in ``layouts.hugging_face.models``."""
    extra: tuple[str, ...] = ()

    def arguments(self, *, lora: bool) -> list[str]:
        """Get Megatron's arguments, without model, data and backend."""
        arguments = [
            *("--seq-length", str(SEQUENCE), "--micro-batch-size", "2"),
            *("--global-batch-size", str(4 * self.dp), "--train-iters", str(STEPS)),
            *("--lr", "1e-2", "--lr-decay-style", "constant", "--split", "100,0,0"),
            *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
            *("--seed", "7", "--num-workers", "0"),
            *self.size_arguments(),
        ]
        if lora:
            arguments += ["--lora", "--lora-rank", str(LORA_RANK), "--lora-alpha", "8"]
            # Adapters on experts that are spread over ranks are written only as merged.
            arguments += ["--lora-targets", "linear_qkv", "linear_proj"] if self.ep > 1 else []
        return [*arguments, *self.extra]


_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform",
              "--recompute-num-layers", "1")  # fmt: skip

# There are at most two data-parallel ranks, because a sum of two values is the same in any order.
LAYOUTS: tuple[Layout, ...] = (
    Layout(name="dp2", model="llama", ranks=2),
    Layout(name="dp2-qwen2", model="qwen2", ranks=2),
    Layout(name="dp2-qwen3", model="qwen3", ranks=2),
    Layout(name="dp2-recompute", model="llama", ranks=2, extra=_RECOMPUTE),
    Layout(name="dp2-distributed-optimizer", model="llama", ranks=2,
           extra=("--use-distributed-optimizer",)),
    Layout(name="tp2-dp2", model="llama", ranks=4, tp=2),
    Layout(name="pp2-dp2", model="llama", ranks=4, pp=2),
    Layout(name="tp2-pp2-dp2", model="qwen3", ranks=8, tp=2, pp=2),
    Layout(name="pp4-dp2", model="qwen2", ranks=8, pp=4),
    Layout(name="dp2-experts", model="qwen3-moe", ranks=2),
    Layout(name="ep2", model="qwen3-moe", ranks=2, ep=2),
)  # fmt: skip

_ALL = ("--lora-targets", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

# Kinds of adapters, and adapters on experts of several ranks.
KINDS: tuple[Layout, ...] = (
    Layout(name="dp2-dora", model="llama", ranks=2, extra=("--lora-kind", "dora")),
    Layout(name="tp2-dp2-canonical", model="qwen3", ranks=4, tp=2,
           extra=("--lora-kind", "canonical")),
    Layout(name="ep2-experts", model="qwen3-moe", ranks=2, ep=2, extra=_ALL),
)  # fmt: skip


# ----- runs


PROGRAMS = "tests.layouts.hugging_face.rank"
# Equal to the constants of the rank program. Its import takes seconds, and this process needs
# nothing else of it.
BEFORE, AFTER, ADAPTER = "before", "after", "adapter"
TOLERANCE = 2e-5
"""Tolerance of logits, relative to the largest logit: the two programs add in different orders."""


def make_model(name: str, folder: Path) -> Path:
    """Write a tiny model into a folder below, unless it exists."""
    job = Job(folder / f"make-{name}", f"{PROGRAMS}:make_model", 1, {"name": name})
    if not job.folder.exists():
        job.run()
    return job.folder / name


def train(
    layout: Layout,
    model: Path,
    folder: Path,
    data: Sequence[str],
    *,
    lora: bool,
    through_byteps: bool,
    fails: bool = False,
    **options: object,
) -> Job:
    """Run a layout, each rank in a process.

    Raises:
        JobFailed: A rank failed, or none did with ``fails``.
    """
    arguments = ["--hf-model", str(model), *layout.arguments(lora=lora), *data]
    settings: dict[str, Any] = {"arguments": arguments, **options}
    if through_byteps:
        settings["arguments"] = [*arguments, *THROUGH_SERVERS]
        settings["environment"] = TWO_SERVERS
    job = Job(folder, f"{PROGRAMS}:train", layout.ranks, settings)
    job.run(fails=fails)
    return job


def tensors(folder: Path) -> dict[str, Any]:
    """Load all weights of a Hugging Face folder."""
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same(first: Path, other: Path) -> bool:
    """Tell whether two folders have the same weights, to the last bit."""
    import torch

    a, b = tensors(first), tensors(other)
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a layout, trained fully or by adapters."""

    round_trip: bool
    """Whether the files written before the first step have the bits that were read."""
    moved: bool
    """Whether training changed the weights."""
    equal: bool
    """Whether both backends wrote the same bits."""
    logits: float
    """Largest difference of logits between Megatron and the written files, relative to the largest
    logit."""
    adapter_logits: float | None
    """The same difference for the model with the written adapter; None without an adapter."""
    bucketed: float
    """Elements of the gradient buckets, as a fraction of the trained parameters."""
    pushed: float
    """Bytes that ranks pushed, as a fraction of the bytes of buckets that several ranks sum."""
    trained: float
    """Fraction of all parameters that is trained."""
    frozen_changed: list[str]
    without_gradient: list[str]

    def problems(self) -> list[str]:
        wrong = {
            "what is written before training differs from what was read": not self.round_trip,
            "training changed nothing": not self.moved,
            "the backends wrote different weights": not self.equal,
            f"logits differ by {self.logits:.1e}": not self.logits <= TOLERANCE,
            f"{self.bucketed:.3f} of what is trained is in buckets": not 1 <= self.bucketed < 1.05,
            f"{self.pushed:.3f} of the buckets' bytes were pushed": self.pushed != 1.0,
            f"frozen weights changed: {self.frozen_changed}": bool(self.frozen_changed),
            f"no gradient: {self.without_gradient}": bool(self.without_gradient),
        }
        if self.adapter_logits is not None:
            text = f"logits with the adapter differ by {self.adapter_logits:.1e}"
            wrong[text] = not self.adapter_logits <= TOLERANCE
        return [text for text, is_so in wrong.items() if is_so]


def compare(
    layout: Layout, folder: Path, models: Path, data: Sequence[str], *, lora: bool
) -> Outcome:
    """Train through both backends and compare.

    Raises:
        JobFailed: A rank failed.
    """
    model = make_model(layout.model, models)
    jobs = {
        name: train(layout, model, folder / name, data, lora=lora, through_byteps=ours)
        for name, ours in (("byteps", True), ("all-reduce", False))
    }
    ours = jobs["byteps"]
    seen = ours.results()
    written = ours.folder / AFTER
    logits = next(rank.logits for rank in seen if rank.logits is not None)
    adapter = None
    if lora and (written / ADAPTER).exists():
        adapter = _difference(logits, _reference(folder / "peft", model, written / ADAPTER))
    sums = [total for rank in seen for step in rank.training.steps for total in step.sums.values()]
    shared = sum(total.local.numel() for total in sums if len(total.members) > 1)
    return Outcome(
        round_trip=same(model, ours.folder / BEFORE),
        moved=not same(model, written),
        equal=same(written, jobs["all-reduce"].folder / AFTER),
        logits=_difference(logits, _reference(folder / "transformers", written)),
        adapter_logits=adapter,
        bucketed=sum(s.local.numel() for s in sums) / (STEPS * sum(rank.trained for rank in seen)),
        pushed=sum(rank.training.pushed_bytes for rank in seen) / (4 * shared),
        trained=_trained(seen),
        frozen_changed=[name for rank in seen for name in rank.frozen_changed],
        without_gradient=[name for rank in seen for name in rank.without_gradient],
    )


def _trained(seen: Sequence[Any]) -> float:
    return sum(rank.trained for rank in seen) / sum(
        value.numel() for rank in seen for value in rank.training.parameters.values()
    )


def _reference(folder: Path, model: Path, adapter: Path | None = None) -> Any:
    settings = {"model": str(model), "adapter": str(adapter) if adapter else None}
    job = Job(folder, f"{PROGRAMS}:reference_logits", 1, settings)
    job.run()
    return job.result(0)


def _difference(logits: Any, reference: Any) -> float:
    known = logits[..., : reference.shape[-1]]
    return float((known - reference).abs().max() / reference.abs().max())
