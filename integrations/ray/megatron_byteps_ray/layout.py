"""Which numbers of ranks Megatron's arguments allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MODEL_PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value that the last ``--name value`` or ``--name=value`` gives."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    text = option(arguments, name)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} {text}: not a whole number from 1")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a job are cut."""

    model: int
    """Ranks that hold one copy of the model: tensor times pipeline times context parallelism."""
    expert: int
    """Copies must divide among so many ranks of experts."""
    micro_batch: int
    global_batch: int | None
    """Sequences of a step; None: as many as the copies take at once."""

    @classmethod
    def of(cls, arguments: Sequence[str], multiple: int | None = None) -> Layout:
        """Of Megatron's arguments. Raises ValueError where one is no number."""
        model = 1
        for name in _MODEL_PARALLEL:
            model *= _number(arguments, name, 1)
        whole = option(arguments, "--global-batch-size")
        return cls(
            model=multiple or model,
            expert=_number(arguments, "--expert-model-parallel-size", 1),
            micro_batch=_number(arguments, "--micro-batch-size", 1),
            global_batch=_number(arguments, "--global-batch-size", 1) if whole else None,
        )

    def fits(self, ranks: int) -> bool:
        """Whether a job of so many ranks can train with the same arguments."""
        if ranks < 1 or ranks % self.model or (ranks % self.expert):
            return False
        copies = ranks // self.model
        return self.global_batch is None or self.global_batch % (self.micro_batch * copies) == 0

    def largest(self, available: int) -> int:
        """The largest number of ranks that fits; 0 where none does."""
        return next((ranks for ranks in range(available, 0, -1) if self.fits(ranks)), 0)
