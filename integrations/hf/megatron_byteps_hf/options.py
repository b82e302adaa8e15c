"""Flags of Hugging Face models, and their checks."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names for the linear layers of attention and MLP."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model on the hub that are read. Weights in other formats are left out."""
KINDS = ("lora", "dora", "canonical")
"""Kinds of adapters. DoRA also trains the length of each row of a weight. Canonical LoRA has an
adapter for each of q, k, v, gate and up, not one for each fused layer."""
DEFAULT_RANK = 16
DEFAULT_ALPHA = 32


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters: W x + alpha / rank · B A x, where only A and B are trained."""

    kind: str = "lora"
    """Kind of the adapters, a name in `KINDS`."""
    rank: int = DEFAULT_RANK
    alpha: int = DEFAULT_ALPHA
    dropout: float = 0.0
    """Dropout of the adapter's input."""
    targets: tuple[str, ...] = TARGETS
    """Names of layers, or patterns such as ``*.layers.0.*.linear_qkv``."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parsed flags."""

    model: Path
    """Folder with the model's files."""
    save: Path | None
    """Folder for the model's files after training."""
    lora: LoraOptions | None
    """Options of the adapters; None: all weights are trained."""


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ArgumentTypeError(f"{text} is not positive")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def add_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Hugging Face")
    add = group.add_argument
    add(
        "--hf-model",
        metavar="MODEL",
        help="train this Hugging Face model: a folder, or a name on the hub such as org/name",
    )
    add(
        "--hf-save", type=Path, metavar="FOLDER", help="write the trained model here, as such files"
    )
    add("--lora", action="store_true", help="train LoRA adapters; --hf-model stays as it is")
    add("--lora-kind", choices=KINDS, help=f"default: {KINDS[0]}")
    add("--lora-rank", type=_positive, metavar="N", help=f"default: {DEFAULT_RANK}")
    add("--lora-alpha", type=_positive, metavar="N", help=f"default: {DEFAULT_ALPHA}")
    add("--lora-dropout", type=_part, metavar="P", help="of the adapters' input (default: 0)")
    add("--lora-targets", nargs="+", metavar="NAME", help=f"default: {' '.join(TARGETS)}")


def is_asked_for(argv: Sequence[str]) -> bool:
    """Return whether a command line has any of these flags."""
    return any(a.startswith(("--hf-", "--lora")) for a in argv)


def read(argv: Sequence[str]) -> Options:
    """Parse a command line. Flags outside this group are ignored.

    Raises:
        ValueError: flags are incompatible, or there is no such model.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    args, _ = parser.parse_known_args(list(argv))
    if args.hf_model is None:
        raise ValueError("--hf-save and --lora need --hf-model MODEL: the model to train")
    model = _folder_of(args.hf_model)
    if not (model / "config.json").is_file():
        raise ValueError(
            f"--hf-model {args.hf_model}: no Hugging Face model, since there is no config.json"
        )
    if not any(model.glob("*.safetensors")):
        raise ValueError(
            f"--hf-model {args.hf_model}: there is no *.safetensors file; save the model by "
            "transformers' save_pretrained()"
        )
    if args.hf_save is not None and args.hf_save.resolve() == model.resolve():
        raise ValueError("--hf-save must be another folder than --hf-model")
    return Options(model=model, save=args.hf_save, lora=_lora(args))


def _folder_of(model: str) -> Path:
    """Return the folder of a model. A name on the hub is looked up in transformers' cache. If it is
    missing there, it is downloaded, unless HF_HUB_OFFLINE is set."""
    folder = Path(model)
    if folder.exists() or not _HUB_NAME.fullmatch(model):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # Errors of requests to the hub are OSErrors, too.
        raise ValueError(
            f"--hf-model {model}: there is no such folder, and the hub's model cannot be read: "
            f"{error}"
        ) from error


def _lora(args: Namespace) -> LoraOptions | None:
    given = {
        "kind": args.lora_kind,
        "rank": args.lora_rank,
        "alpha": args.lora_alpha,
        "dropout": args.lora_dropout,
        "targets": tuple(args.lora_targets) if args.lora_targets else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and not args.lora:
        raise ValueError(f"--lora-{next(iter(given))} needs --lora")
    return LoraOptions(**given) if args.lora else None
