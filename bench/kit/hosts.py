"""The hosts that a plan needs, for as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.kit.emulation import LOOPBACK, Emulation, Host
from bench.kit.mps import together
from bench.kit.plan import Plan


@contextmanager
def hosts_of(plan: Plan) -> Iterator[Sequence[Host]]:
    """The hosts of a plan's topology, for as long as they are needed, on GPUs that ranks share."""
    with together(plan):
        if not plan.topology.emulated_hosts:
            yield [LOOPBACK]
            return
        with Emulation(plan.topology) as emulation:
            yield emulation.hosts
