"""All interfaces through which gradients are reduced, and the references for comparison."""

from __future__ import annotations

from tests.border.by_hand import AveragedByHand
from tests.border.interface import Interface
from tests.border.megatron_interfaces import Megatron, MegatronGloo, MegatronServed
from tests.border.torch_interfaces import (
    C10d,
    Ddp,
    DdpHook,
    DistributedOptimizer,
    Fsdp,
    FsdpGloo,
    ServerOptimizer,
    Sharded,
    ShardedGloo,
)

SERVED: tuple[type[Interface], ...] = (
    DistributedOptimizer,
    ServerOptimizer,
    DdpHook,
    C10d,
    Fsdp,
    Sharded,
    Megatron,
    MegatronServed,
)
"""Columns of the matrix."""

_REFERENCES: tuple[type[Interface], ...] = (
    AveragedByHand,
    Ddp,
    FsdpGloo,
    ShardedGloo,
    MegatronGloo,
)
_ALL = {interface.name: interface for interface in (*SERVED, *_REFERENCES)}


def make(name: str) -> Interface:
    """Create the interface of this name."""
    return _ALL[name]()
