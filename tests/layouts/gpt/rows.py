"""The compared layouts."""

from __future__ import annotations

from .layout import BUCKET_ELEMENTS, MICRO_BATCH, SEQUENCE, STEPS, Dtype, Family, Layout

__all__ = [
    "BUCKET_ELEMENTS",
    "LAYOUTS",
    "MICRO_BATCH",
    "SEQUENCE",
    "STEPS",
    "Dtype",
    "Family",
    "Layout",
]


_NODE = "node-first"
_CLIPS_NEVER = ("--clip-grad", "100")

# Every step is clipped, and the first two are speculative, unless a row says otherwise. All values
# except losses are checked bit by bit.
FEW_BITS: tuple[Layout, ...] = (
    Layout(name="servers-dp2-sent-as-int8", ranks=2, servers=True, wire="int8"),
    Layout(
        name="servers-dp4-bf16-sent-as-int4-overlap-acc2",
        ranks=4,
        servers=True,
        dtype="bf16",
        wire="int4",
        overlap=True,
        accumulation=2,
    ),
    Layout(
        name="servers-dp2-bf16-wire-sent-as-int4-clips-never-overlap",
        ranks=2,
        servers=True,
        dtype="bf16-wire",
        wire="int4",
        overlap=True,
        extra=_CLIPS_NEVER,
    ),
    Layout(
        name="servers-dp2-bf16-sent-as-int8",
        ranks=2,
        servers=True,
        dtype="bf16",
        wire="int8",
    ),
    Layout(
        name="servers-dp2-sent-as-int8-no-clip",
        ranks=2,
        servers=True,
        wire="int8",
        extra=("--clip-grad", "0"),
    ),
    Layout(
        name="servers-dp2-fp16-wire-sent-as-int8-overflows",
        ranks=2,
        servers=True,
        dtype="fp16-wire",
        wire="int8",
        extra=("--initial-loss-scale", str(2**18), "--hysteresis", "1"),
    ),
    # Copies of a parameter, on tensor-parallel ranks and on two stages, stay equal.
    Layout(
        name="servers-tp2-dp2-sent-as-int8-overlap",
        ranks=4,
        tp=2,
        servers=True,
        wire="int8",
        overlap=True,
        extra=("--sequence-parallel",),
    ),
    Layout(
        name="servers-pp2-dp2-tied-bf16-sent-as-int4",
        ranks=4,
        pp=2,
        servers=True,
        dtype="bf16",
        wire="int4",
        accumulation=2,
    ),
    Layout(
        name="servers-ep2-dp4-sent-as-int8-overlap",
        ranks=4,
        ep=2,
        experts=4,
        servers=True,
        wire="int8",
        overlap=True,
    ),
    Layout(
        name="node2-servers-dp4-bf16-sent-as-int8-overlap",
        ranks=4,
        per_host=2,
        route=_NODE,
        servers=True,
        dtype="bf16",
        wire="int8",
        overlap=True,
    ),
    Layout(
        name="node2-servers-dp4-sent-as-int4-clips-never",
        ranks=4,
        per_host=2,
        route=_NODE,
        servers=True,
        wire="int4",
        extra=_CLIPS_NEVER,
    ),
)
"""A part of LAYOUTS."""


_TOKENS = ("--calculate-per-token-loss",)
_UNTIED = ("--untie-embeddings-and-output-weights",)
_GATHER = ("--overlap-param-gather",)
_MASKED = ("--reset-position-ids", "--eod-mask-loss")
# With several optimizer instances, overlap and a pipeline, Megatron starts its own sums twice on
# all stages but the first. It then scales and sums the first result again. Without alignment it
# sums once.
_UNALIGNED = ("--no-align-grad-reduce",)
_PLAIN_CHECKPOINT = ("--ckpt-format", "torch")
_IN_ORDER = (("BYTEPS_DETERMINISTIC", "1"),)
# The gradient norm is about 3 at the first step, decreases, and is above 1 at the last step.
_CLIPS_AT_FIRST = ("--clip-grad", "2")
_NO_CLIP = ("--clip-grad", "0")
_SEQUENCE = ("--sequence-parallel",)
_ZEROS = ("--log-num-zeros-in-grad",)
_MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
# The detached heads are clipped by their own norm.
_DETACHED = (*_MTP, "--mtp-detach-heads")
_PRECISION_AWARE = ("--use-precision-aware-optimizer", "--main-params-dtype", "fp16",
                    "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")  # fmt: skip
