"""Every result of a benchmark is verified, and a wrong result is detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from bench.kit.fp8 import add, decode, encode
from bench.kit.pattern import PERIOD, Pattern
from bench.kit.plan import DTYPE_BYTES, Case
from bench.pushpull.rank import Measured, measure
from tests.few_bits import BLOCK, MOST, rounded

# The verification must detect these wrong results.


RANKS = 8


def patterns(size: int, dtype: str) -> list[Pattern]:
    return [
        Pattern(rank=rank, ranks=RANKS, size=size, dtype=dtype, device="cpu")
        for rank in range(RANKS)
    ]


def filled(pattern: Pattern, count: int, dtype: str, round_: int, offset: int = 0) -> torch.Tensor:
    tensor = torch.empty(count, dtype=getattr(torch, dtype))
    pattern.fill(tensor, round_, offset)
    return tensor


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("count", [1, 1000, PERIOD, 5 * PERIOD + 17])
def test_a_sum_in_the_element_type_is_exact(dtype: str, count: int) -> None:
    everyone = patterns(count, dtype)
    total = filled(everyone[0], count, dtype, 3)
    for pattern in everyone[1:]:
        total += filled(pattern, count, dtype, 3)
    assert everyone[0].count_wrong(total, 3) == 0


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 129, 3 * PERIOD + 17])
def test_a_sum_in_blocks_is_exact(form: str, ranks: int, count: int) -> None:
    everyone = [
        Pattern(rank=rank, ranks=ranks, size=count, dtype="float32", device="cpu", form=form)
        for rank in range(ranks)
    ]
    inputs = [filled(pattern, count, "float32", 5) for pattern in everyone]
    if form in MOST:
        total = rounded(torch.stack([rounded(values, form) for values in inputs]).sum(0), form)
    elif form == "fp8":
        padding = (0, -count % BLOCK)
        sent = [encode(torch.nn.functional.pad(values, padding)) for values in inputs]
        total = decode(add(torch.cat(sent), ranks))[:count].clone()
    else:
        total = torch.stack(inputs).sum(0).to(torch.bfloat16).float()
    wrong = total.clone()
    assert everyone[0].count_wrong(total, 5) == 0
    if count > 1:
        wrong[[0, 1]] += 1
        assert everyone[0].count_wrong(wrong, 5) == 2


def summed(count: int, round_: int = 3, offset: int = 0) -> torch.Tensor:
    inputs = [filled(p, count, "float32", round_, offset) for p in patterns(4096, "float32")]
    return torch.stack(inputs).sum(0)


def test_one_changed_element_is_found() -> None:
    total = summed(3 * PERIOD)
    total[2 * PERIOD + 5] += 1
    assert patterns(4096, "float32")[0].count_wrong(total, 3) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: summed(4 * PERIOD, round_=2),
        lambda: summed(4 * PERIOD).roll(1),
        lambda: summed(4 * PERIOD, offset=1024),
        lambda: summed(4 * PERIOD) - filled(patterns(4096, "float32")[5], 4 * PERIOD, "float32", 3),
        lambda: filled(patterns(4096, "float32")[0], 4 * PERIOD, "float32", 3),
        lambda: torch.zeros(4 * PERIOD),
    ],
    ids=["stale round", "shifted", "another tensor", "a rank is missing", "not summed", "zeros"],
)
def test_what_is_no_sum_of_this_round_is_found(wrong: Callable[[], torch.Tensor]) -> None:
    wrong_count = patterns(4096, "float32")[0].count_wrong(wrong(), 3)
    assert wrong_count > 2 * PERIOD


def test_exchanged_partitions_are_found() -> None:
    total = summed(4 * 4096)
    total[:4096], total[4096:8192] = total[4096:8192].clone(), total[:4096].clone()
    assert patterns(4096, "float32")[0].count_wrong(total, 3) > 4096


def test_ranks_that_the_type_cannot_count_are_refused() -> None:
    pattern = Pattern(rank=0, ranks=300, size=64, dtype="bfloat16", device="cpu")
    with pytest.raises(ValueError, match="300 ranks cannot be verified in bfloat16"):
        pattern.fill(torch.empty(32, dtype=torch.bfloat16), 0)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summing:
    """A backend with a single rank, whose sum is the rank's own input."""

    sums = True

    def __init__(self, spoil: Callable[[int, torch.Tensor], None]) -> None:
        self._spoil = spoil
        self._rounds = 0

    def form(self, wire: str) -> str:
        return wire

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        for tensor in tensors:
            self._spoil(self._rounds, tensor)
        self._rounds += 1

    def close(self) -> None:
        pass


def outcome(spoil: Callable[[int, torch.Tensor], None]) -> Measured:
    case = Case(size=4096, dtype="float32", tensors=2, iters=3, warmup=1)
    measured = measure(case, Summing(spoil), device="cpu", one_clock=True, node_pids=[], label="x")
    assert measured is not None
    return measured


def test_a_measurement_counts_wrong_elements(one_rank: None) -> None:
    assert outcome(lambda _, tensor: None).wrong == 0

    def spoil_round_two(round_: int, tensor: torch.Tensor) -> None:
        if round_ == 2:
            tensor[7] += 1

    assert outcome(spoil_round_two).wrong == 2  # a wrong result in each of the two tensors

    def spoil_the_warm_up(round_: int, tensor: torch.Tensor) -> None:
        if round_ == 0:
            tensor[7] = float("nan")

    measured = outcome(spoil_the_warm_up)
    assert measured.wrong == 2
    assert len(measured.samples_s) == 3
