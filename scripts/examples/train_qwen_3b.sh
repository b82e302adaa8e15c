#!/usr/bin/env bash
# Trains Qwen2.5-3B from random weights on 4 hosts with 8 GPUs each, through servers on 4 more machines:
#
#   on 10.0.0.1                     scripts/scheduler.sh --host 10.0.0.1 --port 9000 --workers 32 --servers 4
#   on each of the 4 machines       scripts/server.sh --scheduler 10.0.0.1:9000 --workers 32 --servers 4
#   on host N of the 4, from 0      DATA=/data/text_document TOKENIZER=/data/Qwen2.5-3B SAVE=/shared/run \
#                                     scripts/examples/train_qwen_3b.sh --scheduler 10.0.0.1:9000 --servers 4 \
#                                     --nnodes 4 --node-rank N --nproc-per-node 8 \
#                                     --master-addr 10.0.0.1 --master-port 29500
#
# Options are those of scripts/worker.sh; what follows "--" goes to Megatron, behind the arguments
# below, which it overrides. The ranks of a host shard the optimizer, and servers sum the gradients
# of the hosts.
#
#   DATA       prefix of the tokens, as scripts/prepare_data.py --tokenizer writes them (default: made up)
#   TOKENIZER  a Hugging Face tokenizer's folder or name (default: none, with data that are made up)
#   SAVE       folder of checkpoints, from which a job also goes on (default: none)
#   PROGRAM    training script (default: build/Megatron-LM/pretrain_dpu_gpt.py)
#   SIZE=tiny  two small layers, on a CPU where there is no GPU: to try the way that the job starts
#   CHECK=RATE trains nothing: what servers gain on 4 hosts with links of so many Gbit/s
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
size="${SIZE:-3b}"

options=()
hosts=1
while (($# > 0)) && [[ $1 != -- ]]; do
  if [[ $1 == --nnodes ]]; then hosts="${2:-1}"; fi
  if [[ $1 == --nnodes=* ]]; then hosts="${1#*=}"; fi
  options+=("$1")
  shift
done
more=("${@:2}")
if [[ -n ${CHECK:-} ]]; then hosts=4; fi

case "$size" in
  3b)
    model=(
      --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008
      --num-attention-heads 16 --kv-channels 128 --num-query-groups 2
      --seq-length 4096 --max-position-embeddings 32768
    )
    steps=(
      --micro-batch-size 2 --global-batch-size 512 --train-iters 100000
      --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    )
    vocabulary=151936
    ;;
  tiny)
    model=(
      --num-layers 2 --hidden-size 64 --ffn-hidden-size 128
      --num-attention-heads 4 --kv-channels 16 --num-query-groups 2
      --seq-length 64 --max-position-embeddings 64 --transformer-impl local
    )
    steps=(
      --micro-batch-size 2 --train-iters 10
      --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    )
    vocabulary=512
    # Megatron trains on a CPU only on request: here, if there is no GPU.
    compgen -G "/proc/driver/nvidia/gpus/*" >/dev/null || export MEGATRON_CPU="${MEGATRON_CPU:-1}"
    ;;
  *)
    echo "train_qwen_3b.sh: SIZE is 3b or tiny, not $size" >&2
    exit 2
    ;;
esac

model+=(
  --group-query-attention --add-qkv-bias --disable-bias-linear --swiglu
  --normalization RMSNorm --norm-epsilon 1e-6
  --position-embedding-type rope --rotary-base 1000000
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
steps+=(
  --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
  --log-interval 1 --eval-interval 1000 --eval-iters 1
)
layout=(
  --bf16 --grad-reduce-in-bf16 --overlap-grad-reduce --overlap-param-gather
  --use-distributed-optimizer --num-distributed-optimizer-instances "$hosts"
  --use-dpu-reduce
)
if [[ -n ${DATA:-} ]]; then
  data=(--data-path "$DATA" --split "99,1,0")
else
  data=(--mock-data)
fi
if [[ -n ${TOKENIZER:-} ]]; then
  data+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
  data+=(--tokenizer-type NullTokenizer --vocab-size "$((vocabulary - 1))")
fi
checkpoints=()
if [[ -n ${SAVE:-} ]]; then
  checkpoints=(--save "$SAVE" --load "$SAVE" --save-interval 1000)
fi
arguments=(
  "${model[@]}" "${steps[@]}" "${layout[@]}" "${data[@]}" "${checkpoints[@]}" "${more[@]}"
)

if [[ -n ${CHECK:-} ]]; then
  python="$root/build/venv/bin/python"
  [[ -x $python ]] || python=python3
  exec "$python" -W ignore -m megatron.core.distributed.dpu_reduce.check \
    --hosts "$hosts" --servers "$hosts" --gpus-per-host 8 --link-gbps "$CHECK" -- "${arguments[@]}"
fi
exec "$root/scripts/worker.sh" "${options[@]}" -- \
  "${PROGRAM:-$root/build/Megatron-LM/pretrain_dpu_gpt.py}" "${arguments[@]}"
