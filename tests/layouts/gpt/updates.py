"""Compares a run with the server optimizer and a run with Megatron's own optimizer."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from .compare import (
    BYTES_TOLERANCE,
    FEW_BITS_TOLERANCE,
    WIRE_BYTES,
    begin_report,
    check_first_step,
    check_losses,
    kept_bytes,
    sharers_of,
    way_of,
)
from .layout import Difference, RankSeen, Report, Sum
from .rows import Layout

# Largest allowed relative difference of two runs: of their final parameters, taken as one vector,
# and of a step's norm. Both update in fp32, so only the rounding of gradient sums differs.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-4, "bf16-wire": 1e-3, "fp16-wire": 1e-3}
MANY_BF16_TOLERANCE = 2e-2
"""Tolerance for sums of three or more bf16 values: servers round once, an all-reduce after every
addition."""
COARSE_TOLERANCE = 2e-3
MUON_BF16_TOLERANCE = 5e-3
"""Tolerance with Muon, which makes all directions of a gradient equally long, including those of
rounding errors.

In Megatron alone, a learning rate that is off by a factor of 1e-7 changes the parameters by 2e-3
after the four steps.
"""
FEW_BITS = {"int8": 5e-2, "int4": 0.15}
"""Tolerances for gradients in few bits.

The first steps of Adam are as long for small gradients as for large gradients, so that the rounding
of the small gradients shows. The rounding itself is checked bit by bit.
"""
ALLOWED_ERROR = 1.1
"""Largest ratio of our updates' error to the error of Megatron's own optimizer, which rounds other
values."""
_TIED = ("word_embeddings.weight", "output_layer.weight")


def tolerance(report: Report) -> float:
    """Get the largest allowed difference."""
    layout = report.layout
    if "muon" in layout.extra and layout.dtype == "bf16":
        return MUON_BF16_TOLERANCE
    if layout.has_few_bits:
        return FEW_BITS[layout.wire]
    if layout.coarse:
        return COARSE_TOLERANCE
    if layout.dtype == "fp32":
        return TOLERANCE["fp32"]
    if layout.wire or (layout.dtype == "bf16-wire" and max(report.groups) > 2):
        return MANY_BF16_TOLERANCE
    return TOLERANCE[layout.dtype]


def compare_updates(layout: Layout, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Report:
    """Compare a run with the server optimizer and a run with Megatron's own optimizer."""
    report = begin_report(layout, ours, theirs)
    if report.misses:
        return report
    check_first_step(report, ours, theirs)
    check_losses(report, ours, theirs)
    limit = tolerance(report)
    report.update = Difference(
        parameters=_parameters(ours, theirs),
        norm=_norms(ours, theirs),
        ours=_update_error(ours),
        theirs=_update_error(theirs),
    )
    for what, difference in (
        ("parameters", report.update.parameters),
        ("norms", report.update.norm),
    ):
        if not difference <= limit:
            report.misses.append(f"{what} differ by {difference:.3g}, more than {limit:g}")
    allowed = ALLOWED_ERROR * report.update.theirs
    if layout.is_held_against_fp64 and not report.update.ours <= allowed:
        report.misses.append(
            f"updates are off by {report.update.ours:.3g} from fp64, more than {allowed:.3g}"
        )
    if layout.has_few_bits:
        for rank, seen in enumerate(ours):
            if seen.inexact_updates is None:
                report.misses.append(f"rank {rank}: no update was made again")
            for miss in seen.inexact_updates or ():
                report.misses.append(f"rank {rank}, {miss}")
    report.misses += _zeros(ours, theirs)
    report.misses += _split(ours, theirs)
    report.misses += _bytes(layout, ours)
    return report


