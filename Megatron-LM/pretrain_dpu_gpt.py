# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Pretrain a GPT with Megatron-LM, on GPUs or on a CPU.

Takes every argument of Megatron-LM, for example::

    torchrun --nproc-per-node 2 pretrain_dpu_gpt.py --use-dpu-reduce \
        --num-layers 2 --hidden-size 128 --num-attention-heads 4 \
        --seq-length 128 --max-position-embeddings 128 \
        --micro-batch-size 4 --train-iters 100 --lr 1e-3 \
        --data-path data/python --split 98,2,0 --eval-iters 1

Unless a tokenizer is given, the data are bytes: tokens 0 to 255, and 256 between documents, as
``scripts/prepare_data.py`` of Megatron-BytePS writes them. ``--record-steps FILE`` writes the loss
of every step, not rounded, and a checksum of the final parameters.

``--hf-model FOLDER`` trains a Hugging Face model instead, all of it or ``--lora`` adapters.
``--hf-save FOLDER`` writes it back. Both use the package ``megatron_byteps_hf`` of Megatron-BytePS.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import (
    argument_utils,
    get_args,
    get_timers,
    pretrain,
    print_rank_0,
    training,
)
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Megatron 0.18 has no such function.
gpt_config_from_args: Any = getattr(argument_utils, "gpt_config_from_args", None)
BYTE_VOCABULARY = 257
"""Vocabulary of byte-level data: 256 byte values and the end-of-document token."""

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


