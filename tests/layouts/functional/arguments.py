"""From the arguments of one of Megatron's functional tests to those of a run on two cores.

What is changed is said here, as data, with the reason; every other argument stays as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..gpt.rows import STEPS

Value = str | bool | Sequence[str]
"""True for a flag alone, several words for one that takes several."""

SMALLER = {
    "--hidden-size": 64,
    "--mup-base-hidden-size": 32,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 8,
    "--num-query-groups": 8,
    "--kv-channels": 8,
    "--q-lora-rank": 16,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 8,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 8,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--seq-length": 32,
    "--encoder-seq-length": 32,
    "--decoder-seq-length": 16,
    "--max-position-embeddings": 32,
    "--encoder-num-layers": 2,
    "--decoder-num-layers": 2,
}
"""Width and sequence length: at most this."""

MICRO_BATCHES = 8
"""Of a rank, at most: above, half as many. At least one."""

PLACES_OF_LAYERS = (
    "--account-for-embedding-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--moe-layer-freq",
    "--pipeline-model-parallel-layout",
)
"""With one of these every layer has its place, and their number stays."""

DATA = (
    *("--data-cache-path", "--data-path", "--fim-data", "--fim-rate", "--fim-spm-rate"),
    *("--make-vocab-size-divisible-by", "--merge-file", "--mock-data", "--no-mmap-bin-files"),
    *("--num-workers", "--split"),
    *("--tokenizer-model", "--tokenizer-type", "--vocab-file", "--vocab-size"),
)
"""Mock data take their place."""

LENGTH = (
    *("--eval-global-batch-size", "--eval-interval", "--eval-iters", "--exit-duration-in-mins"),
    *("--exit-interval", "--lr-decay-samples", "--lr-warmup-samples", "--train-iters"),
    *("--train-samples",),
)
"""Some steps are made, and no evaluation."""

FILES = (
    *("--async-save", "--async-ckpt-use-cpu-shm", "--async-strategy", "--auto-detect-ckpt-format"),
    *("--ckpt-assume-constant-structure", "--ckpt-format", "--ckpt-fully-parallel-load"),
    *("--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable"),
    *("--dist-ckpt-strictness", "--finetune", "--load", "--no-ckpt-fully-parallel-save"),
    *("--no-load-optim", "--override-opt_param-scheduler", "--save", "--save-interval"),
    *("--save-retain-interval", "--tensorboard-dir", "--use-checkpoint-args"),
    *("--use-checkpoint-opt_param-scheduler", "--use-persistent-ckpt-worker"),
    *("--verify-integrity", "--wandb-entity", "--wandb-exp-name", "--wandb-project"),
    *("--wandb-save-dir",),
)
"""Nothing is saved or loaded."""

REPLACED = {
    "--attention-backend": "unfused: other kernels of attention need a GPU",
    "--distributed-backend": "gloo: NCCL needs GPUs",
    "--no-persist-layer-norm": "so it is anyway",
    "--transformer-impl": "local: Transformer Engine needs a GPU",
}
"""What a CPU cannot do: what ``MEGATRON_CPU=1`` sets in its place, and why."""

LEFT_OUT = {
    "--apply-layernorm-1p": "Transformer Engine's norms",
    "--cp-comm-type": "Transformer Engine's attention",
    "--ddp-average-in-collective": "averages of NCCL",
    "--defer-embedding-wgrad-compute": "kernels of Apex",
    "--wgrad-deferral-limit": "kernels of Apex",
    "--delay-wgrad-compute": "Transformer Engine's layers",
    "--fine-grained-activation-offloading": "copies from a GPU",
    "--offload-modules": "copies from a GPU",
    "--moe-grouped-gemm": "Transformer Engine's experts",
    "--moe-permute-fusion": "kernels of Transformer Engine",
    "--moe-router-fusion": "kernels of Transformer Engine",
    "--use-flash-attn": "a kernel for GPUs",
}
"""What a CPU cannot do, and what it needs."""

REFUSED = {
    "--cuda-graph-impl": "CUDA graphs",
    "--error-injection-rate": "a launcher: a wrong result is made up, and the run stops itself",
    "--experimental-attention-variant": "attention of Transformer Engine, or for GPUs",
    "--export-kd-cfg": "a teacher's weights",
    "--fp8-format": "fp8 of Transformer Engine",
    "--moe-flex-dispatcher-backend": "DeepEP or HybridEP",
    "--sft": "data of its own",
    "--step-batch-size-schedule": "steps of millions of tokens",
    "--tp-comm-overlap": "Transformer Engine's layers",
    "--use-megatron-fsdp": "Megatron-FSDP, which sums gradients by itself",
    "--use-torch-fsdp2": "FSDP2, which sums gradients by itself",
    "--use-transformer-engine-op-fuser": "Transformer Engine's layers",
}
"""Without these nothing of the test would be left: what it needs."""

UNCUT = tuple(
    f"--{kind}-parallel-size"
    for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
"""Without these there is one part."""

LARGEST = 16
"""Ranks of a run."""


class CannotRun(ValueError):
    """A test that a CPU cannot run; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """A run that two cores can make."""

    ranks: int
    arguments: tuple[str, ...]
    """Of Megatron, in the order of the flags."""
    left_out: tuple[str, ...]
    """Flags that a CPU cannot serve, which are not among the arguments."""


