"""The launch line of a user, plain and through servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from byteps.forecast.training import OPTIMIZER, PRESET, USE, WIRE

SAME = "same"
WIRES = (SAME, "bf16", "int8", "int4")
"""Types in which values may travel; SAME: the one in which they are reduced."""

_SWITCHES = {USE, OPTIMIZER}
_VALUES = {PRESET, WIRE, "--dpu-reduce-backend", "--dpu-outer", "--dpu-quorum"}
_LISTS = {"--dpu-reduce-keep-bf16"}
_C10D, _C10D_WIRE = "BYTEPS_C10D", "BYTEPS_C10D_WIRE_DTYPE"
_SAVES = {
    "--save": "--save-interval",
    "--non-persistent-ckpt-type": "--non-persistent-save-interval",
}
"""Megatron's arguments with which it saves, and the one that says how often."""
_NEVER = "1000000000"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command, and the variables that it needs."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    """Variables to set; the others stay as they are."""
    unset: frozenset[str] = frozenset()
    """Variables to remove."""

    @property
    def added(self) -> str:
        """Words that a user adds before or after a plain command."""
        return " ".join(f"{name}={value}" for name, value in self.env.items())


def plain(words: Sequence[str]) -> Launch:
    """The command without BytePS."""
    return Launch(words=_without_saves(_without_flags(words)), env={}, unset=frozenset({_C10D}))


def through_servers(
    words: Sequence[str], env: Mapping[str, str], wire: str, *, is_megatron: bool
) -> Launch:
    """The command with BytePS: as it is where it has BytePS's flags or variables, else with those
    that docs/use/when-to-use.md recommends.

    Args:
        env: the environment of the command.
        wire: one of WIRES, for a command that does not say itself.
        is_megatron: Megatron's own loop trains.
    """
    if not is_megatron:
        has = env.get(_C10D, "0") not in ("", "0")
        given = {} if has or wire == SAME else {_C10D_WIRE: env.get(_C10D_WIRE) or wire}
        return Launch(words=tuple(words), env={_C10D: env[_C10D] if has else "1", **given})
    return Launch(words=(*_without_saves(words), *flags_for(words, wire)), env={})


def flags_for(words: Sequence[str], wire: str) -> tuple[str, ...]:
    """Megatron's flags to add to a command."""
    if len(_without_flags(words)) < len(words):
        return ()
    if wire in (SAME, "bf16"):
        return (USE,) if wire == SAME else (USE, WIRE, wire)
    return (PRESET, "own-hosts") if wire == "int8" else (PRESET, "own-hosts", WIRE, wire)


def _without_flags(words: Sequence[str]) -> tuple[str, ...]:
    kept, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in _SWITCHES | _VALUES | _LISTS:
            kept.append(word)
        elif flag in _VALUES and not equals:
            del left[:1]
        while flag in _LISTS and left and not left[0].startswith("-"):
            left.pop(0)
    return tuple(kept)


def _without_saves(words: Sequence[str]) -> tuple[str, ...]:
    """A trial must not write over a job's checkpoints."""
    flags = {word.partition("=")[0] for word in words}
    never = [word for flag, often in _SAVES.items() if flag in flags for word in (often, _NEVER)]
    return (*words, *never)
