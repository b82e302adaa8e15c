"""A layout, the values that its ranks recorded in training, and the result of the comparison."""

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
"""Bucket size in elements with overlap: small, so that each rank has several buckets in flight."""

_DTYPES: dict[Dtype, tuple[str, ...]] = {
    "fp32": (),
    # Gradients are accumulated, and summed over ranks, in fp32.
    "bf16": ("--bf16",),
    # Gradients are summed over ranks in the 16-bit dtype.
    "bf16-wire": ("--bf16", "--grad-reduce-in-bf16"),
    "fp16-wire": ("--fp16", "--initial-loss-scale", "1024"),
}


@dataclass(frozen=True, kw_only=True)
class Layout(Row):
    """A model, the way it is trained, and the way its gradients are summed."""

    family: Family = "gpt"
    per_host: int = 1
    """Number of consecutive ranks on an assumed host; the last host may have fewer."""
    route: str = "flat"
    """Value of ``--dpu-reduce-backend`` in the run through BytePS."""
    vpp: int = 1
    """Model chunks (virtual pipeline stages) on a rank."""
    etp: int | None = None
    """Tensor parallelism of the experts, if it differs from that of the other layers."""
    experts: int = 0
    distributed_optimizer: bool = False
    instances: int = 1
    """Number of instances of the distributed optimizer. Each has the whole state, sharded over its
    ranks."""
    overlap: bool = False
    accumulation: int = 1
    """Micro-batches of a rank before its gradients are summed."""
    dtype: Dtype = "fp32"
    wire: str = ""
    """Dtype in which BytePS sends fp32 gradients; all-reduce sends fp32."""
    frozen: str = ""
    """Text in the names of parameters that are not trained."""
    extra: tuple[str, ...] = ()
    """Additional arguments of Megatron."""
    asks: tuple[str, ...] = ()
    """Additional arguments of the run through BytePS alone.

    They do not change the result, or the other backend does not support them.
    """
    packed: bool = False
    """Whether a row of tokens holds several documents. Attention then stays inside a document."""
    coarse: bool = False
    """Whether products have fewer bits than parameters (fp8, TF32), or there are very many
    products. The last bit of a parameter then has a larger effect on the next gradients."""
    graphed: bool = False
    """Whether a CUDA graph replays whole steps. The sums are then not visible, and only losses,
    norms and parameters are compared."""
    servers: bool = False
    """Whether servers keep the optimizer in the run through BytePS. In the other run, Megatron
    keeps it."""
    environment: tuple[tuple[str, str], ...] = ()
    """Additional environment variables of the ranks that sum through BytePS."""
    refused: str = ""
    """Part of the error if ``--use-dpu-reduce`` refuses the layout."""

    def byteps_arguments(self) -> list[str]:
        """Get the additional arguments of the run through BytePS."""
        wire = ["--dpu-reduce-wire-dtype", self.wire] if self.wire else []
        servers = ["--dpu-optimizer"] if self.servers else []
        further = [*wire, *servers, *self.asks]
        return ["--use-dpu-reduce", "--dpu-reduce-backend", self.route, *further]

    @property
    def has_few_bits(self) -> bool:
        """Tell whether gradients travel in blocks of few bits."""
        return self.wire in ("int8", "int4")

    @property
    def is_node_first(self) -> bool:
        """Tell whether ranks of a host sum first if they can; ``auto`` means this with the server
        optimizer."""
        return self.route == "node-first" or (self.servers and self.route == "auto")

    @property
    def is_held_against_fp64(self) -> bool:
        """Whether each update is repeated in fp64.

        This is impossible if ranks of a host sum first, because the order of their additions
        matters; if Megatron shards the fp32 parameters over ranks; and if Muon updates the
        parameters on ranks. Results of gradients in few bits are checked bit by bit instead.
        """
        on_ranks = self.distributed_optimizer or "muon" in self.extra
        is_plain = self.per_host == 1 and not on_ranks and not self.has_few_bits
        return self.servers and not self.refused and is_plain

    @property
    def ranks_that_sum_first(self) -> int:
        """Get the number of ranks of a host that torch.distributed sums before servers sum over
        hosts."""
        return self.per_host if self.is_node_first else 1

    def megatron_arguments(self) -> list[str]:
        """Get Megatron's arguments for either backend, without the flag that selects BytePS."""
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


# ----- values recorded by the ranks, read by the comparison


