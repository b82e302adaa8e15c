# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Settings of ``--dpu-outer STEPS[,NAME=VALUE...]``: when and how outer steps are made."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Settings of exchanges between replicas, or of the outer steps of one job."""

    steps: int = 1
    """Steps between two exchanges. 1: gradients are summed in each step."""
    lr: float | None = None
    """Learning rate of the outer optimizer. None: `byteps.torch.diloco.outer_rate`."""
    momentum: float = 0.9
    """Nesterov momentum of the outer optimizer."""
    after: int = 0
    """Number of initial steps in which gradients are summed, and the outer momentum is filled."""
    delay: int = 0
    """Number of steps that replicas may make while an exchange is in flight."""
    fragments: int = 1
    """Number of parts of the model, each of which is exchanged at other steps."""
    dtype: str = "bfloat16"
    """Type in which differences of parameters travel."""


DTYPES = ("int8", "int4", "bfloat16", "float32")
NAMES = tuple(field.name for field in fields(Outer) if field.name != "steps")


@functools.cache
def parse(text: str | None) -> Outer:
    """Parse the flag's value; None: the flag is absent. Raises ValueError with the reason."""
    if text is None:
        return Outer()
    steps, *pairs = text.split(",")
    given: dict[str, int | float | str] = {"steps": _number(text, "STEPS", steps, int)}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in NAMES:
            raise _error(text, f"{pair!r} is not NAME=VALUE, where NAME is {', '.join(NAMES)}")
        if name in given:
            raise _error(text, f"{name} is given twice")
        if name == "dtype":
            given[name] = value
        else:
            given[name] = _number(text, name, value, float if name in ("lr", "momentum") else int)
    outer = Outer(**given)  # type: ignore[arg-type]  # each has the type of its field
    _check(text, outer)
    return outer


def _number(text: str, name: str, value: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise _error(text, f"{name} must be {what} of at least 0, not {value!r}")
    return number


def _check(text: str, outer: Outer) -> None:
    if outer.steps < 1:
        raise _error(text, "STEPS must be 1 or more")
    if not 1 <= outer.fragments <= outer.steps:
        raise _error(text, f"fragments must be from 1 to STEPS, {outer.steps}")
    if outer.delay >= outer.steps:
        raise _error(text, f"delay must be less than STEPS, {outer.steps}")
    if outer.dtype not in DTYPES:
        raise _error(text, f"dtype must be one of {', '.join(DTYPES)}, not {outer.dtype!r}")
    if outer.lr == 0 or outer.momentum >= 1:
        raise _error(text, "lr must be more than 0, and momentum less than 1")


def _error(text: str, why: str) -> ValueError:
    return ValueError(f"--dpu-outer={text}: {why}")
