"""Seeds of what is rounded by chance (BYTEPS_STOCHASTIC_ROUNDING)."""

from __future__ import annotations

from byteps.torch import c_lib, session
from byteps.torch.figures import setting

_rounds: dict[str, int] = {}
"""That were begun of each name, in this job."""
_job = -1
"""Its number."""


def next_seed(name: str) -> int | None:
    """For what this process rounds next under a name, as the engine has it for what it rounds
    itself; None: to the nearest."""
    if setting("BYTEPS_STOCHASTIC_ROUNDING") != "1":
        return None
    global _job
    if session.number() != _job:
        _rounds.clear()
        _job = session.number()
    number = _rounds.get(name, 0)
    _rounds[name] = number + 1
    return c_lib.chance_seed(name, number, session.rank())
