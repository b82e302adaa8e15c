"""Evaluates a Hugging Face folder with ``transformers``: computes a loss, and writes a sample.

It does not use Megatron, so it also shows whether the written files are complete.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEQUENCE = 256
SAMPLE_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of a model on a text."""

    loss: float
    """Mean loss over the tokens, in nats per token."""
    tokens: int
    sample: str
    """Continuation of the prompt by the most likely token each time."""


def evaluate(model: Path, text: str, prompt: str, adapter: Path | None = None) -> Evaluation:
    """Load the model, with a ``peft`` adapter if one is given, and evaluate it.

    The text is cut into sequences of 256 tokens. Each token is predicted from those before it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter)
    loaded.eval()
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    total, count = 0.0, 0
    with torch.no_grad():
        for part in tokens.split(SEQUENCE):
            if len(part) > 1:
                loss = loaded(input_ids=part[None], labels=part[None]).loss
                total += float(loss) * (len(part) - 1)
                count += len(part) - 1
        given = tokenizer(prompt, return_tensors="pt")
        made = loaded.generate(
            **given,
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    sample = tokenizer.decode(made[0][given.input_ids.shape[1] :], skip_special_tokens=True)
    return Evaluation(loss=total / count, tokens=count, sample=sample)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="file to predict")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--adapter", type=Path)
    options = parser.parse_args(arguments)
    text = options.text.read_text(encoding="utf-8")
    print(json.dumps(vars(evaluate(options.model, text, options.prompt, options.adapter))))


if __name__ == "__main__":
    main()
