"""The layouts with Transformer Engine's layers. Each needs a GPU with fp8: Hopper or later."""

from __future__ import annotations

from .rows import Layout

_WIDE = (
    *("--hidden-size", "128", "--num-attention-heads", "2"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
)
"""Heads of size 64 for cuDNN's attention, and sizes that are multiples of blocks of 128 fp8
values."""
# Parameters that differ in the last bit of fp32 can differ in the last bit of bf16. Four steps of
# 1e-2, half the size of the parameters, would turn this into a relative difference of 1e-3.
_SMALL_STEPS = ("--lr", "1e-4")
_GATHER = ("--overlap-param-gather",)
_SEQUENCE = ("--sequence-parallel",)
_TOKENS = ("--calculate-per-token-loss",)
_UNFUSED = ("--no-gradient-accumulation-fusion",)
_ROPE = ("--position-embedding-type", "rope")
_MTP = ("--mtp-num-layers", "1")
# CUDA graphs do not replay the first two steps.
_GRAPHS = ("--cuda-graph-warmup-steps", "2", "--cuda-graph-impl")
_WHOLE_GRAPH = (
    *_GRAPHS,
    "full_iteration",
    "--te-rng-tracker",
    "--no-check-for-nan-in-loss-and-grad",
)
_PRECISION_AWARE = (
    *("--use-precision-aware-optimizer", "--main-grads-dtype", "fp32"),
    *("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)
_MLA = (
    *_ROPE,
    *("--multi-latent-attention", "--rope-type", "rope", "--no-rope-fusion"),
    *("--normalization", "RMSNorm"),
    *("--q-lora-rank", "64", "--kv-lora-rank", "64", "--qk-head-dim", "64"),
    *("--qk-pos-emb-head-dim", "64", "--v-head-dim", "128"),
)
_MOE = (
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-permute-fusion"),
    *("--moe-aux-loss-coeff", "0.01"),
)
_PACKED = (*_ROPE, "--micro-batch-size", "1")


def _fp8(recipe: str, *, gather: bool = True) -> tuple[str, ...]:
    stored = ("--fp8-param-gather",) if gather else ()
    return ("--fp8-format", "hybrid", "--fp8-recipe", recipe, *stored)


def _row(name: str, *extra: str, ranks: int = 2, **settings: object) -> Layout:
    """Make a row with bf16 parameters and fp32 gradients by default."""
    arguments = {"dtype": "bf16", **settings}
    return Layout(name=f"te-{name}", ranks=ranks, extra=(*_WIDE, *extra), **arguments)  # type: ignore[arg-type] # fields of Layout


TE_LAYOUTS: tuple[Layout, ...] = (
    _row("dp2"),
    _row("dp2-fp32", dtype="fp32"),
    # The fused weight gradient adds to the bucket directly; all rows but this use it.
    _row("dp2-fused-acc2", accumulation=2),
    _row("dp2-unfused-acc2", *_UNFUSED, accumulation=2),
    _row("dp2-wire-overlap-acc2", dtype="bf16-wire", overlap=True, accumulation=2),
    _row("tp2-dp2-overlap", *_SEQUENCE, ranks=4, tp=2, overlap=True),
    _row("dp2-do-overlap-gather", *_GATHER, distributed_optimizer=True, overlap=True),
    _row("dp2-do-wire-overlap-gather-acc2", *_GATHER, dtype="bf16-wire", accumulation=2,
         distributed_optimizer=True, overlap=True),
    _row("dp2-do-precision-aware", *_GATHER, *_PRECISION_AWARE, distributed_optimizer=True,
         overlap=True),
    _row("dp2-do-wire-fp32-scatter-overlap", "--ddp-reduce-scatter-with-fp32-accumulation",
         dtype="bf16-wire", distributed_optimizer=True, overlap=True),
    # CUDA graphs of each layer.
    _row("dp2-graphs-te-overlap", *_GRAPHS, "transformer_engine", overlap=True),
    _row("dp2-graphs-local-overlap", *_GRAPHS, "local", overlap=True),
    _row("dp2-do-graphs-te-gather", *_GATHER, *_GRAPHS, "transformer_engine", overlap=True,
         distributed_optimizer=True),
    # A CUDA graph of the whole step: servers sum after its replay.
    _row("dp2-graphs-full-overlap", *_WHOLE_GRAPH, overlap=True, graphed=True),
    _row("dp2-do-graphs-full-gather", *_WHOLE_GRAPH, *_GATHER, overlap=True, graphed=True,
         distributed_optimizer=True),
    # fp8 matrix products; with "stored", parameters are stored and gathered in fp8 too.
    _row("dp2-fp8-delayed-overlap", *_fp8("delayed", gather=False), overlap=True),
    _row("dp2-do-fp8-delayed-stored", *_GATHER, *_fp8("delayed"), distributed_optimizer=True,
         overlap=True),
    _row("dp2-do-fp8-tensorwise-stored", *_GATHER, *_fp8("tensorwise"), overlap=True,
         distributed_optimizer=True),
    _row("dp2-do-fp8-blockwise-stored", *_GATHER, *_fp8("blockwise"), overlap=True,
         distributed_optimizer=True),
    _row("tp2-dp2-do-fp8-tensorwise-stored", *_SEQUENCE, *_GATHER, *_fp8("tensorwise"), ranks=4,
         tp=2, overlap=True, distributed_optimizer=True),
    # Other models.
    _row("dp2-mla-mtp-overlap", *_MLA, *_MTP, overlap=True),
    _row("dp2-do-mla-mtp-gather", *_MLA, *_MTP, *_GATHER, overlap=True,
         distributed_optimizer=True),
    _row("ep2-dp2-overlap", *_MOE, ep=2, experts=4, overlap=True),
    _row("ep2-tp2-etp1-dp2-do-overlap-gather", *_MOE, *_GATHER, ranks=4, ep=2, tp=2, etp=1,
         experts=4, overlap=True, distributed_optimizer=True),
    _row("pp2-dp2-tied-do-acc2", ranks=4, pp=2, accumulation=2, distributed_optimizer=True),
    # Each weight is sharded over two ranks, in addition to tensor parallelism.
    _row("shards2-dp2-overlap", "--tensor-parallel-num-weight-shards", "2",
         "--disable-bias-linear", ranks=4, overlap=True),
    # Transformer Engine's attention over a sequence that ranks share.
    _row("cp2-overlap", ranks=2, cp=2, overlap=True),
    _row("cp2-a2a-do-gather", "--cp-comm-type", "a2a", *_GATHER, cp=2, overlap=True,
         distributed_optimizer=True),
    # Several documents in a row of tokens.
    _row("dp2-packed-tokens-overlap", *_PACKED, *_TOKENS, packed=True, overlap=True),
    # Two ranks per host, which sum first.
    _row("node2-dp4-do-inst2-fp8-tensorwise-stored", *_GATHER, *_fp8("tensorwise"), ranks=4,
         per_host=2, route="node-first", distributed_optimizer=True, instances=2, overlap=True),
    # The optimizer on the servers.
    _row("servers-dp2-fp32-overlap", *_SMALL_STEPS, servers=True, overlap=True, dtype="fp32",
         coarse=True),
    _row("servers-dp2-overlap", *_SMALL_STEPS, servers=True, overlap=True),
    _row("servers-dp2-fp8-tensorwise", *_SMALL_STEPS, *_fp8("tensorwise", gather=False),
         servers=True, coarse=True),
    _row("servers-tp2-dp2", *_SMALL_STEPS, *_SEQUENCE, ranks=4, tp=2, servers=True, coarse=True),
    _row("servers-ep2-dp2", *_SMALL_STEPS, *_MOE, ep=2, experts=4, servers=True, coarse=True),
)  # fmt: skip
