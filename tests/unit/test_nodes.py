"""Ranks, their places on hosts, and the pieces of a tensor that each host sums first.

Also with updates on servers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import byteps.torch as bps
import pytest
import torch
import torch.distributed as dist
from byteps.cost_model import Servers
from byteps.launcher.places import LocalPlace
from byteps.torch import engine, nodes, ops, server_transfer, session, world
from byteps.torch.node_groups import Piece, shard_pieces, whole_pieces
from byteps.torch.nodes import HostLayout, HostRanks, NodeGroup, host_name
from byteps.torch.server_bucket import BucketSpec, ServerBucket
from byteps.torch.server_tensor import PlacedParameter, Rule, Step, cut_segments
from byteps.torch.server_transfer import ServerShards
from byteps.torch.step_machine import start_and_wait


def test_hosts_come_from_names() -> None:
    layout = HostLayout.of((0, 2, 4, 6), ("a", "b", "a", "b"))
    assert layout.hosts == ((0, 4), (2, 6))
    assert layout.per_host == 2
    assert (layout.host_of(6), layout.local_index(6)) == (1, 1)
    assert (layout.on_host_of(4), layout.across(4)) == ((0, 4), (4, 6))
    with pytest.raises(ValueError, match="rank 1 is none of"):
        layout.host_of(1)


def test_uneven_hosts_have_no_number_of_ranks() -> None:
    assert HostLayout.of((0, 1, 2), ("a", "a", "b")).per_host is None


def test_the_name_of_a_host_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    own = host_name()
    assert own
    monkeypatch.setenv("BYTEPS_HOST_ID", "rack3-7")
    assert host_name() == "rack3-7" != own


def _reduced(piece: Piece, local: int) -> list[int]:
    """List the indices of the elements of a piece that the rank with this local index pushes."""
    return [e for ranges in piece.scatters for e in range(*ranges[local])]


@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("elements", [1, 2, 7, 8, 24, 97, 1000])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_whole_pieces_hold_every_element_once(elements: int, per_host: int, pieces: int) -> None:
    cut = whole_pieces(elements, per_host, pieces)
    assert len(cut) <= pieces
    pushed = [_reduced(piece, local) for piece in cut for local in range(per_host)]
    assert sorted(itertools.chain(*pushed)) == list(range(elements))
    assert all(piece.gather and piece.wanted is None and piece.length > 0 for piece in cut)
    # Only the last piece may need padding.
    lengths = [{end - begin for begin, end in piece.scatters[0]} for piece in cut]
    assert all(len(parts) == 1 for parts in lengths[:-1])
    if elements % per_host == 0 and pieces == 1:
        assert len(lengths[0]) == 1


def _instances(hosts: int, per_host: int, instances: int) -> list[list[int]]:
    """List the shard of each rank: an instance is consecutive ranks, which own a shard each."""
    shards = hosts * per_host // instances
    return [[(h * per_host + i) % shards for i in range(per_host)] for h in range(hosts)]


@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("hosts", "per_host", "instances"),
    [(2, 2, 1), (3, 2, 1), (16, 2, 1), (4, 4, 1), (2, 4, 2), (4, 2, 4), (4, 2, 2), (8, 8, 2)],
)
def test_each_rank_gets_exactly_the_shard_it_owns(
    hosts: int, per_host: int, instances: int, pieces: int
) -> None:
    owned = _instances(hosts, per_host, instances)
    shards = hosts * per_host // instances
    size = 6
    for host, local in itertools.product(range(hosts), range(per_host)):
        cut = shard_pieces(shards * size, owned, host, local, pieces)
        assert cut is not None
        everything = sorted(
            e for piece in cut for index in range(per_host) for e in _reduced(piece, index)
        )
        assert everything == list(range(shards * size)), "each element is pushed once from a host"
        got: list[int] = []
        for piece in cut:
            assert not piece.gather
            begin, end = piece.wanted or (0, 0)
            got += _reduced(piece, local)[begin:end]
        own_shard = owned[host][local]
        assert got == list(range(own_shard * size, (own_shard + 1) * size))
    # Ranks must agree on every reduce-scatter, so their plans may differ only in `wanted`.
    plans = {
        tuple(piece.scatters for piece in shard_pieces(shards * size, owned, h, i, pieces) or ())
        for h, i in itertools.product(range(hosts), range(per_host))
    }
    assert len(plans) == 1


def test_ranks_that_alternate_between_hosts() -> None:
    """Group positions 0 and 2 on a host, 1 and 3 on the other."""
    owned = [[0, 2], [1, 3]]
    for host, local in itertools.product(range(2), range(2)):
        pieces = shard_pieces(8, owned, host, local, 1)
        assert pieces is not None
        (piece,) = pieces
        begin, end = piece.wanted or (0, 0)
        own_shard = owned[host][local]
        assert _reduced(piece, local)[begin:end] == [2 * own_shard, 2 * own_shard + 1]


@pytest.mark.parametrize("owned", [[[0, 1, 0, 1]], [[0, 0], [0, 0]], [[0, 1], [1, 2]]])
def test_parts_that_would_overlap_cannot_be_cut(owned: list[list[int]]) -> None:
    assert shard_pieces(12, owned, 0, 0, 1) is None


class OneOfTwo:
    """A group of two ranks on a host, in which the other rank has only zeros."""

    size = 2

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        output.copy_(source[: output.numel()])

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        assert output.data_ptr() == part.data_ptr()
        output[part.numel() :].zero_()


def test_what_a_host_has_summed_goes_through_the_public_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that replaces push_pull_async_inplace must see all sums."""
    calls: list[tuple[list[float], dict[str, Any]]] = []

    def push_pull(tensor: torch.Tensor, **options: Any) -> int:
        calls.append((tensor.tolist(), options))
        tensor.mul_(2)
        return len(calls)

    monkeypatch.setattr(ops, "push_pull_async_inplace", push_pull)
    monkeypatch.setattr(ops, "synchronize", lambda handle: None)
    monkeypatch.setattr(session, "rank", lambda: 0)
    monkeypatch.setattr(engine, "partition_count", lambda nbytes, **kinds: 1)
    group: Any = OneOfTwo()
    summed = nodes.NodeSum(
        name="g",
        layout=HostLayout.of((0, 1, 2, 3), ("a", "a", "b", "b")),
        node=group,
        pieces=tuple(whole_pieces(8, 2, 2)),
        placement=5,
    )
    tensor = torch.arange(8.0)
    summed.start(tensor).wait()
    assert [values for values, _ in calls] == [[0.0, 1.0], [4.0, 5.0]]
    assert [options["name"] for _, options in calls] == ["g/part0of2/piece0", "g/part0of2/piece1"]
    assert [options["placement"] for _, options in calls] == [5, 6]
    assert {(options["group"], options["piece_of"]) for _, options in calls} == {((0, 2), 4)}
    assert tensor.tolist() == [0.0, 2.0, 0.0, 0.0, 8.0, 10.0, 0.0, 0.0]


