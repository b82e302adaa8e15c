"""What every row has: a name, and how the ranks of its job are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training job. Parallel sizes are Megatron's; data parallelism is what remains."""

    name: str
    ranks: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks with samples of their own: those that sum all but experts' gradients are ``cp``
        times as many."""
        return self.ranks // (self.tp * self.cp * self.pp)

    def size_arguments(self) -> list[str]:
        """Megatron's arguments for sizes above 1."""
        sizes = {
            "tensor-model": self.tp,
            "context": self.cp,
            "pipeline-model": self.pp,
            "expert-model": self.ep,
        }
        found: list[str] = []
        for kind, size in sizes.items():
            found += [f"--{kind}-parallel-size", str(size)] if size > 1 else []
        return found


class Named(Protocol):
    """Whatever has a name."""

    @property
    def name(self) -> str: ...


def named[R: Named](rows: Sequence[R], names: Sequence[str]) -> list[R]:
    """The rows with these names, in the order of the table; all of them for no names.

    Raises:
        ValueError: no row has one of the names.
    """
    known = dict.fromkeys(row.name for row in rows)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no layout is called {', '.join(unknown)}; there are: {' '.join(known)}")
    return [row for row in rows if not names or row.name in names]
