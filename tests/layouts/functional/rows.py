"""Functional tests of Megatron, in the form that a CPU runs.

A row names the test and has its arguments after arguments.py made them small. With a checkout,
`make functional` reads the tests themselves and reports rows that differ from their tests.
"""

from __future__ import annotations

from ..gpt.rows import Family
from .arguments import Case, Value, words

_ALL = """
    --eval-interval 1000 --eval-iters 0 --hidden-size 64 --log-memory-to-tensorboard
    --log-num-zeros-in-grad
    --log-params-norm --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --max-position-embeddings 32 --mock-data --num-attention-heads 8 --num-workers 0
    --train-iters 4
"""

_GPT = """
    --attention-softmax-in-fp32 --bf16 --clip-grad 1.0 --deterministic-mode
    --global-batch-size 32 --log-interval 1 --lr 0.00015 --lr-decay-iters 320000
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --micro-batch-size 4 --min-lr 1e-05
    --no-gradient-accumulation-fusion --num-layers 2 --seq-length 32 --timing-log-level 0
    --use-mcore-models --weight-decay 1e-2
"""

_RERUN = """
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --attention-dropout 0.0 --bf16
    --clip-grad 1.0 --deterministic-mode --disable-bias-linear --ffn-hidden-size 128
    --global-batch-size 8 --group-query-attention --hidden-dropout 0.0 --kv-channels 8
    --log-interval 1 --lr 3e-4 --manual-gc --micro-batch-size 1
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion
    --normalization RMSNorm --num-layers 2 --num-query-groups 8 --overlap-grad-reduce
    --overlap-param-gather --pipeline-model-parallel-size 2 --position-embedding-type rope
    --rotary-percent 1.0 --seq-length 32 --sequence-parallel --swiglu --timing-log-level 0
    --untie-embeddings-and-output-weights --use-distributed-optimizer --use-mcore-models
"""

_T5 = """
    --bf16 --calculate-per-token-loss --clip-grad 1.0 --decoder-num-layers 2
    --decoder-seq-length 16 --deterministic-mode --encoder-num-layers 2 --encoder-seq-length 32
    --ffn-hidden-size 128 --global-batch-size 32 --init-method-std 0.015 --kv-channels 8
    --log-interval 1 --lr 0.0001 --lr-decay-iters 100 --lr-decay-style linear
    --lr-warmup-fraction 0.01 --micro-batch-size 4 --min-lr 1e-05 --timing-log-level 0
    --vocab-extra-ids 100 --weight-decay 1e-2
"""

_BERT = """
    --bf16 --deterministic-mode --global-batch-size 32 --log-interval 1 --lr 0.0001
    --lr-decay-iters 990000 --lr-warmup-fraction 0.01 --micro-batch-size 4 --min-lr 1e-05
    --no-gradient-accumulation-fusion --num-layers 2 --seq-length 32 --timing-log-level 0
"""

_SINKHORN = """
    --disable-bias-linear --moe-router-load-balancing-type sinkhorn --moe-router-topk 1
    --no-bias-gelu-fusion
"""

_AUX_LOSS = """
    --disable-bias-linear --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss
    --moe-router-topk 2 --no-bias-gelu-fusion
"""

_MUON = """
    --disable-bias-linear --expert-model-parallel-size 2 --moe-ffn-hidden-size 32
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-router-topk 2
    --moe-token-dispatcher-type allgather --muon-extra-scale-factor 0.2 --muon-momentum 0.9
    --muon-scale-mode spectral --no-bias-gelu-fusion --num-experts 8 --optimizer muon
"""

_DO = "--use-distributed-optimizer"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer"
_NO_DROPOUT = "--attention-dropout 0.0 --hidden-dropout 0.0"
_FP16 = "--apply-query-key-layer-scaling --fp16 --initial-loss-scale 1024"
_VPP = "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1"


def _read(text: str) -> dict[str, Value]:
    """Parse a command line into values by flag."""
    values: dict[str, Value] = {}
    flag = ""
    for word in text.split():
        if word.startswith("--"):
            flag = word
            values[flag] = True
        else:
            before = values[flag]
            values[flag] = word if isinstance(before, bool) else f"{before} {word}"
    return values


def _row(
    name: str,
    ranks: int,
    *parts: str,
    less: str = "",
    family: Family = "gpt",
    left_out: tuple[str, ...] = (),
) -> Case:
    """Make a row from command lines; a later part overrides an earlier one, and flags of ``less``
    go."""
    given: dict[str, Value] = {}
    for part in (_ALL, *parts):
        given |= _read(part)
    remaining = {flag: value for flag, value in given.items() if flag not in less.split()}
    arguments = tuple(" ".join(words(remaining)).split())
    return Case(name=name, family=family, ranks=ranks, arguments=arguments, left_out=left_out)