# Pushes of a rank when ranks of a host sum first, and servers update.


SEGMENTS = [(5, 0, True), (6, 1, False), (40, 1, True), (97, 2, True)]


def _each(segments: list[tuple[int, int, bool]]) -> list[tuple[int, bool]]:
    """Get the parameter group of every element, and whether its gradient counts in the norm."""
    begins = [0, *(end for end, *_ in segments)]
    return [
        (group, counts)
        for begin, (end, group, counts) in zip(begins[:-1], segments, strict=True)
        for _ in range(begin, end)
    ]


@pytest.mark.parametrize("per_host", [1, 2, 3, 8])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_each_element_keeps_its_group_and_counts_once(per_host: int, pieces: int) -> None:
    whole, group_of = _each(SEGMENTS), {}
    for piece, local in itertools.product(whole_pieces(97, per_host, pieces), range(per_host)):
        begin, end = piece.scatters[0][local]
        own = cut_segments(SEGMENTS, (begin, end), piece.length)
        assert own[-1][0] == piece.length
        assert not any(counts for _, counts in _each(own)[end - begin :]), "zeros do not count"
        ends = [0, *(last for last, *_ in own)]
        assert all(a < b for a, b in itertools.pairwise(ends)), "no segment is empty"
        for element, what in zip(range(begin, end), _each(own), strict=False):
            assert element not in group_of
            group_of[element] = what
    assert [group_of[element] for element in range(97)] == whole


