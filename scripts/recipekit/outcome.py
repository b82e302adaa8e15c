"""What was found about one recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one functional test, example, or recipe of a library."""

    name: str
    hosts: int
    """Of its own, with as many GPUs each as it says."""
    refused: str = ""
    """Why ``--use-dpu-reduce`` does not go with it; empty: it is accepted."""
    optimizer_refused: str = ""
    """The same of ``--dpu-optimizer``, nothing else being changed."""
    reaches_servers: bool = False
    """Whether, on its own hosts, a bucket goes to servers with ``--use-dpu-reduce`` alone."""
    most_hosts: int = 1
    """That a group of its dense gradients spans."""
    left: str = ""
    """That a wrapper shards gradients by itself; empty: none does."""
    features: tuple[str, ...] = ()
    """Names, of :mod:`.features`."""
    not_read: str = ""
    """What Megatron, or Megatron-Bridge, says: it does not take the recipe here."""
