"""A script for transformers' Trainer without BytePS code: torchrun ... SCRIPT ddp|fsdp OUT.

accelerate shards only on accelerators: on CPUs it would ignore ``fsdp=True`` and use DDP. So the
script makes it take its CPU processes for those of GPUs.
"""

from __future__ import annotations

import sys

import torch
from accelerate import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.frameworks.programs.saved import save, values

STEPS = 4
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=False,
)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sequences of made-up tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(256, (32,), generator=made)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    kind, out = sys.argv[1:]
    torch.manual_seed(7)
    model = LlamaForCausalLM(CONFIG)
    before = values(model.parameters())
    arguments = TrainingArguments(
        output_dir=f"{out}.folder",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        fsdp=kind == "fsdp",
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    PartialState(cpu=True)
    if kind == "fsdp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule) == (kind == "fsdp")
    save(before, values(trainer.model.parameters()), out, STEPS)


if __name__ == "__main__":
    main()
