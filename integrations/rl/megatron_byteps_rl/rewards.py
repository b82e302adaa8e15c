"""Reward worker of verl, changed so that a reward model can have GPUs of its own.

With such GPUs, verl 0.9.1 lacks the key ``reward_extra_info`` of each score, and all responses
fail.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_loop import RewardLoopWorker


class Worker(RewardLoopWorker):
    """Scores responses by a function or a reward model."""

    async def compute_score_disrm(self, data: Any) -> dict[str, Any]:
        """Return the reward model's score of one response."""
        return {"reward_extra_info": {}, **await super().compute_score_disrm(data)}