def small(given: Mapping[str, Value]) -> Small:
    """What is run of a functional test's arguments, by flag.

    Two ranks sum each gradient, so that there is one right result: two data-parallel ranks, or one
    where two share each sequence.

    Raises:
        CannotRun: it needs something that a CPU cannot do, or too many ranks.
    """
    for flag, needs in REFUSED.items():
        if flag in given:
            raise CannotRun(f"{flag} needs {needs}")
    modules = given.get("--recompute-modules", ())
    if not isinstance(modules, bool) and "moe_act" in modules:
        raise CannotRun("--recompute-modules moe_act needs Transformer Engine's experts")
    tp, pp, cp, ep = (int(str(given.get(flag, 1))) for flag in UNCUT)
    dp = 2 if cp == 1 else 1
    if dp * cp > 2:
        raise CannotRun(f"{cp} ranks share a sequence: more than two sum each gradient")
    ranks = tp * pp * cp * dp
    if ranks > LARGEST:
        raise CannotRun(f"{ranks} ranks, more than {LARGEST}")
    etp = int(str(given.get("--expert-tensor-parallel-size", tp)))
    # Experts are split over data-parallel ranks, of which there are two.
    ep = min(ep, max(1, ranks // pp // etp))
    expert = ep * etp
    if ranks // pp % expert:
        raise CannotRun(f"experts on {expert} ranks: more than two sum each gradient of the rest")
    instances = int(str(given.get("--num-distributed-optimizer-instances", 1)))
    if ranks // pp // expert % instances:
        raise CannotRun(f"{instances} optimizer instances: one rank alone has each expert")

    changed = {
        flag: value
        for flag, value in given.items()
        if flag not in (*DATA, *LENGTH, *FILES, *REPLACED, *LEFT_OUT)
        and (flag not in UNCUT or value != "1")
    }
    if UNCUT[3] in changed:
        changed[UNCUT[3]] = str(ep)
    for flag, most in SMALLER.items():
        if flag in changed:
            changed[flag] = str(min(int(str(changed[flag])), most))
    if "--num-layers" in changed:
        changed["--num-layers"] = str(_layers(changed, pp))
    batch = int(str(changed["--micro-batch-size"])) * dp
    total = int(str(changed["--global-batch-size"]))
    if total > MICRO_BATCHES * batch:
        total = MICRO_BATCHES // 2 * batch
    changed["--global-batch-size"] = str(max(total, batch))
    changed |= {"--eval-interval": "1000", "--eval-iters": "0", "--train-iters": str(STEPS)}
    changed |= {"--mock-data": True, "--num-workers": "0"}
    if "--overlap-param-gather-with-optimizer-step" in changed:
        changed["--ckpt-format"] = "torch"  # Megatron refuses the other one with it
    if "--fp16" in changed:
        # From Megatron's 2^32 all steps of a short run would be skipped.
        changed["--initial-loss-scale"] = "1024"
    return Small(
        ranks=ranks,
        arguments=tuple(words(changed)),
        left_out=tuple(sorted(LEFT_OUT.keys() & given.keys())),
    )


def _layers(given: Mapping[str, Value], pp: int) -> int:
    """As few as there can be, but two."""
    layers = int(str(given["--num-layers"]))
    if any(flag in given for flag in PLACES_OF_LAYERS):
        return layers
    chunk = given.get("--num-layers-per-virtual-pipeline-stage")
    stages = int(str(given.get("--num-virtual-stages-per-pipeline-rank", 1)))
    if chunk is not None:
        return min(layers, 2 * pp * int(str(chunk)))  # at least two chunks make it virtual
    return min(layers, max(2, pp * stages))


def words(given: Mapping[str, Value]) -> list[str]:
    """A command line, in the order of the flags."""
    found: list[str] = []
    for flag, value in sorted(given.items()):
        found.append(flag)
        if isinstance(value, str):
            found.append(value)
        elif not isinstance(value, bool):
            found += value
    return found