def test_a_rank_that_has_nothing_of_a_piece_sends_zeros() -> None:
    assert cut_segments(SEGMENTS, (97, 97), 2) == [(2, 0, False)]


def on_a_host(size: int, body: Callable[[int, NodeGroup], Any]) -> list[Any]:
    """Run the ranks of a host, each in a thread, and get their results."""
    store = dist.HashStore()

    def of(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=600))
        return body(rank, NodeGroup(group, size))

    with ThreadPoolExecutor(max_workers=size) as pool:
        return list(pool.map(of, range(size)))


class Kept:
    """A ServerTensor of this rank; slot 0 of its state on servers has the loaded values."""

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
    monkeypatch.setattr(server_transfer, "ServerTensor", Kept)
    monkeypatch.setattr(server_transfer, "_GATHERED_AT_ONCE", 3)  # in several rounds
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

    loaded = itertools.chain(*on_a_host(size, gathered))
    assert sorted(e for span in loaded for e in range(*span)) == list(range(elements))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_are_added_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    """The order of additions does not depend on an element's index. A ring would begin each part
    with another rank."""
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
        for part in (elsewhere, here):  # the second piece is in its place already
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
    """A group of two ranks; the other rank is lost before it gathers."""

    size = 2

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        output.copy_(source[: output.numel()])

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        raise RuntimeError("connection closed by peer")


class Moving(Kept):
    """A ServerTensor that records waits."""

    name = "bucket"
    waited: list[int]

    def push_try(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Any) -> int:
        return int(gradients.storage_offset())

    def wait(self, handle: int) -> None:
        Moving.waited.append(handle)


