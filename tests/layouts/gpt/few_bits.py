"""Sums of gradients that travelled in blocks of few bits: what they have to be, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.few_bits import Sums

from .outcome import Errors
from .rows import Layout
from .seen import RankSeen, Sum

KEPT_BYTES = 4096
"""Parameters of fewer bytes of gradients travel as bf16, those of fp16 as they are: all norms and
biases of these models."""
ENVIRONMENT = {
    "BYTEPS_DETERMINISTIC": "1",
    "BYTEPS_KEEP_BF16_BYTES": str(KEPT_BYTES),
    "BYTEPS_NODE_PIECE_BYTES": str(1 << 20),
}
"""Of the ranks: with pieces as long as buckets, so that it is known where blocks begin."""
FORMS = ("int8", "int4")


class FewBits:
    """The sums of a run, in the order of its steps: with feedback each depends on those before."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: dict[tuple[object, ...], Sums] = {}

    def expected(
        self, members: tuple[int, ...], name: str, parts: Sequence[Sum]
    ) -> Callable[[Sum], torch.Tensor]:
        """What each member gets of the next sum of a bucket.

        Args:
            parts: of all members, in their order.
        """
        lead, kept = parts[0], _kept(parts[0])
        values = [part.local.flatten().clone() for part in parts]
        small = [torch.cat([one[b:e] for b, e in kept]) if kept else one[:0] for one in values]
        for one in values:
            for begin, end in kept:
                one[begin:end] = 0
        total = torch.empty_like(values[0])
        hosts = _by_host(members, values, self._layout.ranks_that_sum_first)
        for index, places in enumerate(self._places(lead, len(members), len(hosts))):
            key = (members, name, index)
            if key not in self._sums:
                feedback = self._layout.wire == "int4"
                self._sums[key] = Sums(self._layout.wire, len(hosts), feedback=feedback)
            part = self._sums[key]([host[places] for host in hosts], average=False)
            total[places] = part
        if kept:
            own = lead.local.dtype
            kept_type = torch.bfloat16 if own == torch.float32 else own
            sums = torch.stack([one.to(kept_type).float() for one in small])
            exact = sums[0].clone()
            for one in sums[1:]:
                exact += one
            rounded = exact.to(kept_type).to(total.dtype)
            for (begin, end), part in zip(
                kept, rounded.split([e - b for b, e in kept]), strict=True
            ):
                total[begin:end] = part
        return lambda one: total[one.offset : one.offset + one.result.numel()]

    def forget(self) -> None:
        """As all ranks do after a step that was skipped."""
        for sums in self._sums.values():
            sums.forget()

    def _places(self, lead: Sum, members: int, hosts: int) -> list[torch.Tensor]:
        """The elements of each tensor that is pushed, in its order: blocks begin at its start."""
        count = lead.local.numel()
        everything = torch.arange(count)
        if not self._layout.is_node_first or hosts == members:
            return [everything]
        per_host = self._layout.per_host
        is_shard = lead.result.numel() < count and self._layout.instances == 1
        if not is_shard:
            return list(everything.split(-(-count // per_host)))
        shards = everything.view(members, -1)  # of each rank
        return [shards[local::per_host].flatten() for local in range(per_host)]


def errors(ranks: Sequence[RankSeen], layout: Layout) -> Errors:
    """Hold each sum of a run against the bits that it has to have."""
    found, bits = Errors(), FewBits(layout)
    for step in range(len(ranks[0].steps)):
        skipped = False
        wanted: dict[tuple[tuple[int, ...], str], Callable[[Sum], torch.Tensor]] = {}
        for rank, seen in enumerate(ranks):
            for name, total in seen.steps[step].sums.items():
                where = f"step {step + 1}, rank {rank}, {name}"
                parts = [ranks[m].steps[step].sums[name] for m in total.members]
                key = total.members, name
                if key not in wanted:
                    wanted[key] = bits.expected(total.members, name, parts)
                want = wanted[key](total)
                if not torch.equal(total.result.flatten().nan_to_num(7), want.nan_to_num(7)):
                    found.inexact.append(where)
                if not total.result.isfinite().all():
                    skipped = True
                    continue
                exact = torch.stack([part.local.double() for part in parts]).sum(0).flatten()
                exact = exact[total.offset : total.offset + total.result.numel()]
                error = (total.result.flatten().double() - exact).norm() / exact.norm().clamp(1e-30)
                found.relative[layout.wire] = max(
                    float(error), found.relative.get(layout.wire, 0.0)
                )
        if skipped:
            bits.forget()
    return found


def _kept(total: Sum) -> list[tuple[int, int]]:
    size = total.local.element_size()
    return sorted(
        (begin, end)
        for name, (begin, end) in total.places.items()
        if (end - begin) * size < KEPT_BYTES or "router" in name
    )


def kept_bytes(total: Sum) -> int:
    """Of the gradients of a bucket that travel as bf16."""
    return 2 * sum(end - begin for begin, end in _kept(total))


def _by_host(
    members: tuple[int, ...], values: Sequence[torch.Tensor], per_host: int
) -> list[torch.Tensor]:
    """What is pushed: of each host that sums first, the sum of its ranks."""
    sums: dict[int, torch.Tensor] = {}
    for member, value in zip(members, values, strict=True):
        host = member // per_host
        sums[host] = value if host not in sums else sums[host] + value
    return list(sums.values())
