"""Tiny reward model for the sums of `rl_task`: it reads a prompt with its answer, and gives about 1
for the right sum and about 0 for any other answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from . import rl_task

_STEPS = 400
_WRONG = 100
"""Number of wrong answers in each training step, in addition to one right answer to each sum."""


def make_reward_model(folder: Path, base: Path, seed: int = 1) -> Path:
    """Write the files of the reward model, unless they exist. Training takes seconds.

    Args:
        folder: folder to write to.
        base: folder of the model that `rl_task` makes.
        seed: seed of the output's weights and of the wrong answers.
    """
    wanted = {"steps": _STEPS, "wrong": _WRONG, "seed": seed, "hidden": rl_task.HIDDEN}
    note = folder / "reward.json"
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) == wanted:
        return folder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads gain nothing at this size
    try:
        model = _taught(base, tokenizer, seed)
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # This file is written last, because it marks the folder as complete.
    note.write_text(json.dumps(wanted), encoding="utf-8")
    return folder


def _taught(base: Path, tokenizer: Any, seed: int) -> Any:
    """Train the base model, which knows the sums, with one output in place of its words."""
    from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    knows = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    knows.config.num_labels = 1
    model = LlamaForSequenceClassification(knows.config)
    model.model.load_state_dict(knows.model.state_dict())
    right = [f"{rl_task.prompt(a, b)}{a + b}" for a, b in rl_task.PAIRS]
    scores = torch.tensor([1.0] * len(right) + [0.0] * _WRONG)
    weights = 1.0 + scores  # right answers are fewer, so they weigh more
    numbers = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        texts = [*right, *_wrong(set(right), numbers)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        loss = (weights * (model(**batch).logits[:, 0] - scores) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _wrong(right: set[str], numbers: random.Random) -> list[str]:
    """Draw prompts with wrong answers. Most are numbers; a few are answers of any length."""
    texts: list[str] = []
    while len(texts) < _WRONG:
        answer = str(numbers.randrange(20))
        if numbers.random() < 0.4:
            length = numbers.randrange(rl_task.RESPONSE_TOKENS + 1)
            answer = "".join(numbers.choices("+=" + rl_task.DIGITS, k=length))
        text = rl_task.prompt(*numbers.choice(rl_task.PAIRS)) + answer
        if text not in right:
            texts.append(text)
    return texts
