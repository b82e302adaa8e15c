"""Whole training steps on clusters that one machine emulates, of GPUs or of its cores, and
their thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# One billion parameters in the layers: on fast GPUs a step waits for its gradients.
MODEL = """
    --bf16 --num-layers 20 --hidden-size 2048 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce
""".split()  # noqa: SIM905

# 340 million parameters: four or eight ranks share two GPUs.
SMALLER = """
    --bf16 --num-layers 12 --hidden-size 1536 --num-attention-heads 12
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce
""".split()  # noqa: SIM905
# 12.6 million, and hardly a token: for links of 100 Mbit/s and slower.
ON_CPU = """
    --bf16 --num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 4
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --lr 1e-4 --min-lr 1e-5 --overlap-grad-reduce --ddp-bucket-size 3200000
""".split()  # noqa: SIM905

FP32 = ("byteps", "all-reduce", "sharded")
SENT_AS_BF16 = ("byteps-wire-bf16", "sharded-bf16")
OPTIMIZER = ("servers-bf16", "servers-bf16-wait", "sharded-bf16", "sharded")
RECIPE = ("sharded-bf16-on-servers", "sharded-bf16")
OPTIMIZER_BY_HOST = ("servers-bf16", "servers-bf16-flat", "sharded-bf16", "sharded")
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
    label: str = ""
    """Of what differs from other experiments on such a cluster."""
    model: Sequence[str] = tuple(MODEL)
    """Arguments of Megatron."""
    on_gpu: bool = True

    @property
    def name(self) -> str:
        many = f"{self.ranks_per_host}-a-host-" if self.ranks_per_host > 1 else ""
        return f"{self.label and self.label + '-'}{many}{self.hosts}+{self.hosts}-{self.rate}"

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

_ON_SERVERS = _bars(
    ("servers-bf16", "sharded-bf16", 1.35),
    ("servers-bf16", "sharded", 2.0),
)
_ON_MORE_SERVERS = _bars(
    ("servers-bf16", "sharded-bf16", 1.55),
    ("servers-bf16", "sharded", 2.0),
)
# Steps that are made again are about as long as those that wait.
_CLIPPED = _bars(("servers-bf16", "servers-bf16-wait", 0.93))

# Two ranks per host: flat, each NIC carries twice the bytes.
_ON_SERVERS_BY_HOST = (*_ON_SERVERS, *_bars(("servers-bf16", "servers-bf16-flat", 1.6)))

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
        model=SMALLER,
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
    # The optimizer on the servers, with a norm that is never, and always, clipped.
    *(
        Steps(
            label=label,
            hosts=hosts,
            rate=rate,
            model=(*model, "--clip-grad", clip),
            on_gpu=model is SMALLER,
            ways=OPTIMIZER if bars is not _CLIPPED else OPTIMIZER[:2],
            bars=bars,
        )
        for label, hosts, rate, model, clip, bars in (
            ("optimizer", 4, "10gbit", SMALLER, "1e6", _ON_SERVERS),
            ("optimizer-clipped", 4, "10gbit", SMALLER, "1e-3", _CLIPPED),
            ("optimizer", 4, "100mbit", ON_CPU, "1e6", _ON_SERVERS),
            ("optimizer-clipped", 4, "100mbit", ON_CPU, "1e-3", _CLIPPED),
            ("optimizer", 8, "50mbit", ON_CPU, "1e6", _ON_MORE_SERVERS),
        )
    ),
    *(
        Steps(
            label="optimizer",
            hosts=4,
            ranks_per_host=2,
            rate=rate,
            model=(*model, "--clip-grad", "1e6"),
            on_gpu=model is SMALLER,
            ways=OPTIMIZER_BY_HOST,
            bars=_ON_SERVERS_BY_HOST,
        )
        for rate, model in (("10gbit", SMALLER), ("100mbit", ON_CPU))
    ),
    # The optimizer on the servers, in eight bits up and down.
    Steps(
        label="few-bits",
        hosts=4,
        ranks_per_host=2,
        rate="10gbit",
        model=(*SMALLER, "--clip-grad", "1e6"),
        ways=("servers-int8", "servers-bf16", "sharded-bf16"),
        bars=_bars(("servers-int8", "servers-bf16", 1.5), ("servers-int8", "sharded-bf16", 2.2)),
    ),
    # A recipe that shards the optimizer, with --dpu-optimizer added and nothing else changed.
    *(
        Steps(
            label="recipe",
            hosts=4,
            ranks_per_host=ranks,
            rate=rate,
            model=(*model, "--clip-grad", "1e6"),
            on_gpu=model is SMALLER,
            ways=RECIPE,
            bars=_bars((*RECIPE, low)),
        )
        for ranks, rate, model, low in (
            (2, "10gbit", SMALLER, 1.45),
            (1, "10gbit", SMALLER, 1.3),
            (2, "100mbit", ON_CPU, 1.45),
        )
    ),
)


def choose(names: Sequence[str] = (), *, on_gpu: bool = True) -> list[Steps]:
    """All for such a machine, or those named, in the order named. Raises ValueError for an unknown
    name."""
    known = {one.name: one for one in STEPS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no experiment {name!r}, but {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [one for one in STEPS if one.on_gpu == on_gpu]