# --------------------------------------------------------------------------- data


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None
) -> list[torch.Tensor | None]:
    """Return the next micro-batch on this rank's device, in the order of ``_BATCH_KEYS``.

    With context parallelism the batch has only this rank's part of the sequence. Pipeline stages
    between the first and the last get ``None``.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(_BATCH_KEYS)
    whole = next(data_iterator)
    batch = {
        key: whole[key].cuda(non_blocking=True) if whole.get(key) is not None else None
        for key in _BATCH_KEYS
    }
    group = mpu.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return [batch[key] for key in _BATCH_KEYS]


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets. Every rank calls this."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset, num_samples, partial(is_first_or_last_pipeline_stage, vp_stage), config
    ).build()


# Each rank builds its own datasets. Otherwise rank 0 of a tensor-parallel group would build those
# of the group.
datasets_provider.is_distributed = True  # type: ignore[attr-defined] # Megatron looks for it


# --------------------------------------------------------------------------- one step


def loss_func(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses of the micro-batch's tokens, the number of tokens, and both for
    the log."""
    assert loss_mask is not None  # only the last stage calls this function, and it has a mask
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]],
    model: GPTModel,
    return_schedule_plan: bool = False,
) -> tuple[Any, partial]:
    """Run the forward pass of a micro-batch. If Megatron overlaps the exchange of expert tokens
    with another micro-batch, return the schedule of the pass instead."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    # Multi-token prediction computes losses of its own over the same tokens.
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


# --------------------------------------------------------------------------- the record


class StepRecorder:
    """Writes one JSON object per line: each step's loss, then a checksum of the parameters and the
    peak of allocated GPU memory.

    Losses are averages over all tokens of the step on all ranks, with full precision. Only the
    first rank that has the loss writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._models: list[torch.nn.Module] = []
        self._start = time.monotonic()

    def watch_models(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self._models = models
        return models

    def watch_steps(self) -> None:
        """Make Megatron's step log call this recorder too."""
        training_log = training.training_log

        signature = inspect.signature(training_log)

        def log_and_record(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(*args, **kwargs).arguments
            self._record_step(values["loss_dict"], values["iteration"], values["grad_norm"])
            return training_log(*args, **kwargs)

        training.training_log = log_and_record

    def finish(self) -> None:
        """Write a checksum over the bytes of all parameters of this rank, in the order of names."""
        if not self._writes():
            return
        gpu_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        digest = hashlib.sha256()
        for model in self._models:
            for name, parameter in sorted(model.named_parameters()):
                digest.update(name.encode())
                data = parameter.detach()
                # With FSDP2, the checksum is that of the rank's shard.
                if hasattr(data, "to_local"):
                    data = data.to_local()
                data = data.cpu().contiguous().view(-1).view(torch.uint8)
                digest.update(data.numpy().tobytes())
        self._write({"parameters_sha256": digest.hexdigest(), "gpu_bytes": gpu_bytes})
        assert self._file is not None
        self._file.close()

    def _record_step(self, loss_dict: dict, iteration: int, grad_norm: float | None) -> None:
        if not self._writes() or "lm loss" not in loss_dict:
            return
        args = get_args()
        step = {
            "iteration": iteration,
            "loss": float(loss_dict["lm loss"].item()),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "tokens": args.global_batch_size * args.seq_length,
            "seconds": time.monotonic() - self._start,
        }
        if args.use_dpu_reduce:
            import byteps.torch as bps

            step["push_pull_mb_per_s"] = float(bps.get_pushpull_speed()[1])
            step["pushed_bytes"] = bps.get_metrics()["byteps_worker_pushed_bytes_total"]
        self._write(step)

    def _writes(self) -> bool:
        return (
            mpu.is_pipeline_last_stage(ignore_virtual=True)
            and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
            and mpu.get_tensor_model_parallel_rank() == 0
        )

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


# --------------------------------------------------------------------------- main


def hugging_face_model(argv: Sequence[str]) -> Any | None:
    """Return the model for ``--hf-model``, a ``megatron_byteps_hf.model.HuggingFaceModel``, or
    None.

    Raises:
        ValueError: the flags or the model's files are invalid.
        ImportError: the package is not installed.
    """
    if not any(argument.startswith(("--hf-", "--lora")) for argument in argv):
        return None
    try:
        from megatron_byteps_hf import options
        from megatron_byteps_hf.model import HuggingFaceModel
    except ImportError as error:
        raise ImportError(
            "--hf-model and --lora need pip install 'megatron-byteps[hf]', and "
            f"pip install --no-deps megatron-bridge: {error}"
        ) from error
    return HuggingFaceModel(options.read(argv))


def add_arguments(parser: ArgumentParser, model: Any | None = None) -> ArgumentParser:
    group = parser.add_argument_group("pretrain_dpu_gpt")
    group.add_argument(
        "--record-steps",
        type=Path,
        metavar="FILE",
        help="write each step's loss, not rounded, to FILE as a line of JSON",
    )
    if model is not None:
        model.add_flags(parser)
    elif not any(argument.split("=")[0] == "--tokenizer-type" for argument in sys.argv[1:]):
        # The vocabulary is not padded: an untrained model starts at a loss of ln(257) = 5.55.
        parser.set_defaults(
            tokenizer_type="NullTokenizer",
            vocab_size=BYTE_VOCABULARY,
            make_vocab_size_divisible_by=1,
        )
    return parser


def train(args: Any, model: Any | None, recorder: StepRecorder | None) -> None:
    """Train a GPT model by Megatron's `pretrain`."""
    if gpt_config_from_args is None:
        return train_by_0_18(args, model, recorder)
    model_config = gpt_config_from_args(args)
    if model is not None:
        model.check(args)
        model.attach(model_config)
    if recorder is not None:
        model_config.post_wrap_hooks.append(recorder.watch_models)
    config = pretrain_cfg_container_from_args(args, model_config)
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


def train_by_0_18(args: Any, model: Any | None, recorder: StepRecorder | None) -> None:
    """Train with Megatron 0.18, where two files in the same folder build the model."""
    from gpt_builders import gpt_builder  # type: ignore[import-not-found]
    from model_provider import model_provider  # type: ignore[import-not-found]

    if model is not None:
        raise ValueError("--hf-model and --lora need Megatron 0.19 or later")

    def build(*arguments: Any, **more: Any) -> torch.nn.Module:
        made: torch.nn.Module = model_provider(gpt_builder, *arguments, **more)
        if recorder is not None:
            recorder.watch_models([made])
        return made

    config = pretrain_cfg_container_from_args(args)
    pretrain(config, datasets_provider, build, ModelType.encoder_or_decoder, forward_step)


def main() -> None:
    model = hugging_face_model(sys.argv[1:])
    args = parse_and_validate_args(extra_args_provider=partial(add_arguments, model=model))
    recorder = None
    if args.record_steps is not None:
        recorder = StepRecorder(args.record_steps)
        recorder.watch_steps()
    train(args, model, recorder)
    if recorder is not None:
        recorder.finish()
    if model is not None:
        model.save()
    print_rank_0("done")
    torch.distributed.barrier()
    # NCCL groups cannot be destroyed while CUDA graphs exist that recorded their kernels.
    FullCudaGraphWrapper.cuda_graph = dict.fromkeys(FullCudaGraphWrapper.cuda_graph)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
