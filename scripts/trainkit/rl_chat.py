"""Sums asked in words, for a model of Hugging Face's that has a chat template, and a reward to
check.

A small model says something else, or a wrong number, in most tries. verl imports this file by its
path: it needs nothing of the project.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
"""With a chat template of some forty."""
RESPONSE_TOKENS = 12
PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
"""Of a model: what transformers and vLLM read."""


def prompt(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with the number alone."


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """1 where the last number of the answer is the sum, else 0; a reward function of verl's."""
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])


def find_model(name: str) -> Path:
    """The folder of a model: of this name, or of the model of this name on Hugging Face's hub,
    which is downloaded unless it was before.

    Raises:
        ValueError: no such model is here, and the hub has none or cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is no model's folder: it has no config.json")
        return folder.resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no folder, and could not be had from Hugging Face's hub: {error}"
        ) from error