def _parameters(ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> float:
    difference = size = 0.0
    for seen, other in zip(ours, theirs, strict=True):
        if seen.parameters.keys() != other.parameters.keys():
            return math.nan
        for name, value in seen.parameters.items():
            twin = other.parameters[name].double()
            difference += (value.double() - twin).square().sum().item()
            size += twin.square().sum().item()
    return math.sqrt(difference / size)


def _update_error(ranks: Sequence[RankSeen]) -> float:
    """Get the error of all parameters, as a vector."""
    errors = [seen.update_error for seen in ranks]
    if None in errors:
        return math.nan
    error, size = (
        math.fsum(part) for part in zip(*(error for error in errors if error), strict=True)
    )
    return math.sqrt(error / size) if size else math.nan


def _norms(ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> float:
    """Get the largest relative difference of norms; 0 without clipping, which leaves our run
    without a norm."""
    worst = 0.0
    for seen, other in zip(ours, theirs, strict=True):
        for a, b in zip(seen.steps, other.steps, strict=True):
            if a.grad_norm is None or a.grad_norm < 0 or not b.grad_norm:
                continue
            difference = abs(a.grad_norm - b.grad_norm) / b.grad_norm
            worst = math.nan if math.isnan(difference) else max(worst, difference)
    return worst


def _zeros(ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Iterator[str]:
    """Compare the counts of zero gradients before the first update, where both runs have equal
    gradients."""
    unclear = _cancelling(ours)
    for rank, (seen, other) in enumerate(zip(ours, theirs, strict=True)):
        zeros, wanted = seen.steps[0].zeros, other.steps[0].zeros
        if zeros is not None and wanted is not None and abs(zeros - wanted) <= unclear:
            continue
        if zeros != wanted:
            yield f"rank {rank}: {zeros} gradients of the first step are 0, not {wanted}"


def _cancelling(ranks: Sequence[RankSeen]) -> int:
    """Count first-step gradients that are 0 or not depending on the order of additions."""
    count = 0
    for rank, seen in enumerate(ranks):
        for name, total in seen.steps[0].sums.items():
            if rank != total.members[0] or len(total.members) < 3:
                continue
            values = [ranks[m].steps[0].sums[name].local for m in total.members]
            wide = torch.stack(values).double()
            magnitude = wide.abs().sum(0)
            rounding = len(values) * torch.finfo(values[0].dtype).eps * magnitude
            count += int(((wide.sum(0).abs() <= rounding) & (magnitude > 0)).sum())
    return count


def _split(ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Iterator[str]:
    """Check that copies of a parameter that are equal with Megatron's optimizer are equal with
    ours."""
    copies: dict[tuple[str, bytes], list[tuple[int, str]]] = defaultdict(list)
    for rank, seen in enumerate(theirs):
        for name, value in seen.parameters.items():
            kind = "tied" if name.endswith(_TIED) else name
            copies[kind, _digest(value)].append((rank, name))
    for places in copies.values():
        if len({_digest(ours[rank].parameters[name]) for rank, name in places}) > 1:
            rank, name = places[0]
            yield f"copies of {name} are not the same on ranks {[rank for rank, _ in places]}"


def _digest(value: torch.Tensor) -> bytes:
    return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()


def _made_again(layout: Layout, seen: RankSeen) -> list[bool]:
    """Find the steps that were clipped after servers had tried them.

    Servers try no step after two clipped steps, and none if parameters arrive during the forward
    pass.
    """
    extra = list(layout.extra)
    if "--overlap-param-gather" in extra and "muon" not in extra:
        return [False] * len(seen.steps)
    limit = float(extra[extra.index("--clip-grad") + 1]) if "--clip-grad" in extra else 1.0
    clipped = [0 < limit < (step.grad_norm or 0.0) for step in seen.steps]
    tries = [clipped[max(0, i - 2) : i] != [True, True] for i in range(len(clipped))]
    return [now and tried for now, tried in zip(clipped, tries, strict=True)]


def _kind(name: str) -> str:
    """Get a bucket's kind, dense or expert, from its name."""
    return "expert" if name.split("/")[1].startswith("expert") else "dense"


def _kinds_that_sum_first(layout: Layout, ours: Sequence[RankSeen]) -> set[str]:
    """Get the kinds of buckets that the ranks of a host sum first.

    Parts of the model have copies of the same parameters. So that the copies stay equal to the bit,
    a kind sums first only if the groups of all parts are spread over hosts alike.
    """
    spreads: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for seen in ours:
        for name, total in seen.steps[0].sums.items():
            hosts = [member // layout.per_host for member in total.members]
            first_seen = list(dict.fromkeys(hosts))
            sums_first = way_of(total.members, layout) == "node-first"
            spread = tuple(map(first_seen.index, hosts)) if sums_first else ()
            spreads[_kind(name)].add(spread)
    return {kind for kind, spread in spreads.items() if len(spread) == 1 and () not in spread}


def _bytes(layout: Layout, ours: Sequence[RankSeen]) -> Iterator[str]:
    """Check the bytes that ranks push and pull.

    In a step each rank pushes its gradients and pulls its parameters, in one dtype; it pulls twice
    if the step is repeated. A rank of each group loads the fp32 parameters at the start. With
    node-first, each rank of a host does its share of that.
    """
    sum_first = _kinds_that_sum_first(layout, ours)
    for rank, seen in enumerate(ours):
        moved: dict[str, float] = defaultdict(float)
        again = _made_again(layout, seen)
        for number, step in enumerate(seen.steps):
            for name, total in step.sums.items():
                size = 2 if layout.wire else total.local.element_size()
                elements, first = float(total.local.numel()), total.members[:1]
                apart = _apart(layout, total)
                if _kind(name) in sum_first:
                    sharers = len(sharers_of(rank, total.members, layout))
                    elements, apart = elements / sharers, apart / sharers
                    first = tuple(sharers_of(first[0], total.members, layout))
                exact = total.result.numel() == 0  # otherwise the ranks update, by the sum
                up, down = elements * size, elements * size
                if layout.has_few_bits:
                    up = elements * WIRE_BYTES[layout.wire] + apart * _held_bytes(layout)
                    down = elements * WIRE_BYTES["int8"] + apart * _held_bytes(layout)
                moved["pushed"] += up
                moved["pulled"] += down * (2 if exact and again[number] else 1)
                if exact and number == 0 and rank in first:
                    moved["pushed"] += (elements + apart) * 4
        tolerance = FEW_BITS_TOLERANCE if layout.has_few_bits else BYTES_TOLERANCE
        for what, counted in (("pushed", seen.pushed_bytes), ("pulled", seen.pulled_bytes)):
            if abs(counted - moved[what]) > tolerance * moved[what]:
                yield f"rank {rank} {what} {counted} bytes, not {moved[what]:.0f}"


def _apart(layout: Layout, total: Sum) -> float:
    """Count the elements of a bucket whose gradients are sent in full while others travel in few
    bits."""
    if not layout.has_few_bits:
        return 0.0
    tied = [
        end - begin
        for name, (begin, end) in total.places.items()
        if layout.pp > 1 and name.endswith(_TIED)
    ]
    return kept_bytes(total) / 2 + sum(tied)


def _held_bytes(layout: Layout) -> int:
    return 4 if layout.dtype == "fp32" else 2
