"""What a rank sends where the ranks of a host sum first, and servers update."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import byteps.torch as bps
import pytest
import torch
import torch.distributed as dist
from byteps.torch import server_shards, session
from byteps.torch.flat import Place
from byteps.torch.nodes import NodeGroup
from byteps.torch.pieces import whole_pieces
from byteps.torch.server_bucket import BucketSpec, ServerBucket
from byteps.torch.server_host import HostRanks
from byteps.torch.server_rule import Rule, Step, cut_segments
from byteps.torch.server_shards import ServerShards
from byteps.torch.step_machine import start_and_wait

SEGMENTS = [(5, 0, True), (6, 1, False), (40, 1, True), (97, 2, True)]


def _each(segments: list[tuple[int, int, bool]]) -> list[tuple[int, bool]]:
    """Of every element: its parameter group, and whether its gradient counts in the norm."""
    begins = [0, *(end for end, *_ in segments)]
    return [
        (group, counts)
        for begin, (end, group, counts) in zip(begins[:-1], segments, strict=True)
        for _ in range(begin, end)
    ]


@pytest.mark.parametrize("per_host", [1, 2, 3, 8])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_each_element_keeps_its_group_and_counts_once(per_host: int, pieces: int) -> None:
    whole, found = _each(SEGMENTS), {}
    for piece, local in itertools.product(whole_pieces(97, per_host, pieces), range(per_host)):
        begin, end = piece.scatters[0][local]
        own = cut_segments(SEGMENTS, (begin, end), piece.length)
        assert own[-1][0] == piece.length
        assert not any(counts for _, counts in _each(own)[end - begin :]), "zeros do not count"
        ends = [0, *(last for last, *_ in own)]
        assert all(a < b for a, b in itertools.pairwise(ends)), "no segment is empty"
        for element, what in zip(range(begin, end), _each(own), strict=False):
            assert element not in found
            found[element] = what
    assert [found[element] for element in range(97)] == whole


def test_a_rank_that_has_nothing_of_a_piece_sends_zeros() -> None:
    assert cut_segments(SEGMENTS, (97, 97), 2) == [(2, 0, False)]


def on_a_host(size: int, body: Callable[[int, NodeGroup], Any]) -> list[Any]:
    """What the ranks of a host return, each a thread."""
    store = dist.HashStore()

    def of(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=600))
        return body(rank, NodeGroup(group, size))

    with ThreadPoolExecutor(max_workers=size) as pool:
        return list(pool.map(of, range(size)))


class Kept:
    """A ServerTensor of this rank; slot 0 of what servers keep is what was loaded."""

    def __init__(self, declaration: bps.TensorDeclaration, *_: Any, **options: Any) -> None:
        self.values = torch.full((declaration.numel,), torch.nan)

    def load(self, slot: int, values: torch.Tensor) -> None:
        self.values.copy_(values)

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        return self.values[begin:end].clone()


@pytest.mark.parametrize(("elements", "size", "pieces"), [(24, 2, 3), (25, 3, 2), (7, 4, 1)])
def test_ranks_load_their_shards_and_gather_any_range(
    monkeypatch: pytest.MonkeyPatch, elements: int, size: int, pieces: int
) -> None:
    monkeypatch.setattr(server_shards, "ServerTensor", Kept)
    monkeypatch.setattr(server_shards, "_GATHERED_AT_ONCE", 3)  # in several turns
    cut, whole = whole_pieces(elements, size, pieces), torch.arange(float(elements))
    ranges = [(b, e) for b in range(elements + 1) for e in range(b, elements + 1)]

    def gathered(rank: int, group: NodeGroup) -> list[tuple[int, int]]:
        declarations = [
            bps.TensorDeclaration(name="x", dtype=torch.float32, numel=piece.length)
            for piece in cut
        ]
        host = HostRanks(group=group, local=rank)
        segments = [(elements, 0, True)]
        rule = Rule(is_adamw=False, groups=[])
        tensor = ServerShards(declarations, rule, segments, pieces=cut, host=host)
        tensor.load(0, whole)
        for begin, end in ranges:
            assert torch.equal(tensor.gather(0, begin, end), whole[begin:end])
        for begin, end in tensor.own:
            assert torch.equal(tensor.read(0, begin, end), whole[begin:end])
        with pytest.raises(ValueError, match="not of one shard of this rank"):
            tensor.read(0, 0, elements)
        return tensor.own

    mine = itertools.chain(*on_a_host(size, gathered))
    assert sorted(e for one in mine for e in range(*one)) == list(range(elements))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_are_added_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    """Wherever an element lies. A ring begins with another rank in each part."""
    random = torch.Generator().manual_seed(size)
    same = [(torch.randn(8, generator=random) * 10**rank).to(dtype) for rank in range(size)]

    def sum_of(rank: int, group: NodeGroup) -> torch.Tensor:
        output = torch.empty(8, dtype=dtype)
        group.add_in_order(output, same[rank].repeat(size))
        return output

    outputs = on_a_host(size, sum_of)
    assert all(output.dtype == dtype for output in outputs)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = same[0].to(wide)
    for value in same[1:]:
        expected = expected + value
    assert all(torch.equal(output, expected.to(dtype)) for output in outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_summed_and_gathered(size: int, dtype: torch.dtype) -> None:
    def around(rank: int, group: NodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.arange(5 * size).add(rank).to(dtype)
        whole = torch.zeros_like(source)
        here, elsewhere = whole.chunk(size)[rank], torch.empty(5, dtype=dtype)
        for part in (elsewhere, here):  # the latter in its place already
            whole.zero_()
            group.reduce_scatter(part, source)
            group.all_gather(whole, part)
            if part is elsewhere:
                first = whole.clone()
        return first, whole

    expected = torch.arange(5 * size).mul(size).add(size * (size - 1) // 2).to(dtype)
    for first, second in on_a_host(size, around):
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


class Lonely:
    """A group of two ranks, of which the other one was lost before it gathers."""

    size = 2

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        output.copy_(source[: output.numel()])

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        raise RuntimeError("connection closed by peer")


class Moving(Kept):
    """A ServerTensor that notes what is waited for."""

    waited: list[int]

    def push_try(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Any) -> int:
        return int(gradients.storage_offset())

    def wait(self, handle: int) -> None:
        Moving.waited.append(handle)


def test_all_shards_are_waited_for_when_a_rank_of_the_host_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what comes down for the others would be written into memory that the caller has back."""
    monkeypatch.setattr(server_shards, "ServerTensor", Moving)
    monkeypatch.setattr(session, "rank", lambda: 0)
    monkeypatch.setattr(Moving, "waited", [], raising=False)
    cut = whole_pieces(12, 2, 3)
    declarations = [
        bps.TensorDeclaration(name="x", dtype=torch.float32, numel=piece.length, group=[0, 1])
        for piece in cut
    ]
    group: Any = Lonely()
    host = HostRanks(group=group, local=0)
    rule = Rule(is_adamw=False, groups=[])
    spec = BucketSpec(declarations=declarations, rule=rule, pieces=cut, host=host)
    parameter = torch.zeros(12)
    gradients = torch.ones(12)
    bucket = ServerBucket([Place(0, parameter)], lambda: gradients, spec, group_of={parameter: 0})
    started = bucket.push(Step(1, 1.0, False, []))
    with pytest.raises(RuntimeError, match="closed by peer"):
        bucket.wait(started)
    assert Moving.waited == [0, 4, 8]


@pytest.mark.parametrize(("starts", "waits"), [("b", ""), ("", "a"), ("c", "a"), ("", "abc")])
def test_what_was_started_is_waited_for_when_something_fails(starts: str, waits: str) -> None:
    waited: dict[str, bool] = {}

    def start(bucket: str) -> str | None:
        if bucket in starts:
            raise RuntimeError(f"start {bucket}")
        return None if bucket == "n" else bucket.upper()

    def wait(bucket: str, handle: str, failed: bool) -> None:
        assert handle == bucket.upper()
        waited[bucket] = failed
        if bucket in waits:
            raise bps.BytePSError(f"wait {bucket}")

    first = f"start {starts}" if starts else f"wait {waits[0]}"
    with pytest.raises(RuntimeError, match=first):
        start_and_wait("anbc", start, wait)
    started = "abc".partition(starts)[0] if starts else "abc"
    assert waited == {bucket: bool(starts) or bucket != "a" for bucket in started}
