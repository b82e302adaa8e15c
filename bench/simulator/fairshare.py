"""Max-min fair rates: how flows share links when each gets as much as it can without taking more
than others from those that have less. A fair queue, and roughly TCP, shares like that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SAME = 1e-9  # relative: links that fill up together, but for rounding


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One link on the way of every flow."""

    link: np.ndarray
    """Index of the link for each flow (int)."""
    weight: np.ndarray
    """How much of the link a rate of 1 of that flow takes (float): above 1 where a flow stands for
    several equal ones that meet in this link."""


def max_min(capacity: np.ndarray, hops: Sequence[Hop], active: np.ndarray) -> np.ndarray:
    """The rate of every flow, in the unit of ``capacity``; 0 where not ``active``.

    Progressive filling: raise all rates together until a link is full, keep the flows through it
    at that rate, go on with the others. A flow through no limited link gets ``inf``.
    """
    rates = np.zeros(len(active))
    left = capacity.astype(float)
    growing = np.flatnonzero(active)
    while growing.size:
        load = np.zeros(len(capacity))
        for hop in hops:
            load += np.bincount(hop.link[growing], hop.weight[growing], len(capacity))
        level = np.full(len(capacity), np.inf)
        np.divide(left, load, out=level, where=load > 0)
        lowest = level.min()
        if np.isinf(lowest):
            rates[growing] = np.inf
            break
        full = level <= lowest * (1 + _SAME)
        stopped = np.zeros(growing.size, dtype=bool)
        for hop in hops:
            stopped |= full[hop.link[growing]]
        kept = growing[stopped]
        rates[kept] = lowest
        for hop in hops:
            left -= lowest * np.bincount(hop.link[kept], hop.weight[kept], len(capacity))
        np.maximum(left, 0.0, out=left)
        growing = growing[~stopped]
    return rates
