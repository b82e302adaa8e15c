"""Whole training steps on clusters of GPUs that one machine emulates, and their bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# One billion parameters in the layers: on fast GPUs a step waits for its gradients.
MODEL = """
    --bf16 --num-layers 20 --hidden-size 2048 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce
""".split()  # noqa: SIM905

FP32 = ("byteps", "all-reduce", "sharded")
SENT_AS_BF16 = ("byteps-wire-bf16", "sharded-bf16")
BY_HOST = ("byteps-by-host-bf16", "by-host-bf16", "sharded-bf16")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """How many times as fast one way must be as another."""

    ours: str
    theirs: str
    low: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One model trained in several ways on one cluster."""

    hosts: int
    ranks_per_host: int = 1
    rate: str
    """Of each host's link, each way."""
    ways: tuple[str, ...]
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        many = f"{self.ranks_per_host}-a-host-" if self.ranks_per_host > 1 else ""
        return f"{many}{self.hosts}+{self.hosts}-{self.rate}"

    def words(self, rest: Sequence[str] = ()) -> list[str]:
        """Arguments of bench/train_bench.py: as many servers as hosts, each on one of its own."""
        return [
            *("--workers", str(self.hosts * self.ranks_per_host)),
            *("--ranks-per-host", str(self.ranks_per_host)),
            *("--servers", str(self.hosts), "--emulate", f"{2 * self.hosts}@{self.rate}"),
            *("--ways", ",".join(self.ways)),
            *rest,
        ]


def _bars(*bars: tuple[str, str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(ours=ours, theirs=theirs, low=low) for ours, theirs, low in bars)


_PLAIN = _bars(
    ("byteps", "all-reduce", 1.0),
    ("byteps-wire-bf16", "all-reduce", 1.0),
    ("byteps-wire-bf16", "sharded-bf16", 1.0),
)

STEPS: tuple[Steps, ...] = (
    Steps(
        hosts=4,
        rate="10gbit",
        ways=(*FP32, *SENT_AS_BF16),
        bars=_bars(
            ("byteps", "all-reduce", 1.45),
            ("byteps-wire-bf16", "all-reduce", 2.7),
            ("byteps-wire-bf16", "sharded", 1.25),
            ("byteps-wire-bf16", "sharded-bf16", 1.0),
        ),
    ),
    Steps(
        hosts=4,
        ranks_per_host=2,
        rate="10gbit",
        ways=(*BY_HOST, "sharded"),
        bars=_bars(
            ("byteps-by-host-bf16", "by-host-bf16", 1.25),
            ("byteps-by-host-bf16", "sharded-bf16", 1.25),
            ("byteps-by-host-bf16", "sharded", 1.8),
        ),
    ),
    Steps(hosts=8, rate="10gbit", ways=(*FP32, *SENT_AS_BF16), bars=_PLAIN),
    *(
        Steps(hosts=hosts, rate=rate, ways=("byteps", "all-reduce", *SENT_AS_BF16), bars=_PLAIN)
        for rate in ("25gbit", "100gbit")
        for hosts in (4, 8)
    ),
    *(
        Steps(
            hosts=4,
            ranks_per_host=ranks,
            rate=rate,
            ways=BY_HOST,
            bars=_bars(
                ("byteps-by-host-bf16", "by-host-bf16", 1.0),
                ("byteps-by-host-bf16", "sharded-bf16", 1.0),
            ),
        )
        for ranks, rates in ((4, ("10gbit", "25gbit", "100gbit")), (8, ("25gbit",)))
        for rate in rates
    ),
)


def choose(names: Sequence[str] = ()) -> list[Steps]:
    """All, or those named, in the order named. Raises ValueError for an unknown name."""
    known = {one.name: one for one in STEPS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no experiment {name!r}, but {', '.join(known)}")
    return [known[name] for name in names] if names else list(STEPS)
