"""Batches, cut and joined: sequences, arrays and tensors, or dicts of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def columns(value: Any) -> list[Any]:
    """Of a batch: the values of a dict, else itself."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def on_columns(value: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every column changed."""
    if isinstance(value, Mapping):
        return {name: change(column) for name, column in value.items()}
    return change(value)


def first_column(value: Any) -> Any:
    """Of a batch; raises ValueError unless all columns are as long."""
    found = columns(value)
    lengths = {len(column) for column in found if hasattr(column, "__len__")}
    if len(lengths) != 1 or any(isinstance(column, str) for column in found):
        raise ValueError(f"no batch: {type(value).__name__}, whose first axis cannot be cut")
    return found[0]


def rows(values: Sequence[Any]) -> int:
    """Of batches; raises ValueError unless all have as many."""
    found = {len(first_column(value)) for value in values}
    if len(found) > 1:
        raise ValueError(f"batches of different lengths: {sorted(found)}")
    return found.pop() if found else 0


def padded(value: Any, missing: int) -> Any:
    """With the last row ``missing`` times more."""
    if not missing:
        return value
    return on_columns(value, lambda c: _concatenated([c] + [c[-1:]] * missing, axis=0))


def part(value: Any, number: int, of: int) -> Any:
    """One of ``of`` parts of the first axis."""

    def cut(column: Any) -> Any:
        size = len(column) // of
        return column[number * size : (number + 1) * size]

    return on_columns(value, cut)


def chunked(value: Any, number: int, of: int) -> Any:
    """The part of one of ``of`` ranks of the second axis of each tensor or array: of twice as many
    chunks, one from the front and its mirror image from the back."""

    def cut(column: Any) -> Any:
        size = column.shape[1] // (2 * of)
        return _concatenated(
            [column[:, n * size : (n + 1) * size] for n in (number, 2 * of - 1 - number)], axis=1
        )

    return value if of == 1 else on_columns(value, cut)


def unchunked(parts: Sequence[Any]) -> Any:
    """The opposite of ``chunked``, of all ranks' parts."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Mapping):
        return {name: unchunked([part[name] for part in parts]) for name in parts[0]}
    half = parts[0].shape[1] // 2
    front = [part[:, :half] for part in parts]
    back = [part[:, half:] for part in reversed(parts)]
    return _concatenated([*front, *back], axis=1)


def joined(parts: Sequence[Any]) -> Any:
    """Along the first axis; None where all are None."""
    if all(part is None for part in parts):
        return None
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"ranks returned different kinds: {sorted(k.__name__ for k in kinds)}")
    if isinstance(parts[0], Mapping):
        if len({frozenset(part) for part in parts}) != 1:
            raise ValueError("ranks returned different keys")
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return _concatenated(parts, axis=0)


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    kind = type(parts[0])
    if kind.__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(list(parts), dim=axis)
    if hasattr(parts[0], "__array__"):
        import numpy

        return numpy.concatenate(list(parts), axis=axis)
    if not isinstance(parts[0], list | tuple):
        raise ValueError(f"ranks returned {kind.__name__}, which cannot be joined")
    return kind(item for part in parts for item in part)


def equal(one: Any, other: Any) -> bool:
    """Whether two results have the same values, arrays and tensors element by element."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(equal, one, other))
    same = one == other
    # Arrays and tensors compare by element, and of different shapes perhaps not at all.
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    return bool(same.all()) if hasattr(same, "all") else bool(same)
