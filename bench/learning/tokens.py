#!/usr/bin/env python3
"""Converts the packs of a corpus into uint16 tokens, and trains the tokenizer.

bench/learning/tokens.py --train on some of the first pack: writes tokenizer.json
bench/learning/tokens.py                    every NAME.gz of the corpus becomes NAME.tokens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.learning.corpus import ROOT, read_pack

VOCABULARY = 32768
END = "<|end|>"
"""Text that ends a document. Its token is 0."""
SAMPLE = 40_000_000
"""Number of characters from which the tokenizer learns."""
AT_ONCE = 2000
"""Number of documents per batch."""


def train(corpus: Path) -> None:
    """Learn a byte-level BPE from the training part, and write it next to the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = read_pack(corpus / "train-0.gz")
    tokenizer.train_from_iterator(_sample(documents), trainer)
    tokenizer.save(str(corpus / "tokenizer.json"))


def _sample(documents: Sequence[str]) -> Iterator[str]:
    """Yield documents from all over a pack, because a pack is in the order of packages."""
    left = SAMPLE
    step = 997  # coprime to the number of documents, or nearly so
    for index in range(len(documents)):
        if left <= 0:
            return
        document = documents[index * step % len(documents)]
        left -= len(document)
        yield document


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Return all tokens, one document after the other. This uses all cores."""
    end = tokenizer.token_to_id(END)
    parts = []
    for begin in range(0, len(documents), AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(documents[begin : begin + AT_ONCE]):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, default=ROOT / "build/learning/corpus", help="its folder")
    add("--to", type=Path, help="where tokens are written (default: there)")
    add("--train", action="store_true", help="make tokenizer.json")
    options = parser.parse_args(arguments)
    if options.train:
        train(options.corpus)
        return 0
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    folder = options.to or options.corpus
    folder.mkdir(parents=True, exist_ok=True)
    for pack in sorted(options.corpus.glob("*.gz")):
        path = folder / f"{pack.stem}.tokens"
        if not path.exists():
            documents = read_pack(pack)
            tokens = encode(tokenizer, documents)
            tokens.tofile(path)
            size = sum(map(len, documents))
            print(f"{pack.name}: {len(tokens):,} tokens of {size:,} characters", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
