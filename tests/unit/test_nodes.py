"""Ranks and hosts, and the pieces of a tensor that is summed inside each host first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from byteps.torch import engine, nodes, ops, session
from byteps.torch.nodes import HostLayout, host_name
from byteps.torch.pieces import Piece, shard_pieces, whole_pieces


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
    """The elements that a local index pushes of a piece."""
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
    # Only the last piece may need to be filled up.
    lengths = [{end - begin for begin, end in piece.scatters[0]} for piece in cut]
    assert all(len(one) == 1 for one in lengths[:-1])
    if elements % per_host == 0 and pieces == 1:
        assert len(lengths[0]) == 1


def _instances(hosts: int, per_host: int, instances: int) -> list[list[int]]:
    """The shard that each rank owns: an instance is consecutive ranks, which own a shard each."""
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
        mine = owned[host][local]
        assert got == list(range(mine * size, (mine + 1) * size))
    # Nothing but `wanted` differs between ranks: they must agree on every reduce-scatter.
    plans = {
        tuple(piece.scatters for piece in shard_pieces(shards * size, owned, h, i, pieces) or ())
        for h, i in itertools.product(range(hosts), range(per_host))
    }
    assert len(plans) == 1


def test_ranks_that_alternate_between_hosts() -> None:
    """Group positions 0, 2 on one host, 1, 3 on the other."""
    owned = [[0, 2], [1, 3]]
    for host, local in itertools.product(range(2), range(2)):
        pieces = shard_pieces(8, owned, host, local, 1)
        assert pieces is not None
        (piece,) = pieces
        begin, end = piece.wanted or (0, 0)
        mine = owned[host][local]
        assert _reduced(piece, local)[begin:end] == [2 * mine, 2 * mine + 1]


@pytest.mark.parametrize("owned", [[[0, 1, 0, 1]], [[0, 0], [0, 0]], [[0, 1], [1, 2]]])
def test_parts_that_would_overlap_cannot_be_cut(owned: list[list[int]]) -> None:
    assert shard_pieces(12, owned, 0, 0, 1) is None


class OneOfTwo:
    """The ranks of a host, of which the other one has only zeros."""

    size = 2

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        output.copy_(source[: output.numel()])

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        assert output.data_ptr() == part.data_ptr()
        output[part.numel() :].zero_()


def test_what_a_host_has_summed_goes_through_the_public_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So code that replaces push_pull_async_inplace sees all sums."""
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
