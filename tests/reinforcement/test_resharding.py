"""A model in the layout of training and the same in the rollout's: weights, logits, tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_byteps_rl.megatron_rollout import MegatronRollout
from megatron_byteps_rl.resharding import reshard
from tests.layouts.job import Job

RANKS = 4
# fp32: the same sums in another order.
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "rollout"),
    [
        (2, 2, 1),
        pytest.param(2, 1, 1, marks=pytest.mark.thorough),
        (1, 2, 2),
    ],
)
def test_both_layouts_are_one_model(
    fork_server: None, tmp_path: Path, model: Path, tensor: int, pipeline: int, rollout: int
) -> None:
    job = Job(
        folder=tmp_path / "job",
        program="tests.layouts.reinforcement.resharding:compare",
        ranks=RANKS,
        settings={"model": model, "tensor": tensor, "pipeline": pipeline, "rollout": rollout},
    )
    job.run()
    seen = job.results()
    for rank in range(RANKS):
        for time in seen[rank]:
            torch.testing.assert_close(time["resharded"], time["trained"], **CLOSE)
            _check_generated(time)
        # The second time brought other weights.
        assert (seen[rank][0]["trained"] - seen[rank][1]["trained"]).abs().max() > 0.1
        # The ranks of a copy drew the same.
        first = seen[rank - rank % rollout]
        for mine, theirs in zip(seen[rank], first, strict=True):
            assert torch.equal(mine["drawn"].responses, theirs["drawn"].responses)
    # Each copy of the rollout got the whole model, from itself and from others.
    costs = [rank[0]["cost"] for rank in seen]
    moved = sum(cost.sent_bytes + cost.kept_bytes for cost in costs)
    assert moved >= RANKS // rollout * _bytes_of(model)
    assert costs[0].sent_bytes > 0 and costs[0].seconds > 0


def _bytes_of(model: Path) -> int:
    from safetensors.torch import load_file

    return sum(4 * tensor.numel() for tensor in load_file(model / "model.safetensors").values())


def _check_generated(time: dict[str, Any]) -> None:
    drawn, again, other = time["drawn"], time["again"], time["other"]
    assert torch.equal(drawn.responses, again.responses)
    assert not torch.equal(drawn.responses, other.responses)
    assert time["generator_untouched"]
    for made, temperature, asked in (
        (drawn, 1.0, time["asked"][0]),
        (time["hot"], 2.0, time["asked"][1]),
    ):
        for row, logits in enumerate(asked):
            length = int(made.response_mask[row].sum())
            scores = torch.log_softmax(logits / temperature, -1)
            wanted = scores.gather(-1, made.responses[row, :length, None])[:, 0]
            torch.testing.assert_close(made.log_probs[row, :length], wanted, **CLOSE)
            assert not made.log_probs[row, length:].any()
            assert not made.responses[row, length:].any()  # the padding is token 0
    for row, logits in enumerate(time["best"][0]):
        length = int(time["greedy"].response_mask[row].sum())
        assert torch.equal(logits.argmax(-1), time["greedy"].responses[row, :length])


def follower(tensor: int, **changes: Any) -> MegatronRollout:
    config = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": 1}
    config |= {"data_parallel_size": 1} | changes
    return MegatronRollout(SimpleNamespace(**config), SimpleNamespace(), None)


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout.pipeline_model_parallel_size=2: only 1"):
        follower(1, pipeline_model_parallel_size=2)
    provider = SimpleNamespace(num_attention_heads=4, num_query_groups=2, num_moe_experts=None)
    engine = SimpleNamespace(
        provider=provider, module=[SimpleNamespace(vocab_size=14)], peft_cls=None
    )
    with pytest.raises(ValueError, match="size=4 does not divide the model's 2 query groups"):
        follower(4).follow(engine)
    provider.num_query_groups = None
    with pytest.raises(ValueError, match="size=4 does not divide the model's 14 words"):
        follower(4).follow(engine)
    provider.num_moe_experts = 8
    with pytest.raises(ValueError, match="name=megatron does not know experts"):
        follower(1).follow(engine)
    engine.peft_cls = object
    with pytest.raises(ValueError, match="name=megatron does not know LoRA adapters"):
        follower(1).follow(engine)
    made = follower(2)
    with pytest.raises(RuntimeError, match="before follow"):
        asyncio.run(made.update_weights(()))
    with pytest.raises(RuntimeError, match="before the first update_weights"):
        made.generate([[4]], length=1, temperature=1.0, seed=0)


def test_models_that_cannot_be_resharded_are_refused() -> None:
    group: Any = None  # nothing is sent
    part = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="one chunk of the model a rank, not 2"):
        reshard([part, part], part, group)
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"type torch.float32 cannot become torch.bfloat16"):
        reshard([part], half, group)