# fp16 gradients are infinite in the first two steps.
_OVERFLOWS = ("--initial-loss-scale", str(2**18), "--hysteresis", "1")
_ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
_SHARED = ("--moe-shared-expert-intermediate-size", "32")
_ROPE = ("--position-embedding-type", "rope")
_MLA = (
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "8"),
    *_ROPE,
)
_MUON = ("--optimizer", "muon")
# By default Muon multiplies in bf16. Then the last bit of a gradient changes the update.
_MUON_FP32 = (*_MUON, "--muon-fp32-matmul-prec", "high")
# The first two steps have half as many samples as the others. Megatron demands thresholds in
# tokens.
_RAMP = ("--step-batch-size-schedule", "0:4 128:8")
_LEAN_MOMENTS = (
    *("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"),
    *("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)

LAYOUTS: tuple[Layout, ...] = (
    # Data parallelism alone.
    Layout(name="dp2", ranks=2),
    Layout(name="dp2-bf16-wire-overlap-acc2", ranks=2, dtype="bf16-wire", overlap=True,
           accumulation=2),
    Layout(name="dp4-overlap", ranks=4, overlap=True),
    Layout(name="dp4-bf16-acc2", ranks=4, dtype="bf16", accumulation=2),
    Layout(name="dp4-bf16-wire-in-order", ranks=4, dtype="bf16-wire", overlap=True,
           environment=_IN_ORDER),
    Layout(name="dp3-fp16-wire", ranks=3, dtype="fp16-wire"),
    Layout(name="dp2-frozen", ranks=2, overlap=True, frozen="embedding"),
    Layout(name="dp2-do-frozen-acc2", ranks=2, distributed_optimizer=True, frozen="embedding",
           accumulation=2),
    Layout(name="dp2-token-loss-acc3", ranks=2, accumulation=3, extra=(*_TOKENS, *_MASKED)),
    # The distributed optimizer: a rank needs its own shard of each sum.
    Layout(name="dp2-do", ranks=2, distributed_optimizer=True),
    Layout(name="dp2-do-overlap-acc2", ranks=2, distributed_optimizer=True, overlap=True,
           accumulation=2),
    Layout(name="dp4-do-bf16-overlap-gather", ranks=4, distributed_optimizer=True, overlap=True,
           dtype="bf16", extra=_GATHER),
    Layout(name="dp4-do-bf16-wire-acc2", ranks=4, distributed_optimizer=True, dtype="bf16-wire",
           accumulation=2),
    Layout(name="dp8-do-overlap", ranks=8, distributed_optimizer=True, overlap=True),
    # Megatron adds in fp32 with an all-to-all; servers add in fp32 anyway.
    Layout(name="dp2-do-bf16-wire-fp32-scatter-overlap", ranks=2, distributed_optimizer=True,
           dtype="bf16-wire", overlap=True,
           extra=("--ddp-reduce-scatter-with-fp32-accumulation",)),
    # Several optimizer instances: all-reduce takes two steps, within an instance and across.
    Layout(name="dp2-do-inst2", ranks=2, distributed_optimizer=True, instances=2),
    Layout(name="dp4-do-inst2", ranks=4, distributed_optimizer=True, instances=2, accumulation=2),
    Layout(name="dp4-do-inst2-bf16-wire-overlap", ranks=4, distributed_optimizer=True, instances=2,
           overlap=True, dtype="bf16-wire", extra=_GATHER),
    # fp32 gradients that travel as bf16.
    Layout(name="dp2-sent-as-bf16", ranks=2, wire="bf16"),
    Layout(name="dp4-do-bf16-sent-as-bf16-overlap", ranks=4, dtype="bf16", wire="bf16",
           distributed_optimizer=True, overlap=True, accumulation=2),
    # Gradients in blocks of few bits. The sums must have exactly the bits of quantizing, adding in
    # fp32, and quantizing again.
    Layout(name="dp2-sent-as-int8", ranks=2, wire="int8"),
    Layout(name="dp4-sent-as-int4-overlap-acc2", ranks=4, wire="int4", overlap=True,
           accumulation=2),
    Layout(name="dp3-bf16-wire-sent-as-int8", ranks=3, dtype="bf16-wire", wire="int8"),
    Layout(name="dp2-fp16-wire-sent-as-int4-overflows", ranks=2, dtype="fp16-wire", wire="int4",
           extra=_OVERFLOWS),
    Layout(name="dp4-do-bf16-sent-as-int8-overlap", ranks=4, dtype="bf16", wire="int8",
           distributed_optimizer=True, overlap=True),
    Layout(name="dp4-do-inst2-sent-as-int4", ranks=4, wire="int4", distributed_optimizer=True,
           instances=2),
    Layout(name="ep2-dp4-sent-as-int8", ranks=4, ep=2, experts=4, wire="int8"),
    Layout(name="tp2-dp2-do-sent-as-int4", ranks=4, tp=2, wire="int4", distributed_optimizer=True),
    Layout(name="node2-dp4-sent-as-int8", ranks=4, per_host=2, route=_NODE, wire="int8"),
    Layout(name="node2-dp4-do-sent-as-int4-overlap", ranks=4, per_host=2, route=_NODE, wire="int4",
           distributed_optimizer=True, overlap=True),
    # Tensor parallelism.
    Layout(name="tp2-dp2-overlap", ranks=4, tp=2, overlap=True),
    Layout(name="tp2-dp2-do-bf16-wire", ranks=4, tp=2, distributed_optimizer=True,
           dtype="bf16-wire", extra=("--sequence-parallel",)),
    Layout(name="tp2-dp4-do-overlap-acc2", ranks=8, tp=2, distributed_optimizer=True,
           overlap=True, accumulation=2),
    # Context parallelism: the ranks that share a sequence sum gradients like data-parallel ranks.
    Layout(name="cp2-overlap", ranks=2, cp=2, overlap=True),
    Layout(name="cp2-dp2-tokens-acc2", ranks=4, cp=2, accumulation=2, extra=_TOKENS),
    Layout(name="cp2-dp2-do-bf16-wire", ranks=4, cp=2, distributed_optimizer=True,
           dtype="bf16-wire"),
    Layout(name="cp2-tp2-dp2-do-overlap", ranks=8, cp=2, tp=2, distributed_optimizer=True,
           overlap=True, extra=("--sequence-parallel",)),
    Layout(name="cp2-pp2-dp2-do-inst2-overlap", ranks=8, cp=2, pp=2, accumulation=2,
           distributed_optimizer=True, instances=2, overlap=True, extra=_UNALIGNED),
    # Pipelines; the embeddings of the first and the last stage are tied unless a row says
    # otherwise.
    Layout(name="pp2-dp2-tied-acc2", ranks=4, pp=2, accumulation=2),
    Layout(name="pp2-dp2-untied-do-bf16", ranks=4, pp=2, accumulation=2, dtype="bf16",
           distributed_optimizer=True, extra=_UNTIED),
    Layout(name="pp2-vpp2-dp2-overlap-acc4", ranks=4, pp=2, vpp=2, overlap=True, accumulation=4),
    Layout(name="pp2-vpp2-dp2-do-overlap", ranks=4, pp=2, vpp=2, overlap=True, accumulation=4,
           distributed_optimizer=True, extra=_GATHER),
    Layout(name="pp2-vpp2-dp2-do-gather-in-step", ranks=4, pp=2, vpp=2, overlap=True,
           accumulation=4, distributed_optimizer=True,
           extra=(*_GATHER, "--overlap-param-gather-with-optimizer-step", *_PLAIN_CHECKPOINT)),
    Layout(name="tp2-pp2-dp2-overlap-tokens", ranks=8, tp=2, pp=2, overlap=True, accumulation=2,
           extra=_TOKENS),
    Layout(name="tp2-pp2-vpp2-dp2-do-bf16", ranks=8, tp=2, pp=2, vpp=2, overlap=True,
           accumulation=2, distributed_optimizer=True, dtype="bf16"),
    # Experts: their gradients are summed over fewer ranks than the rest.
    Layout(name="ep1-dp2-overlap", ranks=2, experts=4, overlap=True),
    Layout(name="ep2-dp2", ranks=2, ep=2, experts=4),
    Layout(name="ep2-dp4-overlap-acc2", ranks=4, ep=2, experts=4, overlap=True, accumulation=2),
    Layout(name="ep2-dp4-do-bf16-wire", ranks=4, ep=2, experts=4, distributed_optimizer=True,
           dtype="bf16-wire"),
    Layout(name="ep2-tp2-etp1-dp4-do-overlap", ranks=8, tp=2, ep=2, etp=1, experts=4,
           distributed_optimizer=True, overlap=True),
    Layout(name="ep2-tp2-dp4-acc2", ranks=8, tp=2, ep=2, experts=4, accumulation=2),
    Layout(name="ep2-etp2-dp8-do-bf16", ranks=8, ep=2, etp=2, experts=4, dtype="bf16",
           distributed_optimizer=True, overlap=True),
    Layout(name="ep2-pp2-dp4-overlap-tokens", ranks=8, pp=2, ep=2, experts=4, overlap=True,
           accumulation=2, extra=_TOKENS),
    Layout(name="ep2-pp2-dp4-do-overlap-acc2", ranks=8, pp=2, ep=2, experts=4, overlap=True,
           accumulation=2, distributed_optimizer=True),
    Layout(name="ep2-cp2-dp2-overlap", ranks=4, ep=2, cp=2, experts=4, overlap=True),
    Layout(name="ep2-dp8-do-inst2-overlap", ranks=8, ep=2, experts=4, distributed_optimizer=True,
           instances=2, overlap=True),
    Layout(name="ep2-dp2-alltoall-overlap-acc2", ranks=2, ep=2, experts=4, overlap=True,
           accumulation=2, extra=_ALLTOALL),
    Layout(name="ep2-dp4-alltoall-do-bf16-wire", ranks=4, ep=2, experts=4, dtype="bf16-wire",
           distributed_optimizer=True, extra=(*_ALLTOALL, *_SHARED)),
    Layout(name="ep2-tp2-etp1-dp2-alltoall-do-overlap", ranks=4, tp=2, ep=2, etp=1, experts=4,
           distributed_optimizer=True, overlap=True, extra=_ALLTOALL),
    Layout(name="ep2-pp2-dp2-alltoall-overlap-tokens", ranks=4, pp=2, ep=2, experts=4,
           overlap=True, accumulation=2, extra=(*_ALLTOALL, *_TOKENS)),
    # Other models: latent attention, prediction of several tokens, T5, BERT.
    Layout(name="dp2-mla-do-overlap", ranks=2, distributed_optimizer=True, overlap=True,
           extra=_MLA),
    Layout(name="tp2-dp2-mla-bf16-wire-overlap", ranks=4, tp=2, dtype="bf16-wire", overlap=True,
           extra=(*_MLA, *_SEQUENCE, *_UNTIED)),
    Layout(name="dp2-mtp-overlap-acc2", ranks=2, overlap=True, accumulation=2, extra=_MTP),
    Layout(name="pp2-dp2-mtp-tied-do-overlap", ranks=4, pp=2, distributed_optimizer=True,
           overlap=True, accumulation=2, extra=_MTP),
    Layout(name="ep2-dp2-mla-mtp-alltoall-do-bf16", ranks=2, ep=2, experts=4, dtype="bf16",
           distributed_optimizer=True, overlap=True,
           extra=(*_MLA, *_MTP[:2], *_ALLTOALL, *_SHARED, *_TOKENS)),
    Layout(name="t5-dp2-overlap-tokens", ranks=2, family="t5", overlap=True, accumulation=2,
           extra=_TOKENS),
    Layout(name="t5-tp2-dp2-do-bf16-wire", ranks=4, family="t5", tp=2, dtype="bf16-wire",
           distributed_optimizer=True, extra=_SEQUENCE),
    Layout(name="bert-dp2-do-overlap", ranks=2, family="bert", distributed_optimizer=True,
           overlap=True),
    Layout(name="bert-pp2-dp2-tied-bf16-overlap-acc2", ranks=4, family="bert", pp=2, dtype="bf16",
           overlap=True, accumulation=2),
    # Other optimizers, on the ranks; batches that grow.
    Layout(name="dp2-muon-overlap", ranks=2, overlap=True, extra=_MUON),
    Layout(name="tp2-dp2-muon-bf16-wire", ranks=4, tp=2, dtype="bf16-wire",
           extra=_MUON),
    Layout(name="dp2-do-muon-overlap", ranks=2, distributed_optimizer=True, overlap=True,
           dtype="bf16", extra=_MUON),
    Layout(name="dp2-lion", ranks=2, extra=("--optimizer", "lion")),
    Layout(name="dp2-do-lion-overlap", ranks=2, distributed_optimizer=True, overlap=True,
           dtype="bf16", extra=("--optimizer", "lion")),
    Layout(name="dp2-soap-overlap", ranks=2, overlap=True, extra=("--optimizer", "soap")),
    Layout(name="dp2-do-precision-aware-overlap", ranks=2, distributed_optimizer=True,
           overlap=True, dtype="bf16-wire", extra=_LEAN_MOMENTS),
    Layout(name="dp2-do-ramp-overlap", ranks=2, distributed_optimizer=True, overlap=True,
           extra=_RAMP),
    Layout(name="dp2-overlap-tokens-acc2", ranks=2, overlap=True, accumulation=2,
           extra=(*_TOKENS, *_MASKED)),
    Layout(name="dp2-do-overlap-bf16-wire-tokens-acc3", ranks=2, distributed_optimizer=True,
           overlap=True, dtype="bf16-wire", accumulation=3, extra=(*_TOKENS, *_MASKED)),
    # Several ranks per host: ranks of a host sum first, then hosts. If all ranks of a group share a
    # host, nothing goes to servers.
    Layout(name="node2-dp2", ranks=2, per_host=2, route=_NODE),
    Layout(name="node2-dp4", ranks=4, per_host=2, route=_NODE),
    Layout(name="node2-dp4-overlap-acc2", ranks=4, per_host=2, route=_NODE, overlap=True,
           accumulation=2),
    Layout(name="node2-dp4-bf16-wire-overlap", ranks=4, per_host=2, route=_NODE, overlap=True,
           dtype="bf16-wire"),
    Layout(name="node2-dp4-fp16-wire", ranks=4, per_host=2, route=_NODE, dtype="fp16-wire"),
    Layout(name="node2-dp4-sent-as-bf16-overlap", ranks=4, per_host=2, route=_NODE, wire="bf16",
           overlap=True),
    Layout(name="node2-dp6-tokens", ranks=6, per_host=2, route=_NODE, extra=_TOKENS),
    Layout(name="node2-dp4-frozen", ranks=4, per_host=2, route=_NODE, overlap=True,
           frozen="embedding"),
    Layout(name="node2-dp4-do-overlap", ranks=4, per_host=2, route=_NODE, overlap=True,
           distributed_optimizer=True),
    Layout(name="node2-dp4-do-bf16-wire-acc2", ranks=4, per_host=2, route=_NODE,
           distributed_optimizer=True, dtype="bf16-wire", accumulation=2),
    Layout(name="node2-dp8-do-gather", ranks=8, per_host=2, route=_NODE, overlap=True,
           distributed_optimizer=True, extra=_GATHER),
    # The recommended layout: the optimizer sharded inside each host.
    Layout(name="node2-dp4-do-inst2-overlap", ranks=4, per_host=2, route=_NODE, overlap=True,
           distributed_optimizer=True, instances=2, extra=_GATHER),
    Layout(name="node2-dp4-do-inst2-sent-as-bf16-acc2", ranks=4, per_host=2, route=_NODE,
           distributed_optimizer=True, instances=2, dtype="bf16", wire="bf16", accumulation=2),
    Layout(name="node2-dp8-do-inst4-bf16-wire", ranks=8, per_host=2, route=_NODE, overlap=True,
           distributed_optimizer=True, instances=4, dtype="bf16-wire"),
    Layout(name="node4-dp8-do-inst2-overlap", ranks=8, per_host=4, route=_NODE, overlap=True,
           distributed_optimizer=True, instances=2),
    # One optimizer instance spans two hosts; then two share a host, and own the same shards.
    Layout(name="node2-dp8-do-inst2", ranks=8, per_host=2, route=_NODE,
           distributed_optimizer=True, instances=2),
    Layout(name="node4-dp8-do-inst4-overlap", ranks=8, per_host=4, route=_NODE, overlap=True,
           distributed_optimizer=True, instances=4),
    Layout(name="node4-dp8-overlap", ranks=8, per_host=4, route=_NODE, overlap=True),
    Layout(name="node4-dp8-do-bf16-overlap", ranks=8, per_host=4, route=_NODE, overlap=True,
           distributed_optimizer=True, dtype="bf16"),
    # Other parallelism determines which ranks of a group share a host.
    Layout(name="node2-tp2-dp2-overlap", ranks=4, per_host=2, route=_NODE, tp=2, overlap=True),
    Layout(name="node4-tp2-dp4-do-inst2", ranks=8, per_host=4, route=_NODE, tp=2,
           distributed_optimizer=True, instances=2, overlap=True),
    Layout(name="node4-pp2-dp4-overlap-acc2", ranks=8, per_host=4, route=_NODE, pp=2, overlap=True,
           accumulation=2),
    Layout(name="node2-pp2-vpp2-dp4-do-acc4", ranks=8, per_host=2, route=_NODE, pp=2, vpp=2,
           distributed_optimizer=True, overlap=True, accumulation=4),
    Layout(name="node4-cp2-dp4-do-inst2", ranks=8, per_host=4, route=_NODE, cp=2,
           distributed_optimizer=True, instances=2, overlap=True),
    Layout(name="node2-ep2-dp4-do", ranks=4, per_host=2, route=_NODE, ep=2, experts=4,
           distributed_optimizer=True, overlap=True),
    Layout(name="node4-ep2-dp8-do-inst2-overlap", ranks=8, per_host=4, route=_NODE, ep=2,
           experts=4, distributed_optimizer=True, instances=2, overlap=True),
    # Uneven hosts fall back to whole pushes.
    Layout(name="node3-dp4-do-overlap", ranks=4, per_host=3, route=_NODE, overlap=True,
           distributed_optimizer=True),
    # The optimizer on the servers. Every step is clipped unless a row says otherwise.
    Layout(name="servers-dp2", ranks=2, servers=True),
    Layout(name="servers-dp4-clips-at-first-acc2", ranks=4, servers=True, accumulation=2,
           extra=_CLIPS_AT_FIRST),
    Layout(name="servers-dp2-sgd-clips-never", ranks=2, servers=True,
           extra=("--optimizer", "sgd", *_CLIPS_NEVER)),
    Layout(name="servers-dp2-no-clip-frozen", ranks=2, servers=True, frozen="embedding",
           extra=(*_NO_CLIP, *_UNTIED, "--decoupled-lr", "1e-3", "--weight-decay", "0.1")),
    Layout(name="servers-dp2-bf16-acc2", ranks=2, servers=True, dtype="bf16", accumulation=2),
    Layout(name="servers-dp2-bf16-wire", ranks=2, servers=True, dtype="bf16-wire"),
    Layout(name="servers-dp4-bf16-wire", ranks=4, servers=True, dtype="bf16-wire"),
    Layout(name="servers-dp2-bf16-sent-as-bf16", ranks=2, servers=True, dtype="bf16", wire="bf16"),
    Layout(name="servers-cp2-dp2-tokens", ranks=4, cp=2, servers=True, extra=_TOKENS),
    Layout(name="servers-tp2-dp2", ranks=4, tp=2, servers=True, extra=_SEQUENCE),
    Layout(name="servers-tp2-dp4-bf16-wire", ranks=8, tp=2, servers=True, dtype="bf16-wire",
           extra=_SEQUENCE),
    Layout(name="servers-pp2-dp2-tied-acc2", ranks=4, pp=2, servers=True, accumulation=2),
    Layout(name="servers-pp2-dp4-tied-bf16-wire", ranks=8, pp=2, servers=True, accumulation=2,
           dtype="bf16-wire"),
    Layout(name="servers-pp2-vpp2-dp2-acc4", ranks=4, pp=2, vpp=2, servers=True, accumulation=4),
    Layout(name="servers-tp2-pp2-dp2-tokens", ranks=8, tp=2, pp=2, servers=True, accumulation=2,
           extra=(*_TOKENS, *_SEQUENCE)),
    Layout(name="servers-ep2-dp2", ranks=2, ep=2, experts=4, servers=True, accumulation=2),
    Layout(name="servers-ep2-tp2-etp1-dp2", ranks=4, tp=2, ep=2, etp=1, experts=4, servers=True),
    Layout(name="servers-ep2-pp2-dp4", ranks=8, pp=2, ep=2, experts=4, servers=True,
           accumulation=2),
    # Gradients sent during the backward pass: all gradients, only those that data-parallel ranks
    # alone sum, or none.
    Layout(name="servers-dp4-overlap-acc2", ranks=4, servers=True, overlap=True, accumulation=2),
    Layout(name="servers-dp2-overlap-bf16-sent-as-bf16-no-clip", ranks=2, servers=True,
           overlap=True, dtype="bf16", wire="bf16", extra=_NO_CLIP),
    Layout(name="servers-pp2-vpp2-dp2-overlap-acc4", ranks=4, pp=2, vpp=2, servers=True,
           overlap=True, accumulation=4),
    Layout(name="servers-tp2-dp2-overlap-acc2", ranks=4, tp=2, servers=True, overlap=True,
           accumulation=2, extra=(*_SEQUENCE, *_ZEROS)),
    Layout(name="servers-ep2-tp2-pp2-dp2-overlap-clips-never", ranks=8, tp=2, pp=2, ep=2, experts=4,
           servers=True, overlap=True, extra=(*_CLIPS_NEVER, *_ZEROS)),
    Layout(name="servers-ep2-tp2-dp4-overlap-tokens", ranks=8, tp=2, ep=2, experts=4, servers=True,
           overlap=True, extra=_TOKENS),
    # A recipe plus --dpu-optimizer: servers do the work of the recipe's ranks, or keep state in
    # smaller dtypes.
    Layout(name="servers-dp4-do-bf16-wire-overlap-gather", ranks=4, servers=True, overlap=True,
           distributed_optimizer=True, dtype="bf16-wire", extra=_GATHER),
    Layout(name="servers-dp4-do-inst2-acc2", ranks=4, servers=True, distributed_optimizer=True,
           instances=2, accumulation=2),
    Layout(name="servers-pp2-vpp2-dp2-do-gather-in-step", ranks=4, pp=2, vpp=2, servers=True,
           overlap=True, accumulation=4, distributed_optimizer=True,
           extra=(*_GATHER, "--overlap-param-gather-with-optimizer-step", *_PLAIN_CHECKPOINT)),
    Layout(name="servers-ep2-dp4-do-overlap-gather", ranks=4, ep=2, experts=4, servers=True,
           overlap=True, distributed_optimizer=True, extra=_GATHER),
    Layout(name="servers-dp2-do-precision-aware", ranks=2, servers=True, dtype="bf16-wire",
           distributed_optimizer=True, asks=_PRECISION_AWARE),
    # Muon on the ranks for matrices; the accompanying AdamW on the servers.
    Layout(name="servers-dp2-muon-overlap", ranks=2, servers=True, overlap=True,
           extra=_MUON_FP32),
    Layout(name="servers-dp2-do-muon-bf16-overlap", ranks=2, servers=True, overlap=True,
           distributed_optimizer=True, dtype="bf16", extra=(*_MUON_FP32, *_GATHER)),
    Layout(name="servers-tp2-dp2-muon-acc2", ranks=4, tp=2, servers=True, accumulation=2,
           extra=(*_MUON_FP32, *_SEQUENCE)),
    Layout(name="servers-pp2-vpp2-dp2-muon-overlap", ranks=4, pp=2, vpp=2, servers=True,
           overlap=True, accumulation=4, extra=(*_MUON_FP32, *_CLIPS_NEVER, *_ZEROS)),
    Layout(name="servers-ep2-dp4-do-muon-bf16", ranks=4, ep=2, experts=4, servers=True,
           distributed_optimizer=True, dtype="bf16", extra=_MUON_FP32),
    # Multi-token prediction.
    Layout(name="servers-dp2-mtp", ranks=2, servers=True, extra=_MTP),
    Layout(name="servers-dp2-mtp-detached", ranks=2, servers=True,
           extra=(*_DETACHED, "--clip-grad", "0.01")),
    Layout(name="servers-pp2-dp2-mtp-detached-overlap-clips-never", ranks=4, pp=2, servers=True,
           overlap=True, accumulation=2, extra=(*_DETACHED, *_CLIPS_NEVER)),
    # Scaled losses.
    Layout(name="servers-dp2-fp16-wire", ranks=2, servers=True, dtype="fp16-wire"),
    Layout(name="servers-dp4-fp16-wire-static-overlap", ranks=4, servers=True, overlap=True,
           dtype="fp16-wire", extra=("--loss-scale", "300")),
    Layout(name="servers-tp2-dp2-fp16-wire-overflows", ranks=4, tp=2, servers=True, overlap=True,
           dtype="fp16-wire", extra=(*_OVERFLOWS, *_SEQUENCE)),
    # Ranks of a host sum first, and each sends a part; hosts of three ranks send whole buckets.
    Layout(name="node2-servers-dp4", ranks=4, per_host=2, route=_NODE, servers=True),
    Layout(name="node2-servers-dp4-overlap-acc2", ranks=4, per_host=2, route="auto", servers=True,
           overlap=True, accumulation=2),
    Layout(name="node2-servers-dp4-clips-at-first-acc2", ranks=4, per_host=2, route=_NODE,
           servers=True, accumulation=2, extra=_CLIPS_AT_FIRST),
    Layout(name="node2-servers-dp4-overlap", ranks=4, per_host=2, route=_NODE, servers=True,
           overlap=True),
    Layout(name="node2-servers-dp4-bf16-frozen-no-clip", ranks=4, per_host=2, route=_NODE,
           servers=True, dtype="bf16", frozen="embedding", extra=(*_NO_CLIP, *_UNTIED)),
    Layout(name="node2-servers-dp4-bf16-wire-overlap", ranks=4, per_host=2, route=_NODE,
           servers=True, overlap=True, dtype="bf16-wire"),
    Layout(name="node2-servers-dp4-bf16-sent-as-bf16-overlap", ranks=4, per_host=2, route=_NODE,
           servers=True, overlap=True, dtype="bf16", wire="bf16"),
    Layout(name="node2-servers-ep2-dp4-overlap", ranks=4, per_host=2, route=_NODE, servers=True,
           ep=2, experts=4, overlap=True),
    Layout(name="node3-servers-dp6-sent-as-bf16", ranks=6, per_host=3, route=_NODE, servers=True,
           dtype="bf16", wire="bf16", extra=_TOKENS),
    Layout(name="node3-servers-dp6-zeros", ranks=6, per_host=3, route=_NODE, servers=True,
           extra=_ZEROS),
    Layout(name="node2-servers-dp4-do-bf16-wire-overlap-gather", ranks=4, per_host=2, route="auto",
           servers=True, overlap=True, distributed_optimizer=True, dtype="bf16-wire",
           extra=_GATHER),
    Layout(name="node4-servers-tp2-dp4", ranks=8, per_host=4, route=_NODE, servers=True, tp=2,
           overlap=True, extra=(*_SEQUENCE, *_ZEROS)),
    Layout(name="node2-servers-pp2-dp4-tied-bf16-wire", ranks=8, per_host=2, route=_NODE,
           servers=True, pp=2, accumulation=2, dtype="bf16-wire"),
    Layout(name="node3-servers-dp4", ranks=4, per_host=3, route=_NODE, servers=True),
    # The stages' groups are spread over hosts in different ways, so that no host sums first.
    Layout(name="node3-servers-ep2-pp2-dp4", ranks=8, per_host=3, route=_NODE, servers=True, ep=2,
           pp=2, experts=4),
    # Unsupported layouts are refused instead of trained wrongly.
    Layout(name="servers-lion", ranks=2, servers=True, extra=("--optimizer", "lion"),
           refused="--optimizer=lion"),
    *FEW_BITS,
)  # fmt: skip