@dataclass(kw_only=True)
class Sum:
    """A gradient bucket of a step on a rank, before and after the sum."""

    members: tuple[int, ...]
    """Global ranks of the sum."""
    local: Any
    """The rank's whole bucket before the sum, accumulated and scaled."""
    result: Any
    """The sum that this rank got: the whole bucket, its own shard, or nothing if servers keep the
    sum."""
    offset: int
    """Index in the bucket of the result's first element."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Range of each parameter in the bucket by name: first element, last element plus one."""


@dataclass(kw_only=True)
class Step:
    """A step of the optimizer on a rank."""

    sums: dict[str, Sum] = field(default_factory=dict)
    """Sums of the step, by the bucket's place in the model, which is the same under every
    backend."""
    loss: float | None = None
    """Loss, averaged over all ranks. None if another rank has the pipeline's last stage."""
    grad_norm: float | None = None
    zeros: int | None = None
    """Number of gradients that are 0, if Megatron counts them."""

    def gradients(self) -> dict[str, Any]:
        """Get each parameter's gradient before the sum, regardless of the buckets."""
        return {
            f"{bucket.split('/', 1)[0]}/{name}": total.local[begin:end]
            for bucket, total in self.sums.items()
            for name, (begin, end) in total.places.items()
        }


@dataclass(kw_only=True)
class RankSeen:
    """Record of a whole run, as one rank has seen it."""

    steps: list[Step]
    parameters: dict[str, Any]
    """Parameters at the end of the run, by name."""
    names: list[str]
    """Names of the BytePS operations in the order in which this rank started them; empty without
    BytePS."""
    byteps_imported: bool
    pushed_bytes: int = 0
    """Bytes to servers in the whole run, as the engine counts them."""
    pulled_bytes: int = 0
    inexact_updates: list[str] | None = None
    """Updates whose bits differ from the expected bits, with gradients in few bits and the server
    optimizer; None if they were not checked."""
    update_error: tuple[float, float] | None = None
    """Sums of squares for the final fp32 parameters: of their errors against updates in fp64 by the
    same gradients, and of the fp64 values."""


# ----- results of the comparison


# Largest relative difference of a step's loss, if the order of additions can differ.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "bf16-wire": 2e-2, "fp16-wire": 5e-3}
SENT_AS_TOLERANCE = {"bf16": 2e-2, "int8": 2e-2, "int4": 5e-2}


@dataclass(kw_only=True)
class Errors:
    """Errors of a backend's sums against the sums in fp64 of the same parts."""

    relative: dict[str, float] = field(default_factory=dict)
    """Largest error of an element by dtype, relative to the sum of its parts' magnitudes."""
    inexact: list[str] = field(default_factory=list)
    """Number of sums of two values that are not correctly rounded."""
    split: list[str] = field(default_factory=list)
    """Number of sums that differ between members."""

    @property
    def worst(self) -> float:
        return max(self.relative.values(), default=0.0)


@dataclass(kw_only=True)
class Difference:
    """Differences between two runs."""

    parameters: float = 0.0
    """Norm of the difference of all final parameters, relative to their norm."""
    norm: float = 0.0
    """Largest relative difference of a step's gradient norms."""
    ours: float = 0.0
    """Error of our fp32 parameters against updates in fp64 by the same gradients, relative to their
    norm."""
    theirs: float = 0.0
    """The same error for Megatron's own optimizer with its gradients."""


@dataclass(kw_only=True)
class Report:
    """Result of the comparison of a layout."""

    layout: Layout
    groups: list[int] = field(default_factory=list)
    """Sizes of the groups that sum. A sum adds as many values as its group has ranks."""
    buckets: int = 0
    """Number of different sums of a step, over all ranks."""
    same_bits: bool = False
    """Whether every sum, loss, gradient norm and final parameter is the same to the last bit."""
    ours: Errors = field(default_factory=Errors)
    theirs: Errors = field(default_factory=Errors)
    loss_difference: float = 0.0
    """Largest relative difference of the losses of a step."""
    update: Difference | None = None
    """Difference from Megatron's own optimizer, if the optimizer is on the servers."""
    misses: list[str] = field(default_factory=list)
    """Failed checks; empty on success."""

    @property
    def bits_must_agree(self) -> bool:
        """Whether both backends round the same sums of at most two values once."""
        small = max(self.groups, default=1) <= 2
        return small and not self.layout.wire and not self.layout.servers

    @property
    def loss_tolerance(self) -> float:
        """Get the largest allowed relative difference of the losses of a step."""
        if self.bits_must_agree:
            return 0.0
        if self.layout.wire:
            return SENT_AS_TOLERANCE[self.layout.wire]
        return LOSS_TOLERANCE[self.layout.dtype]
