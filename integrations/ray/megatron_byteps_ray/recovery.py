"""Where the next incarnation's training state comes from: actors' memory, or the checkpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from .failures import FAILED, Failure
from .pool import Slot

_ASK_S = 60.0
_MOVE_S = 600.0


class Recovery:
    """Chooses peers for copies, and finds after a failure the newest state that all ranks have."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._job = secrets.token_hex(8)
        self._ranks = 0
        """Of the incarnation before; 0: there was none."""
        self._restored: int | None = None
        self._refused = ""
        self.where = ""
        """Where copies are, for a person."""

    def after(self, failure: Failure, steps: int) -> None:
        """An incarnation with so many steps failed. A state that does harm is not taken twice."""
        alone = any(end.kind == FAILED for end in failure.causes)
        if self._restored is not None and not steps and alone:
            self._refused = f"ranks that started from step {self._restored} of it failed"

    def prepare(self, slots: Sequence[Slot], pool: Sequence[Slot]) -> dict[str, Any] | None:
        """Bring each rank's state to its actor, if every rank's of one step is there.

        Returns:
            ``source`` (``memory`` or ``checkpoint``), ``seconds``, and ``step``, ``bytes``,
            ``moved`` (ranks whose state another actor had) and ``ranks``, or ``why`` not. None
            for the first incarnation.
        """
        before, self._restored = self._ranks, None
        self._ranks = len(slots)
        refused, self._refused = self._refused, ""
        if not before:
            return None
        began = time.monotonic()
        if not refused and before != len(slots):
            refused = f"{before} ranks became {len(slots)}"
        found = {} if refused else self._collect(slots, pool)
        event = {"source": "checkpoint", "why": refused} if refused else found
        return {**event, "seconds": time.monotonic() - began}

    def _collect(self, slots: Sequence[Slot], pool: Sequence[Slot]) -> dict[str, Any]:
        holders = self._ask(pool)
        steps = {step for _, step in holders}
        ranks = range(len(slots))
        whole = [step for step in steps if all((rank, step) in holders for rank in ranks)]
        if not whole:
            return {"source": "checkpoint", "why": _what_is_missing(holders, ranks)}
        step, size, moves = max(whole), 0, []
        for rank, slot in enumerate(slots):
            own = holders[rank, step]
            size += next(iter(own.values()))
            if slot.bundle not in own:
                holder = next(other for other in pool if other.bundle in own)
                moves.append(holder.actor.send_snapshot.remote(slot.actor, self._job, rank, step))
        try:
            ray.get(moves, timeout=_MOVE_S)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            return {
                "source": "checkpoint",
                "why": f"the state of step {step} did not arrive: {why}",
            }
        self._restored = step
        counts = {"bytes": size, "moved": len(moves), "ranks": len(slots)}
        return {"source": "memory", "step": step, **counts}

    def _ask(self, pool: Sequence[Slot]) -> dict[tuple[int, int], dict[int, int]]:
        """By rank and step: the bundles of the actors that have this state, with its bytes."""
        asked = {slot.actor.snapshots.remote(self._job): slot for slot in pool}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S)
        holders: dict[tuple[int, int], dict[int, int]] = {}
        for ref in answered:
            try:
                held = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # lost meanwhile
            for key, size in held.items():
                holders.setdefault(key, {})[asked[ref].bundle] = size
        return holders

    def orders(
        self, number: int, slots: Sequence[Slot], spares: Sequence[Slot]
    ) -> list[Mapping[str, Any]]:
        """For each rank of this incarnation: what its actor does with its state.

        Spares forget what is of no use any more, and may hold copies.
        """
        begun = [
            spare.actor.begin_snapshots.remote(self._job, number, self._restored)
            for spare in spares
        ]
        if begun:
            ray.wait(begun, num_returns=len(begun), timeout=_ASK_S)
        peers = [_peer(rank, slots, spares) for rank in range(len(slots))]
        apart = all(
            peer is not None and peer.facts["node"] != slot.facts["node"]
            for peer, slot in zip(peers, slots, strict=True)
        )
        self.where = (
            "copies are on another machine"
            if apart
            else "some copies are on the same machine"
            if all(peers)
            else "there is no other actor for a copy"
        )
        return [
            {
                "job": self._job,
                "number": number,
                "rank": rank,
                "peer": peer.actor if peer else None,
                "interval": self._interval,
                "restore": self._restored,
            }
            for rank, peer in enumerate(peers)
        ]


def _peer(rank: int, slots: Sequence[Slot], spares: Sequence[Slot]) -> Slot | None:
    """Who holds a copy of this rank's state: the next rank on another machine, else a spare there,
    else the next rank, else a spare."""
    others = [slots[(rank + far) % len(slots)] for far in range(1, len(slots))]
    # Not all ranks to the same spare.
    idle = [spares[(rank + far) % len(spares)] for far in range(len(spares))]
    node = slots[rank].facts["node"]
    apart = [slot for slot in [*others, *idle] if slot.facts["node"] != node]
    return next(iter([*apart, *others, *idle]), None)


def _what_is_missing(holders: Mapping[tuple[int, int], Any], ranks: Sequence[int]) -> str:
    """Why there is no step of which every rank's state is there."""
    steps = [step for _, step in holders]
    if not steps:
        return "no rank's state was kept yet, or all of it was lost"
    lost = [rank for rank in ranks if (rank, max(steps)) not in holders]
    names = ", ".join(map(str, lost))
    return (
        f"the state of step {max(steps)} is not there for rank {names}, nor is an older one whole"
    )
