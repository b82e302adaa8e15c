"""A user's launch line, changed so that it runs plain or through servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from byteps.forecast.training import OPTIMIZER, PRESET, USE, WIRE

SAME = "same"
WIRES = (SAME, "bf16", "int8", "int4")
"""Types in which values may travel. SAME: the type in which they are reduced."""

_SWITCHES = {USE, OPTIMIZER}
_VALUES = {PRESET, WIRE, "--dpu-reduce-backend", "--dpu-outer", "--dpu-quorum"}
_LISTS = {"--dpu-reduce-keep-bf16"}
_C10D, _C10D_WIRE, _FSDP = "BYTEPS_C10D", "BYTEPS_C10D_WIRE_DTYPE", "BYTEPS_FSDP_DTYPES"
_SAVES = {
    "--save": "--save-interval",
    "--non-persistent-ckpt-type": "--non-persistent-save-interval",
}
"""Megatron's arguments that enable saving. Each has the argument that sets its interval."""
_NEVER = "1000000000"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command, and changes of its environment."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables to set."""

    @property
    def added(self) -> str:
        """Variables that a user puts in front of the plain command."""
        return " ".join(f"{name}={value}" for name, value in self.env.items())


def plain(words: Sequence[str]) -> Launch:
    """Return the command without BytePS."""
    return Launch(words=_without_saves(_without_flags(words)), env={_C10D: "0"})


def through_servers(
    words: Sequence[str], env: Mapping[str, str], wire: str, *, is_megatron: bool
) -> Launch:
    """Return the command with BytePS. If it has no flags or variables of BytePS, it gets those that
    docs/use/when-to-use.md recommends."""
    if not is_megatron:
        has = env.get(_C10D, "0") not in ("", "0")
        given = {} if has or wire == SAME else {_C10D_WIRE: wire}
        given |= {name: env[name] for name in (_C10D_WIRE, _FSDP) if env.get(name)}
        return Launch(words=tuple(words), env={_C10D: env[_C10D] if has else "1", **given})
    return Launch(words=(*_without_saves(words), *flags_for(words, wire)), env={})


def flags_for(words: Sequence[str], wire: str) -> tuple[str, ...]:
    """Return the flags to add to a command with Megatron's training loop."""
    if len(_without_flags(words)) < len(words):
        return ()
    if wire in (SAME, "bf16"):
        return (USE,) if wire == SAME else (USE, WIRE, wire)
    return (PRESET, "own-hosts") if wire == "int8" else (PRESET, "own-hosts", WIRE, wire)


def types_text(ours: Launch, *, is_megatron: bool) -> str:
    """Describe the types in which a launch through servers sends values."""
    if not is_megatron:
        gradients, _, parameters = ours.env.get(_FSDP, "").partition(",")
        gradients = gradients or ours.env.get(_C10D_WIRE, SAME)
        return _type_text(gradients) + (f" and parameters in {parameters}" if parameters else "")
    flags = " ".join(ours.words).replace("=", " ").split()
    if WIRE in flags:
        return _type_text(flags[flags.index(WIRE) + 1])
    return _type_text("int8" if PRESET in flags else SAME)


def _type_text(wire: str) -> str:
    return f"gradients in {'their own type' if wire == SAME else wire}"


def _without_flags(words: Sequence[str]) -> tuple[str, ...]:
    others, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in _SWITCHES | _VALUES | _LISTS:
            others.append(word)
        elif flag in _VALUES and not equals:
            del left[:1]
        while flag in _LISTS and left and not left[0].startswith("-"):
            left.pop(0)
    return tuple(others)


def _without_saves(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words with save intervals that are never reached, because a trial must not
    overwrite a job's checkpoints."""
    flags = {word.partition("=")[0] for word in words}
    never = [word for flag, often in _SAVES.items() if flag in flags for word in (often, _NEVER)]
    return (*words, *never)
