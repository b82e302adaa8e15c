"""Compares the values that ranks recorded in two runs: through BytePS and through
torch.distributed.

Sums in blocks of few bits are checked bit by bit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tests.few_bits import Sums

from .layout import Errors, RankSeen, Report, Step, Sum
from .rows import STEPS, Layout

# Tolerance of the bytes that go to servers, relative to the cost model. It covers padding.
BYTES_TOLERANCE = 0.02
FEW_BITS_TOLERANCE = 0.1  # for partly filled blocks and both ends of shards
WIRE_BYTES = {"bf16": 2.0, "int8": 130 / 128, "int4": 66 / 128}


def begin_report(layout: Layout, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Report:
    """Start a report with the sums and their members. If the report then has misses, the two runs
    have different shapes."""
    report = Report(layout=layout)
    check_shape(report, ours, theirs)
    if report.misses:
        return report
    first = [seen.steps[0].sums for seen in ours]
    distinct = {(s.members, name) for sums in first for name, s in sums.items()}
    report.buckets = len(distinct)
    report.groups = sorted({len(members) for members, _ in distinct})
    return report


def compare(layout: Layout, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Report:
    """Compare two runs of a layout, rank by rank, with each other and with exact sums."""
    report = begin_report(layout, ours, theirs)
    if report.misses:
        return report
    if layout.has_few_bits:
        report.ours = few_bits_errors(ours, layout)
    else:
        wire = torch.bfloat16 if layout.wire else None
        report.ours = errors(ours, wire, layout.ranks_that_sum_first)
    report.theirs = errors(theirs)
    for who, errors_of in (("BytePS", report.ours), ("all-reduce", report.theirs)):
        few = layout.has_few_bits and who == "BytePS"
        exact = "sum of rounded blocks" if few else "rounded sum of two values"
        _note(report, f"{who}: not the {exact}", errors_of.inexact)
        _note(report, f"{who}: members got different sums", errors_of.split)
    _check_errors(report)
    if not layout.graphed:
        _check_bytes(report, ours)

    apart = list(differences(ours, theirs))
    report.same_bits = not apart
    if report.bits_must_agree:
        _note(report, "bits differ", apart)
    check_first_step(report, ours, theirs)
    check_losses(report, ours, theirs)
    return report


def errors(ranks: Sequence[RankSeen], wire: torch.dtype | None = None, per_host: int = 1) -> Errors:
    """Compare each sum of a run with the sum in fp64 of its members' parts.

    With ``wire``, fp32 parts were sent in that dtype: the parts are rounded to it first, and so is
    the sum. A host sends the sum of its ``per_host`` ranks.
    """
    measured = Errors()
    for step in range(len(ranks[0].steps)):
        for rank, seen in enumerate(ranks):
            for name, total in seen.steps[step].sums.items():
                where = f"step {step + 1}, rank {rank}, {name}"
                parts = [ranks[m].steps[step].sums[name] for m in total.members]
                hosts = [member // per_host for member in total.members]
                _measure(measured, where, total, parts, wire, hosts)
    return measured


def _measure(
    measured: Errors,
    where: str,
    total: Sum,
    parts: Sequence[Sum],
    wire: torch.dtype | None,
    hosts: Sequence[int],
) -> None:
    lead = parts[0]
    if total.offset == lead.offset and not torch.equal(total.result, lead.result):
        measured.split.append(where)
    end = total.offset + total.result.numel()
    values = [part.local[total.offset : end] for part in parts]
    sent = wire if wire is not None and len(set(hosts)) > 1 else total.result.dtype
    if sent != total.result.dtype:
        values = _by_host(values, hosts)
    values = [value.to(sent) for value in values]
    if len(values) <= 2:
        expected = values[0] if len(values) == 1 else values[0] + values[1]
        if not torch.equal(total.result, expected.to(total.result.dtype)):
            measured.inexact.append(where)
    wide = [value.double() for value in values]
    exact = torch.stack(wide).sum(0)
    magnitude = torch.stack([value.abs() for value in wide]).sum(0)
    # Below this value the dtype has less precision, and a relative error means nothing.
    limits = torch.finfo(sent)
    floor = limits.tiny / limits.eps
    error = ((total.result.double() - exact).abs() / magnitude.clamp_min(floor)).max().item()
    kind = str(sent).removeprefix("torch.")
    measured.relative[kind] = _larger(error, measured.relative.get(kind, 0.0))


def _by_host(values: Sequence[torch.Tensor], hosts: Sequence[int]) -> list[torch.Tensor]:
    """Sum the values of each host in their own dtype."""
    sums: dict[int, torch.Tensor] = {}
    for value, host in zip(values, hosts, strict=True):
        sums[host] = value if host not in sums else sums[host] + value
    return list(sums.values())


def check_shape(report: Report, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> None:
    """Check that both runs ended, summed the same buckets, and that BytePS made the sums of one
    run."""
    for rank, (seen, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(seen.steps) != STEPS or len(other.steps) != STEPS:
            report.misses.append(f"rank {rank}: {len(seen.steps)} and {len(other.steps)} steps")
            return
        if other.names:
            report.misses.append(f"rank {rank}: all-reduce used BytePS")
        for step, (a, b) in enumerate(zip(seen.steps, other.steps, strict=True)):
            # The server optimizer has separate buckets for some parameters.
            if a.gradients().keys() != b.gradients().keys():
                report.misses.append(f"rank {rank}, step {step + 1}: other parameters")
            elif a.sums.keys() != b.sums.keys() and not report.layout.servers:
                report.misses.append(f"rank {rank}, step {step + 1}: other buckets")
        spread = [
            way_of(s.members, report.layout) for step in seen.steps for s in step.sums.values()
        ]
        if report.layout.graphed:
            if not (seen.names and seen.pushed_bytes):
                report.misses.append(f"rank {rank}: no push-pulls")
            continue
        for way in () if report.layout.servers else ("flat", "node-first"):
            # A node-first sum is pushed in pieces.
            mark = "/piece0" if way == "node-first" else ""
            begun = sum(
                name.endswith(mark) and ("/piece" in name) == bool(mark)
                for name in seen.names
                if not name.endswith("/kept")
            )
            if begun != spread.count(way):
                wanted = f"{spread.count(way)} sums"
                report.misses.append(f"rank {rank}: {begun} {way} push-pulls for {wanted}")


def way_of(members: Sequence[int], layout: Layout) -> str:
    """Get the way in which a sum must go, from the spread of its members over hosts."""
    counts = Counter(member // layout.per_host for member in members)
    if len(counts) == 1:
        return "collective"
    even = len(set(counts.values())) == 1 and min(counts.values()) > 1
    return "node-first" if layout.is_node_first and even else "flat"


def _check_bytes(report: Report, ours: Sequence[RankSeen]) -> None:
    """Check that the ranks of each host push and pull as many bytes as the cost model says."""
    layout = report.layout
    pushed: defaultdict[int, float] = defaultdict(float)
    pulled: defaultdict[int, float] = defaultdict(float)
    for rank, seen in enumerate(ours):
        for step in seen.steps:
            for total in step.sums.values():
                up, down = _model_bytes(rank, total, layout)
                pushed[rank // layout.per_host] += up
                pulled[rank // layout.per_host] += down
    for host in range(-(-len(ours) // layout.per_host)):
        members = ours[host * layout.per_host : (host + 1) * layout.per_host]
        for what, counted, expected in (
            ("pushed", sum(member.pushed_bytes for member in members), pushed[host]),
            ("pulled", sum(member.pulled_bytes for member in members), pulled[host]),
        ):
            tolerance = FEW_BITS_TOLERANCE if layout.has_few_bits else BYTES_TOLERANCE
            if abs(counted - expected) > tolerance * expected:
                report.misses.append(f"host {host} {what} {counted} bytes, not {expected:.0f}")


def _model_bytes(rank: int, total: Sum, layout: Layout) -> tuple[float, float]:
    """Get the bytes that a rank pushes and pulls for a sum, as its share of the cost model's bytes
    for the host."""
    way = way_of(total.members, layout)
    if way == "collective":
        return 0.0, 0.0
    element = WIRE_BYTES.get(layout.wire, float(total.local.element_size()))
    whole = total.local.numel() * element
    wanted = total.result.numel() * element
    # Each rank sends and receives all values that do not travel in few bits.
    exact_bytes = kept_bytes(total) if layout.has_few_bits else 0
    if way == "flat":
        return whole + exact_bytes, wanted + exact_bytes
    sharers = len(sharers_of(rank, total.members, layout))
    # If several ranks of a host own a shard, each pulls a part, and they exchange the parts.
    return whole / sharers + exact_bytes, min(wanted, whole / sharers) + exact_bytes


def sharers_of(rank: int, members: Sequence[int], layout: Layout) -> list[int]:
    """Get the members of a sum on the rank's host."""
    return [member for member in members if member // layout.per_host == rank // layout.per_host]


def _check_errors(report: Report) -> None:
    for kind, error in report.ours.relative.items():
        if kind in FORMS:  # checked bit by bit
            continue
        # The error may be that of the other run. If parts were sent in another dtype, the other run
        # has no such parts. Then the error may be that of one rounding, or of one rounding per rank
        # that torch.distributed adds inside a host.
        rounding = torch.finfo(getattr(torch, kind)).eps / 2
        roundings = report.layout.ranks_that_sum_first
        allowed = max(report.theirs.relative.get(kind, 0.0), roundings * rounding)
        if not error <= allowed:
            report.misses.append(f"{kind}: error {error:.3g}, more than {allowed:.3g}")


def check_first_step(report: Report, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> None:
    """Check that losses and local gradients before the first update are equal in both runs."""
    for rank, (seen, other) in enumerate(zip(ours, theirs, strict=True)):
        if seen.steps[0].loss != other.steps[0].loss:
            report.misses.append(f"rank {rank}: the first losses differ")
        twins = other.steps[0].gradients()
        for name, gradient in seen.steps[0].gradients().items():
            # A scaled loss can make infinities and NaN.
            if not torch.allclose(gradient, twins[name], rtol=0, atol=0, equal_nan=True):
                report.misses.append(f"rank {rank}, {name}: the first local gradients differ")


def check_losses(report: Report, ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> None:
    seen = 0
    for rank, other in zip(ours, theirs, strict=True):
        for a, b in zip(rank.steps, other.steps, strict=True):
            if a.loss is None or b.loss is None:
                continue
            seen += 1
            difference = abs(a.loss - b.loss) / abs(b.loss)
            report.loss_difference = _larger(difference, report.loss_difference)
    limit = report.loss_tolerance
    if not seen or not report.loss_difference <= limit:
        report.misses.append(f"the losses differ by {report.loss_difference:.3g}, above {limit:g}")


def differences(ours: Sequence[RankSeen], theirs: Sequence[RankSeen]) -> Iterator[str]:
    """Yield every difference between the two runs, to the last bit."""
    for rank, (seen, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(seen.steps) != len(other.steps):
            yield f"rank {rank}: {len(seen.steps)} and {len(other.steps)} steps"
        for number, (a, b) in enumerate(zip(seen.steps, other.steps, strict=False), start=1):
            if (a.loss, a.grad_norm) != (b.loss, b.grad_norm):
                yield f"step {number}, rank {rank}: loss or gradient norm"
            for name in _unequal(_results(a), _results(b)):
                yield f"step {number}, rank {rank}, {name}"
        for name in _unequal(seen.parameters, other.parameters):
            yield f"rank {rank}, parameter {name}"


def _results(step: Step) -> dict[str, torch.Tensor]:
    return {name: total.result for name, total in step.sums.items()}


def _unequal(
    values: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield the names of values that differ, or that only one side has."""
    for name in sorted(values.keys() | other.keys()):
        if name not in values or name not in other or not _same(values[name], other[name]):
            yield name


def _larger(first: float, other: float) -> float:
    """Get the larger number, or NaN if either is NaN."""
    return math.nan if math.isnan(first) or math.isnan(other) else max(first, other)


def _same(values: torch.Tensor, other: torch.Tensor) -> bool:
    return values.dtype == other.dtype and torch.equal(values, other)


def _note(report: Report, what: str, where: Sequence[str]) -> None:
    if where:
        report.misses.append(f"{what}: {where[0]} ({len(where)} in all)")


# ----- sums that travelled in blocks of few bits


KEPT_BYTES = 4096
"""Size in bytes. Gradients of smaller parameters, which are all norms and biases of these models,
are not sent in few bits. They travel as bf16, and fp16 gradients travel as fp16."""
FEW_BITS_ENVIRONMENT = {
    "BYTEPS_DETERMINISTIC": "1",
    "BYTEPS_KEEP_BF16_BYTES": str(KEPT_BYTES),
    "BYTEPS_NODE_PIECE_BYTES": str(1 << 20),
}
"""Environment of the ranks: pieces are as long as buckets, so that the starts of blocks are
known."""
FORMS = ("int8", "int4")


class FewBits:
    """The expected sums of a run, in step order: with error feedback each depends on
    earlier sums."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: dict[tuple[object, ...], Sums] = {}

    def expected(
        self, members: tuple[int, ...], name: str, parts: Sequence[Sum]
    ) -> Callable[[Sum], torch.Tensor]:
        """Compute what each member gets from the next sum of a bucket.

        Args:
            parts: Local parts of all members, in member order.
        """
        lead, exact_ranges = parts[0], _kept(parts[0])
        values = [part.local.flatten().clone() for part in parts]
        small = [
            torch.cat([value[b:e] for b, e in exact_ranges]) if exact_ranges else value[:0]
            for value in values
        ]
        for value in values:
            for begin, end in exact_ranges:
                value[begin:end] = 0
        total = torch.empty_like(values[0])
        hosts = _pushed_by_host(members, values, self._layout.ranks_that_sum_first)
        for index, places in enumerate(self._places(lead, len(members), len(hosts))):
            key = (members, name, index)
            if key not in self._sums:
                feedback = self._layout.wire == "int4"
                self._sums[key] = Sums(self._layout.wire, len(hosts), feedback=feedback)
            part = self._sums[key]([host[places] for host in hosts], average=False)
            total[places] = part
        if exact_ranges:
            own = lead.local.dtype
            kept_type = torch.bfloat16 if own == torch.float32 else own
            sums = torch.stack([value.to(kept_type).float() for value in small])
            exact = sums[0].clone()
            for value in sums[1:]:
                exact += value
            rounded = exact.to(kept_type).to(total.dtype)
            for (begin, end), part in zip(
                exact_ranges, rounded.split([e - b for b, e in exact_ranges]), strict=True
            ):
                total[begin:end] = part
        return lambda view: total[view.offset : view.offset + view.result.numel()]

    def forget(self) -> None:
        """Drop the error feedback, as all ranks do after a skipped step."""
        for sums in self._sums.values():
            sums.forget()

    def _places(self, lead: Sum, members: int, hosts: int) -> list[torch.Tensor]:
        """Get the indices of elements in each pushed tensor; blocks begin at the tensor's start."""
        count = lead.local.numel()
        everything = torch.arange(count)
        if not self._layout.is_node_first or hosts == members:
            return [everything]
        per_host = self._layout.per_host
        is_shard = lead.result.numel() < count and self._layout.instances == 1
        if not is_shard:
            return list(everything.split(-(-count // per_host)))
        shards = everything.view(members, -1)  # a row for each rank
        return [shards[local::per_host].flatten() for local in range(per_host)]


def few_bits_errors(ranks: Sequence[RankSeen], layout: Layout) -> Errors:
    """Compare each sum of a run with the exact bits that it must have."""
    measured, bits = Errors(), FewBits(layout)
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
                    measured.inexact.append(where)
                if not total.result.isfinite().all():
                    skipped = True
                    continue
                exact = torch.stack([part.local.double() for part in parts]).sum(0).flatten()
                exact = exact[total.offset : total.offset + total.result.numel()]
                error = (total.result.flatten().double() - exact).norm() / exact.norm().clamp(1e-30)
                measured.relative[layout.wire] = max(
                    float(error), measured.relative.get(layout.wire, 0.0)
                )
        if skipped:
            bits.forget()
    return measured


def _kept(total: Sum) -> list[tuple[int, int]]:
    size = total.local.element_size()
    return sorted(
        (begin, end)
        for name, (begin, end) in total.places.items()
        if (end - begin) * size < KEPT_BYTES or "router" in name
    )


def kept_bytes(total: Sum) -> int:
    """Get the bytes of a bucket's gradients that travel as bf16."""
    return 2 * sum(end - begin for begin, end in _kept(total))


def _pushed_by_host(
    members: tuple[int, ...], values: Sequence[torch.Tensor], per_host: int
) -> list[torch.Tensor]:
    """Get the pushed values: the sum over the ranks of each host that sums first."""
    sums: dict[int, torch.Tensor] = {}
    for member, value in zip(members, values, strict=True):
        host = member // per_host
        sums[host] = value if host not in sums else sums[host] + value
    return list(sums.values())
