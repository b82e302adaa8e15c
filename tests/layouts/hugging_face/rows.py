"""The layouts in which Hugging Face models are trained, each whole and by adapters."""

from __future__ import annotations

from dataclasses import dataclass

from ..rows import Row

STEPS = 3
SEQUENCE = 32
LORA_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Layout(Row):
    """A model, and how it is cut over ranks."""

    model: str
    """A name in ``layouts.hugging_face.models``."""
    extra: tuple[str, ...] = ()

    def arguments(self, *, lora: bool) -> list[str]:
        """Of Megatron, but for model, data and backend."""
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
            # Adapters on experts that lie on several ranks are refused.
            arguments += ["--lora-targets", "linear_qkv", "linear_proj"] if self.ep > 1 else []
        return [*arguments, *self.extra]


_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform",
              "--recompute-num-layers", "1")  # fmt: skip

# Two data-parallel ranks where there are any: a sum of two values has one result in any order.
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
