"""Sums to learn: prompts, rewards, a tokenizer, and a tiny model that partly knows the answers.

The model is first trained on all sums of two digits from 3 to 7. Then its output weights are scaled
down until it gives the right sum only in a fraction of tries, so that reinforcement learning can
improve it. A Hugging Face model with a chat template gets questions in words. verl imports this
file by its path, so the file imports nothing of the project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

DIGITS = "0123456789"
PAD, END = "<pad>", "<|im_end|>"  # verl requires this token for a Qwen
VOCABULARY = [PAD, END, "+", "=", *DIGITS]
PROMPT_TOKENS = 4
RESPONSE_TOKENS = 3
OPERANDS = range(3, 8)
"""Operands whose sums have one or two digits."""
RIGHT = 0.4
"""Probability that the base model gives the right sum, as a mean over all sums."""
PAIRS = [(a, b) for a in OPERANDS for b in OPERANDS]
SOURCE = "sums"
HIDDEN = 128
_STEPS = 150


def prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """Reward function of verl: 1 for exactly the right sum, otherwise 0."""
    return float(solution_str == ground_truth)


def write_questions(
    file: Path,
    pairs: Sequence[tuple[int, int]] = PAIRS,
    ask: Callable[[int, int], str] = prompt,
) -> Path:
    """Write all sums as a data set for verl: a parquet file with a row per sum."""
    import pandas

    rows = [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": ask(a, b)}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": number},
        }
        for number, (a, b) in enumerate(pairs)
    ]
    pandas.DataFrame(rows).to_parquet(file)
    return file


def make_model(folder: Path, seed: int = 1, *, layers: int = 2, experts: int = 0) -> Path:
    """Write the files of the base model and its tokenizer, unless they exist.

    The model is a Llama, or a Qwen3 with experts. Its training takes seconds.
    """
    wanted: dict[str, object] = {"right": RIGHT, "steps": _STEPS, "seed": seed, "end": END}
    wanted |= {"hidden": HIDDEN, "layers": layers, "experts": experts}
    note = folder / "base.json"
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) == wanted:
        return folder
    tokenizer = _tokenizer()
    # More than one thread gains nothing at this size, and threads wait for each other on a busy
    # machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _taught(tokenizer, seed, layers, experts)
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # This file is written last, because it marks the folder as complete.
    note.write_text(json.dumps(wanted), encoding="utf-8")
    return folder


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, eos_token=END)
    # verl asks with chat messages, so the template returns only their text.
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def _taught(tokenizer: Any, seed: int, layers: int, experts: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    of_experts: dict[str, Any] = {}
    if experts:
        of_experts = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        of_experts |= {"moe_intermediate_size": HIDDEN, "head_dim": 64}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "llama",
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,  # 64 values per head, the minimum of vLLM on a CPU
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        **of_experts,
    )
    model = AutoModelForCausalLM.from_config(config)
    texts = [f"{prompt(a, b)}{a + b}{END}" for a, b in PAIRS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, :PROMPT_TOKENS] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _make_unsure(model, model(**batch).logits, labels)
    return model


def _make_unsure(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Scale the output weights so that answers are right with probability ``RIGHT``."""
    predicted, wanted = logits[:, :-1], labels[:, 1:]

    def right(scale: float) -> float:
        scores = torch.log_softmax(predicted * scale, -1)
        taken = scores.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return float((taken * (wanted >= 0)).sum(1).exp().mean())

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if right(middle) < RIGHT else (low, middle)
    model.lm_head.weight.mul_(high)


CHAT_PROMPT_TOKENS = 64
"""Longest prompt, with a chat template of about forty tokens."""
CHAT_RESPONSE_TOKENS = 12
CHAT_PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
"""Files of a model that transformers and vLLM read."""


def ask_in_words(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with the number alone."


def score_last_number(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """Reward function of verl: 1 if the last number of the answer is the sum, otherwise 0."""
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])


def find_model(name: str) -> Path:
    """Return the folder of a model: `name` if it is a folder, otherwise the model of this name on
    Hugging Face's hub, downloaded if necessary.

    Raises:
        ValueError: there is no such local model, and the hub lacks it or cannot be reached.
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
