"""A few thousand bytes of text that a computer can reproduce and a small model can learn."""

from __future__ import annotations

from pathlib import Path

from scripts.prepare_data import Dataset, prepare


def tiny_dataset(folder: Path) -> Dataset:
    """Write it, as Megatron reads it, into an existing folder."""
    # Several documents: Megatron splits them between training and validation.
    sources = [folder / f"{number}.txt" for number in range(10)]
    for number, source in enumerate(sources):
        lines = (f"{number} times {n} is {number * n}.\n" for n in range(60))
        source.write_text("".join(lines))
    return prepare(sources, folder, 1 << 20)


def data_arguments(dataset: Dataset) -> list[str]:
    """What Megatron must be told to read it."""
    cache = dataset.prefix.parent / "cache"
    return ["--data-path", str(dataset.prefix), "--data-cache-path", str(cache)]
