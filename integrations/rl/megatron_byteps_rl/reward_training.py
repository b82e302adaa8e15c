"""Trains a reward model on sums that are right or wrong: ``torchrun -m`` this module.

verl's worker for values learns 1 for a right answer and 0 for any other, by least squares, as its
value at the last token. Gradients are summed by BytePS. The model is written in the form of Hugging
Face, with the head ``lm_head.weight`` [1, hidden], which is what a ``reward_worker`` loads. The
variables of ``devices`` must be set.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import open_dict
from safetensors.torch import save_file
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu

from . import task
from .devices import ENVIRONMENTS
from .reward import at_last_token, columns, value_worker_config
from .settings import Settings

STEPS = 150
ROWS = 64
"""Answers of a rank at a step."""
RIGHT = 0.97
"""Of fresh answers, half of them right, the model must tell this part apart at the end."""
NOTE = "reward.json"
_LEARNING_RATE = 2e-3
_CHECKED = 1024
_WORDS = "+=0123456789"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of the training."""

    accuracy: float
    """The part of fresh answers for which the reward is on the right side of one half."""
    losses: list[float]
    """Of each step, in the mean over the ranks; empty on ranks that have no output."""
    checksum: str
    """Of this rank's parameters."""


def answers(rows: int, generator: torch.Generator) -> list[tuple[int, int, str]]:
    """Operands and an answer: half of them right, the others close to it or any words."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    made = []
    for row in range(rows):
        a, b = task.PAIRS[below(len(task.PAIRS))]
        if row % 2 == 0:
            text = str(a + b)
        elif row % 4 == 1:
            text = str(below(20))
        else:
            words = below(task.RESPONSE_TOKENS + 1)
            text = "".join(_WORDS[below(len(_WORDS))] for _ in range(words))
        made.append((a, b, text))
    return made


def batch(tokenizer: Any, drawn: Sequence[tuple[int, int, str]]) -> DataProto:
    """These answers as a rollout would give them, and ``labels``, float32 [batch], by the rule."""
    length = task.RESPONSE_TOKENS
    prompts = [tokenizer(task.prompt(a, b)).input_ids for a, b, _ in drawn]
    ended = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for *_, text in drawn
    ]
    taken = [tokens[:length] for tokens in ended]
    pad = tokenizer.pad_token_id
    responses = torch.tensor([t + [pad] * (length - len(t)) for t in taken])
    mask = torch.tensor([[1] * len(t) + [0] * (length - len(t)) for t in taken])
    whole = torch.cat([torch.tensor(prompts), responses], 1)
    attention = torch.cat([torch.ones(len(drawn), task.PROMPT_TOKENS, dtype=torch.int64), mask], 1)
    labels = [task.compute_score(task.SOURCE, text, str(a + b)) for a, b, text in drawn]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor(prompts),
            "responses": responses,
            "response_mask": mask,
            "input_ids": whole,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "labels": torch.tensor(labels),
        }
    )


def loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Least squares; a loss function of verl's."""
    error = at_last_token(model_output["values"]) - data["labels"]
    return error.square().sum() / tu.get(data, "rows"), {}


def train(
    settings: Settings,
    *,
    steps: int = STEPS,
    out: Path | None = None,
    right: float = RIGHT,
) -> Trained:
    """Train on all ranks, and write the model to ``out``. All ranks call it together.

    Args:
        settings: the base model, the layout, the seed and how gradients are summed.
        steps: of training.
        out: folder of the trained model; None writes nothing.
        right: the part of fresh answers that a model which is written must tell apart.

    Raises:
        ValueError: the trained model tells too few answers apart to be written.
    """
    from verl.utils import hf_tokenizer

    from . import trainer
    from .workers import Reward, checksum

    config = trainer.compose([*settings.overrides(), f"critic.optim.lr={_LEARNING_RATE}"])
    with open_dict(config):
        config.critic.optim.total_training_steps = steps
        config.critic.megatron.seed = settings.seed
    tokenizer = hf_tokenizer(str(settings.model))
    worker = Reward(value_worker_config(config.critic))
    worker.reset()
    worker.set_loss_fn(loss)
    copy = worker.engine.get_data_parallel_rank()
    losses = []
    for step in range(steps):
        data = _data(tokenizer, ROWS, seed=[settings.seed, step, copy])
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        output = worker.train_batch(data)
        if output is not None:
            losses.append(float(tu.get(output, "metrics")["loss"]))
            if out is not None and dist.get_rank() == dist.get_world_size() - 1:
                _tell(settings.folder, step + 1, losses[-1])
    fresh = _data(tokenizer, _CHECKED, seed=[settings.seed, steps])
    accuracy = _accuracy(worker.compute_rewards(fresh), fresh)
    if out is not None:
        if accuracy < right:
            raise ValueError(
                f"the reward's model tells {accuracy:.3f} of the answers apart, and needs {right}: "
                "train it for more steps"
            )
        _save(worker.engine, settings.model, out)
        if dist.get_rank() == 0:
            note = {"steps": steps, "seed": settings.seed, "accuracy": accuracy}
            # Last: it says that all is there.
            (out / NOTE).write_text(json.dumps(note), encoding="utf-8")
    made = Trained(accuracy=accuracy, losses=losses, checksum=checksum(worker.engine))
    _leave()
    return made


def _data(tokenizer: Any, rows: int, *, seed: Sequence[int]) -> TensorDict:
    # A number of its own for each step and copy: steps and copies are fewer than 10,000.
    number = sum(part * 10_000**place for place, part in enumerate(seed))
    drawn = batch(tokenizer, answers(rows, torch.Generator().manual_seed(number)))
    data = columns(drawn, compute_loss=True)
    data["labels"] = drawn.batch["labels"]
    tu.assign_non_tensor(data, rows=rows)
    return data


def _accuracy(made: TensorDict | None, data: TensorDict) -> float:
    """On all ranks; only some have the output."""
    right = torch.zeros(2)
    if made is not None:
        same = (tu.get(made, "rewards") > 0.5) == (data["labels"] > 0.5)
        right = torch.tensor([float(same.float().mean()), 1.0])
    dist.all_reduce(right)
    return float(right[0] / right[1])


def _tell(folder: Path, step: int, value: float) -> None:
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "loss": value}) + "\n")


def _save(engine: Any, base: Path, out: Path) -> None:
    """Whole tensors by their Hugging Face names, next to the base model's other files."""
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in engine.get_per_tensor_param()[0]
    }
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        for file in base.glob("*.json"):
            shutil.copy(file, out)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def _leave() -> None:
    from megatron.core.distributed import dpu_reduce

    dpu_reduce.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=sorted(ENVIRONMENTS), default="cpu", help="of the ranks (default: cpu)")
    add("--all-reduce", action="store_true", help="sum gradients by all-reduce, not by BytePS")
    add("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    add("--seed", type=int, default=1, help="default: 1")
    add("--model", type=Path, required=True, help="folder of the base model")
    add("--out", type=Path, required=True, help="folder of the trained model, and of steps.jsonl")
    options = parser.parse_args(arguments)
    from . import engines

    engines.prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        algorithm="ppo",
        device=options.device,
        through_byteps=not options.all_reduce,
        ranks=dist.get_world_size(),
        seed=options.seed,
        model=options.model.resolve(),
        folder=options.out.resolve(),
    )
    made = train(settings, steps=options.steps, out=options.out)
    if dist.get_rank() == 0:
        print(f"the reward's model tells {made.accuracy:.3f} of {_CHECKED} fresh answers apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