QUICK = (
    "bert_mcore_tp1_pp2",
    "gpt3_mcore_reruns_resume_check_grads",
    "gpt3_mcore_te_tp1_pp1_mup",
    "gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
    "gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective",
    "gpt3_mcore_tp1_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
    "t5_mcore_tp1_pp1_vp1",
)
"""Rows that `make test` runs. Each row covers something that the other rows do not."""

CASES: tuple[Case, ...] = (
    _row("gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset", 2, _GPT, _DO),
    _row("gpt3_mcore_te_tp1_pp1_mup", 2, _GPT, _DO, "--mup-base-hidden-size 32 --use-mup"),
    _row("gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute", 2, _GPT,
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    _row("gpt3_mcore_tp1_pp1_dist_optimizer_overlap_grad_reduce_param_gather", 2, _GPT, _OVERLAP,
         "--apply-query-key-layer-scaling", less="--attention-softmax-in-fp32"),
    _row("gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
         2, _GPT, _OVERLAP, _FP16, less="--attention-softmax-in-fp32 --bf16"),
    _row("gpt3_mcore_reruns_resume_check_grads", 2, _RERUN,
         "--adam-beta1 0.0 --adam-beta2 0.0 --global-batch-size 4 --micro-batch-size 2",
         "--recompute-num-layers 1 --rerun-mode validate_results --rotary-base 500", "--seed 1",
         less="--pipeline-model-parallel-size"),
    _row("gpt3_moe_mcore_te_ep8_resume_torch_dist_muon", 2, _GPT, _MUON,
         "--check-weight-hash-across-dp-replicas-interval 1", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon", 2, _GPT, _MUON, _DO,
         "--no-use-layer-wise-param-layout", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout", 2, _GPT, _MUON, _DO,
         left_out=("--moe-grouped-gemm",)),
    _row("gpt3_mcore_reruns_disable", 4, _RERUN, "--rerun-mode disabled"),
    _row("gpt3_mcore_reruns_enable", 4, _RERUN, "--rerun-mode validate_results"),
    _row("gpt3_mcore_tp1_pp2", 4, _GPT,
         "--apply-query-key-layer-scaling --pipeline-model-parallel-size 2",
         less="--attention-softmax-in-fp32"),
    _row("gpt3_mcore_tp1_pp2_fp16", 4, _GPT, _FP16, "--pipeline-model-parallel-size 2",
         less="--attention-softmax-in-fp32 --bf16"),
    _row("gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings", 4, _GPT,
         "--pipeline-model-parallel-size 2 --position-embedding-type rope"),
    _row("gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion", 4, _GPT,
         "--no-rope-fusion --pipeline-model-parallel-size 2 --position-embedding-type rope",
         "--rotary-interleaved"),
    _row("gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances", 4, _GPT, _OVERLAP,
         "--num-distributed-optimizer-instances 2 --tensor-model-parallel-size 2"),
    _row("gpt3_mcore_te_tp2_pp1_cp2_nondeterministic", 4, _GPT, _NO_DROPOUT,
         "--context-parallel-size 2 --sequence-parallel --tensor-model-parallel-size 2",
         less="--deterministic-mode"),
    _row("gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss_1node", 4, _GPT, _NO_DROPOUT,
         "--calculate-per-token-loss --context-parallel-size 2 --sequence-parallel",
         "--tensor-model-parallel-size 2", less="--deterministic-mode"),
    _row("gpt3_mcore_te_tp2_pp2_cp2_etp4_dp_last_1node", 4, _GPT, _NO_DROPOUT,
         "--context-parallel-size 2 --expert-tensor-parallel-size 4 --sequence-parallel",
         "--tensor-model-parallel-size 2 --use-tp-pp-dp-mapping", less="--deterministic-mode"),
    _row("gpt3_mcore_te_tp2_pp2_cp2_etp4_calculate_per_token_loss_dp_last_1node", 4, _GPT,
         _NO_DROPOUT, "--calculate-per-token-loss --context-parallel-size 2",
         "--expert-tensor-parallel-size 4 --sequence-parallel",
         "--tensor-model-parallel-size 2 --use-tp-pp-dp-mapping", less="--deterministic-mode"),
    _row("gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic", 4, _GPT, _SINKHORN,
         _NO_DROPOUT, "--context-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4",
         "--pipeline-model-parallel-size 2 --sequence-parallel",
         less="--attention-softmax-in-fp32 --deterministic-mode"),
    _row("gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic_dp_last", 4, _GPT,
         _SINKHORN, _NO_DROPOUT,
         "--context-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4",
         "--pipeline-model-parallel-size 2 --sequence-parallel --use-tp-pp-dp-mapping",
         less="--attention-softmax-in-fp32 --deterministic-mode"),
    _row("gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4"
         "_te_8experts2parallel_dist_optimizer",
         4, _GPT, _SINKHORN, _DO,
         "--expert-model-parallel-size 2 --num-experts 8 --pipeline-model-parallel-size 2",
         "--sequence-parallel", less="--deterministic-mode"),
    _row("gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer", 4,
         _GPT, _SINKHORN, _DO,
         "--expert-model-parallel-size 2 --num-experts 8 --sequence-parallel",
         "--tensor-model-parallel-size 2"),
    _row("gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_groupedGEMM", 4,
         _GPT, _SINKHORN, "--expert-model-parallel-size 2 --num-experts 8 --sequence-parallel",
         "--tensor-model-parallel-size 2", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_top2router", 4, _GPT,
         _AUX_LOSS, "--expert-model-parallel-size 2 --num-experts 8 --sequence-parallel",
         "--tensor-model-parallel-size 2", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective", 4, _GPT,
         _SINKHORN, _OVERLAP,
         "--expert-model-parallel-size 2 --num-experts 8 --sequence-parallel",
         "--tensor-model-parallel-size 2", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4", 4, _GPT, _AUX_LOSS,
         "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --num-experts 8",
         "--sequence-parallel --tensor-model-parallel-size 2", left_out=("--moe-grouped-gemm",)),
    _row("gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4", 4, _GPT, _AUX_LOSS,
         "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
         "--moe-token-dispatcher-type alltoall --num-experts 8",
         "--overlap-moe-expert-parallel-comm --sequence-parallel",
         "--tensor-model-parallel-size 2", left_out=("--moe-grouped-gemm",)),
    _row("t5_mcore_tp1_pp1_vp1", 2, _T5, family="t5"),
    _row("t5_mcore_te_tp1_pp1_vp1_resume_torch", 2, _T5,
         "--attention-softmax-in-fp32", family="t5"),
    _row("t5_mcore_tp2_pp1_vp1", 4, _T5, "--tensor-model-parallel-size 2", family="t5"),
    _row("t5_mcore_te_tp2_pp1_vp1", 4, _T5,
         "--attention-softmax-in-fp32 --tensor-model-parallel-size 2", family="t5"),
    _row("t5_mcore_te_tp2_pp1_vp1_sequence_parallel", 4, _T5,
         "--attention-softmax-in-fp32 --sequence-parallel --tensor-model-parallel-size 2",
         family="t5"),
    _row("bert_mcore_tp1_pp2", 4, _BERT, "--pipeline-model-parallel-size 2", family="bert"),
    _row("gpt3_mcore_te_tp2_pp2", 8, _GPT,
         "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    _row("gpt3_mcore_te_tp2_pp2_mla", 8, _GPT,
         "--kv-lora-rank 16 --multi-latent-attention --pipeline-model-parallel-size 2",
         "--q-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --sequence-parallel",
         "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights",
         "--v-head-dim 8"),
    _row("gpt3_mcore_te_tp1_pp4_vp1", 8, _GPT, _VPP, "--pipeline-model-parallel-size 4"),
    _row("gpt3_mcore_te_tp1_pp4_vp1_calculate_per_token_loss", 8, _GPT, _VPP,
         "--calculate-per-token-loss --pipeline-model-parallel-size 4"),
    _row("gpt3_mcore_te_tp1_pp4_vp1_decoupled_lr", 8, _GPT, _VPP,
         "--decoupled-lr 0.0002 --pipeline-model-parallel-size 4", less="--use-mcore-models"),
    _row("gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather", 8, _GPT,
         _OVERLAP, _VPP,
         "--check-weight-hash-across-dp-replicas-interval 10 --disable-gloo-process-groups",
         "--pipeline-model-parallel-size 4"),
    _row("gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce", 8, _GPT, _DO,
         "--overlap-grad-reduce --tensor-model-parallel-size 4"),
    _row("gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode", 8, _GPT,
         "--qk-layernorm --tensor-model-parallel-size 4 --test-mode"),
    _row("gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer_1node", 8, _GPT,
         _DO, "--disable-bias-linear --expert-model-parallel-size 2",
         "--expert-tensor-parallel-size 2 --moe-ffn-hidden-size 32 --moe-router-dtype fp32",
         "--moe-router-load-balancing-type aux_loss --moe-router-topk 2",
         "--moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall",
         "--no-bias-gelu-fusion --num-experts 8 --sequence-parallel",
         "--tensor-model-parallel-size 4", left_out=("--moe-grouped-gemm",)),
    _row("t5_mcore_te_tp4_pp1", 8, _T5, "--tensor-model-parallel-size 4", family="t5"),
    _row("bert_mcore_tp2_pp2", 8, _BERT,
         "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", family="bert"),
)  # fmt: skip