def test_all_shards_are_waited_for_when_a_rank_of_the_host_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All shards must have ended, because servers write into memory that the caller uses again."""
    monkeypatch.setattr(server_transfer, "ServerTensor", Moving)
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
    bucket = ServerBucket(
        [PlacedParameter(0, parameter)], lambda: gradients, spec, group_of={parameter: 0}
    )
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


# Ranks find their places on hosts when the launcher gives none, or wrong places.


@pytest.fixture
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "BYTEPS_HOST_ID")
    for name in (*ours, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        # Set and deleted through monkeypatch, so that it also undoes the test's own changes.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(world, "host_name", lambda: "mine")


def _place(host: str, local: tuple[int, int] | None, *, named: bool = False) -> LocalPlace:
    return LocalPlace(host=host, local=local, is_named=named)


def _find(rank: int, others: Sequence[LocalPlace]) -> tuple[int, int]:
    """Find the place of a rank; `others` has the messages of all other ranks."""

    def exchange(own: LocalPlace) -> list[LocalPlace]:
        return [*others[:rank], own, *others[rank:]]

    environment = dict(os.environ)
    indices = world.find_place(rank, exchange)
    assert dict(os.environ) == environment, "an argument travels as a variable"
    return indices


def _tell(monkeypatch: pytest.MonkeyPatch, local: tuple[int, int]) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local[0]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local[1]))


@pytest.mark.usefixtures("no_place")
@pytest.mark.parametrize("local_and_size", [(0, 1), None])
def test_ranks_that_are_all_said_to_be_alone(
    local_and_size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if local_and_size:
        _tell(monkeypatch, local_and_size)
    places_ = [
        _place("mine", local_and_size),
        _place("other", local_and_size),
        _place("other", local_and_size),
    ]
    assert _find(2, places_) == (1, 2)


@pytest.mark.usefixtures("no_place")
def test_a_launcher_that_tells_places_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _tell(monkeypatch, (1, 2))
    others = [_place("mine", (0, 2)), _place("other", (0, 2)), _place("other", (1, 2))]
    assert _find(1, others) == (1, 2)


@pytest.mark.usefixtures("no_place")
def test_a_place_that_some_rank_was_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _tell(monkeypatch, (0, 1))
    assert _find(1, [_place("mine", (0, 1), named=True)]) == (0, 1)
    monkeypatch.setenv("BYTEPS_LOCAL_RANK", "7")
    monkeypatch.setenv("BYTEPS_LOCAL_SIZE", "8")
    assert _find(1, [_place("mine", (0, 1))]) == (7, 8)


@pytest.mark.usefixtures("no_place")
def test_ranks_that_were_told_nothing_find_places_beside_a_named_one() -> None:
    others = [_place("mine", (5, 8), named=True), _place("other", None)]
    assert _find(1, others) == (1, 2)


@pytest.mark.usefixtures("no_place")
def test_a_later_job_of_the_process_finds_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _tell(monkeypatch, (0, 1))
    alone = _place("mine", (0, 1))
    assert _find(1, [alone]) == (1, 2)
    assert _find(0, [alone, alone]) == (0, 3)


# Machines of servers, for the cost model.


def _of_servers(addresses: Sequence[str], *, hosts: int, local: int = 0, each: int = 0) -> Servers:
    facts = world.RankFacts("host", 0.0, local, each, False, [])
    return world._servers(hosts, facts, addresses)


@pytest.mark.parametrize(
    ("addresses", "local", "machines", "each"),
    [
        (["10.0.0.1", "10.0.0.2"], 0, 2, 1),
        (["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"], 0, 2, 2),
        (["fd00::1", "fd00::1", "fd00::1"], 0, 1, 3),
        # Servers on both workers' hosts, and two on a machine of their own.
        (["10.0.0.8", "10.0.0.9", "10.0.0.1", "10.0.0.1"], 1, 1, 2),
        (["10.0.0.8", "10.0.0.9"], 1, 0, 1),
        # These addresses do not tell: uneven numbers of servers, loopback addresses, unknown ones.
        (["10.0.0.1", "10.0.0.1", "10.0.0.2"], 0, 3, 1),
        (["127.0.0.1", "127.0.0.1"], 0, 2, 1),
        (["", ""], 0, 2, 1),
    ],
)
def test_addresses_tell_how_many_servers_a_machine_has(
    addresses: list[str], local: int, machines: int, each: int
) -> None:
    servers = _of_servers(addresses, hosts=2, local=local)
    assert (servers.extra, servers.per_machine, servers.local) == (machines, each, local)


def test_ranks_with_different_settings_are_told_which() -> None:
    world._demand_alike("BYTEPS_PARTITION_BYTES", [4096, 4096])
    with pytest.raises(
        bps.BytePSError, match=r"BYTEPS_PARTITION_BYTES: 4096 on rank 0, 8192 on rank 2"
    ):
        world._demand_alike("BYTEPS_PARTITION_BYTES", [4096, 4096, 8192])


def test_a_number_of_servers_a_machine_that_is_told_is_believed() -> None:
    servers = _of_servers(["127.0.0.1"] * 4, hosts=2, each=2)
    assert (servers.extra, servers.per_machine) == (2, 2)
    with pytest.raises(bps.BytePSError, match="BYTEPS_SERVERS_PER_MACHINE=3"):
        _of_servers(["127.0.0.1"] * 4, hosts=2, each=3)
