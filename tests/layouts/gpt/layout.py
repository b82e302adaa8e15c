"""What a layout is, what its ranks saw of their training, and what the comparison came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..table import Row

Dtype = Literal["fp32", "bf16", "bf16-wire", "fp16-wire"]
Family = Literal["gpt", "t5", "bert"]

STEPS = 4
SEQUENCE = 16
MICRO_BATCH = 2
BUCKET_ELEMENTS = 4000
"""With overlap: small, so that each rank has several buckets in flight at once."""

_DTYPES: dict[Dtype, tuple[str, ...]] = {
    "fp32": (),
    # Gradients are added up, and summed over ranks, in fp32.
    "bf16": ("--bf16",),
    # Gradients are summed over ranks in the half type.
    "bf16-wire": ("--bf16", "--grad-reduce-in-bf16"),
    "fp16-wire": ("--fp16", "--initial-loss-scale", "1024"),
}


@dataclass(frozen=True, kw_only=True)
class Layout(Row):
    """A model, how it is trained, and how its gradients are summed."""

    family: Family = "gpt"
    per_host: int = 1
    """Consecutive ranks that are taken to share a host; the last host may have fewer."""
    route: str = "flat"
    """Of the run through BytePS: ``--dpu-reduce-backend``."""
    vpp: int = 1
    """Model chunks (virtual pipeline stages) on a rank."""
    etp: int | None = None
    """Tensor parallelism of the experts, where it differs from that of the rest."""
    experts: int = 0
    distributed_optimizer: bool = False
    instances: int = 1
    """Of the distributed optimizer: each holds the whole state, cut over its own ranks."""
    overlap: bool = False
    accumulation: int = 1
    """Micro-batches a rank adds up before its gradients are summed."""
    dtype: Dtype = "fp32"
    wire: str = ""
    """Type in which BytePS sends fp32 gradients; all-reduce sends them as they are."""
    frozen: str = ""
    """Parameters with this in their names are not trained."""
    extra: tuple[str, ...] = ()
    """Further arguments of Megatron."""
    asks: tuple[str, ...] = ()
    """Further arguments of the run through BytePS alone, which come to the same as the other one's
    or could not be met there."""
    packed: bool = False
    """A row of tokens holds several documents, which do not see each other."""
    coarse: bool = False
    """Products are of fewer bits than parameters have (fp8, TF32) or many, so that a last bit of a
    parameter weighs more in the next gradients."""
    graphed: bool = False
    """A CUDA graph replays whole steps, so that no sum is seen: losses, norms and parameters are
    compared alone."""
    servers: bool = False
    """In the run through BytePS servers keep the optimizer; in the other one Megatron does."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of the ranks that sum through BytePS."""
    refused: str = ""
    """What the error says where ``--use-dpu-reduce`` refuses the layout."""

    def byteps_arguments(self) -> list[str]:
        """What is added for the run through BytePS."""
        wire = ["--dpu-reduce-wire-dtype", self.wire] if self.wire else []
        servers = ["--dpu-optimizer"] if self.servers else []
        further = [*wire, *servers, *self.asks]
        return ["--use-dpu-reduce", "--dpu-reduce-backend", self.route, *further]

    @property
    def has_few_bits(self) -> bool:
        """Whether gradients travel in blocks of few bits."""
        return self.wire in ("int8", "int4")

    @property
    def is_node_first(self) -> bool:
        """Whether ranks of a host sum first where they can: with servers that update, that is what
        ``auto`` means."""
        return self.route == "node-first" or (self.servers and self.route == "auto")

    @property
    def is_held_against_fp64(self) -> bool:
        """Whether each update is made in fp64 too: where ranks of a host sum first, what servers
        get depends on the order in which they add; and a rank has no whole parameters in fp32 where
        Megatron shards them, and another rule where Muon updates them. What gradients in few bits
        come to is known to the bit."""
        on_ranks = self.distributed_optimizer or "muon" in self.extra
        is_plain = self.per_host == 1 and not on_ranks and not self.has_few_bits
        return self.servers and not self.refused and is_plain

    @property
    def ranks_that_sum_first(self) -> int:
        """Of each host, by torch.distributed, before servers sum over hosts."""
        return self.per_host if self.is_node_first else 1

    def megatron_arguments(self) -> list[str]:
        """Of either backend; the flag that chooses BytePS is not among them."""
        layers, length = str(max(2, self.pp * self.vpp)), str(SEQUENCE)
        arguments = [
            *("--hidden-size", "32", "--num-attention-heads", "2"),
            *("--max-position-embeddings", length, "--micro-batch-size", str(MICRO_BATCH)),
            *("--train-iters", str(STEPS), "--lr", "1e-2", "--split", "100,0,0"),
            *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
            *("--seed", "7", "--num-workers", "0"),
            *_DTYPES[self.dtype],
            *self.size_arguments(),
        ]
        if self.family == "t5":
            arguments += ["--encoder-num-layers", layers, "--decoder-num-layers", layers]
            arguments += [
                "--encoder-seq-length",
                length,
                "--decoder-seq-length",
                str(SEQUENCE // 2),
            ]
        else:
            arguments += ["--num-layers", layers, "--seq-length", length]
        if "--step-batch-size-schedule" not in self.extra:
            batch = MICRO_BATCH * self.dp * self.accumulation
            arguments += ["--global-batch-size", str(batch)]
        if self.vpp > 1:
            arguments += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.experts:
            arguments += ["--num-experts", str(self.experts)]
            arguments += ["--moe-router-topk", "2", "--disable-bias-linear"]
            if self.tp > 1:
                arguments += ["--sequence-parallel"]
        if self.etp is not None:
            arguments += ["--expert-tensor-parallel-size", str(self.etp)]
        if self.distributed_optimizer:
            arguments += ["--use-distributed-optimizer"]
        if self.instances > 1:
            arguments += ["--num-distributed-optimizer-instances", str(self.instances)]
        if self.overlap:
            arguments += ["--overlap-grad-reduce", "--ddp-bucket-size", str(BUCKET_ELEMENTS)]
        return [*arguments, *self.extra]


# ----- what a rank saw: written by the ranks, read by the comparison


@dataclass(kw_only=True)
class Sum:
    """One gradient bucket of one step on one rank, before and after the ranks summed it."""

    members: tuple[int, ...]
    """The global ranks that summed."""
    local: Any
    """The whole bucket of this rank as it went into the sum: accumulated and scaled."""
    result: Any
    """The sum as this rank got it: the whole bucket, the shard that it owns, or nothing where
    servers keep it."""
    offset: int
    """Where in the bucket the result begins."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each parameter, by its name: first element in the bucket, and last plus one."""


@dataclass(kw_only=True)
class Step:
    """One step of the optimizer on one rank."""

    sums: dict[str, Sum] = field(default_factory=dict)
    """By the bucket's place in the model, the same under every backend."""
    loss: float | None = None
    """Average over all ranks; None where the pipeline's last stage is elsewhere."""
    grad_norm: float | None = None
    zeros: int | None = None
    """Gradients that are 0, where they are counted."""

    def gradients(self) -> dict[str, Any]:
        """Of each parameter, as they went into the sums, whatever buckets they were in."""
        return {
            f"{bucket.split('/', 1)[0]}/{name}": total.local[begin:end]
            for bucket, total in self.sums.items()
            for name, (begin, end) in total.places.items()
        }


@dataclass(kw_only=True)
class RankSeen:
    """A whole run on one rank."""

    steps: list[Step]
    parameters: dict[str, Any]
    """At the end."""
    names: list[str]
    """Of the BytePS operations that this rank started, in that order; empty without."""
    byteps_imported: bool
    pushed_bytes: int = 0
    """To servers, as the engine counts them, in the whole run."""
    pulled_bytes: int = 0
    inexact_updates: list[str] | None = None
    """With gradients in few bits and servers that update: where parameters are not the bits that
    they have to be. None: nobody looked."""
    update_error: tuple[float, float] | None = None
    """Of the final fp32 parameters, sums of squares: of how far they are from those that updates in
    fp64 make of the same gradients, and of these."""


# ----- what the comparison came to


# Largest relative difference of a step's loss where the order of additions may differ.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "bf16-wire": 2e-2, "fp16-wire": 5e-3}
SENT_AS_TOLERANCE = {"bf16": 2e-2, "int8": 2e-2, "int4": 5e-2}


@dataclass(kw_only=True)
class Errors:
    """How far a backend's sums are from the sums in fp64 of what went into them."""

    relative: dict[str, float] = field(default_factory=dict)
    """By dtype: the largest error of an element over the sum of its parts' magnitudes."""
    inexact: list[str] = field(default_factory=list)
    """Sums of two values that are not the correctly rounded sum."""
    split: list[str] = field(default_factory=list)
    """Sums that are not the same on all members."""

    @property
    def worst(self) -> float:
        return max(self.relative.values(), default=0.0)


@dataclass(kw_only=True)
class Difference:
    """How far two runs are from each other."""

    parameters: float = 0.0
    """The norm of the difference of all final parameters, relative to their norm."""
    norm: float = 0.0
    """Of a step's gradients, relative; the largest."""
    ours: float = 0.0
    """How far our fp32 parameters are from those that updates in fp64 make of the same gradients,
    relative to their norm."""
    theirs: float = 0.0
    """The same of Megatron's own optimizer, with its gradients."""


@dataclass(kw_only=True)
class Report:
    """What the comparison of one layout came to."""

    layout: Layout
    groups: list[int] = field(default_factory=list)
    """Sizes of the groups that sum: the number of values in a sum."""
    buckets: int = 0
    """Different sums of a step, over all ranks."""
    same_bits: bool = False
    """Whether every sum, loss, gradient norm and final parameter is the same to the last bit."""
    ours: Errors = field(default_factory=Errors)
    theirs: Errors = field(default_factory=Errors)
    loss_difference: float = 0.0
    """Largest relative difference of the losses of a step."""
    update: Difference | None = None
    """With the optimizer on the servers: how far its run is from Megatron's own."""
    misses: list[str] = field(default_factory=list)
    """What is not as it must be; empty when all is well."""

    @property
    def bits_must_agree(self) -> bool:
        """Whether both backends round the same sums of at most two values once."""
        small = max(self.groups, default=1) <= 2
        return small and not self.layout.wire and not self.layout.servers

    @property
    def loss_tolerance(self) -> float:
        """Largest relative difference of the losses of a step."""
        if self.bits_must_agree:
            return 0.0
        if self.layout.wire:
            return SENT_AS_TOLERANCE[self.layout.wire]
        return LOSS_TOLERANCE[self.layout.dtype]
