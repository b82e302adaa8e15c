"""Local attention with context parallelism, held against one rank with all tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.megatron.training_jobs import Trained

Train = Callable[..., Trained]

# Dropout would hit other elements.
PLAIN = ("--global-batch-size", "2", "--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.mark.parametrize("ranks", [4])
def test_a_split_sequence_gives_the_gradients_of_the_whole(
    train: Train, run_dir: Path, ranks: int
) -> None:
    """The same micro-batch and parameters, on one rank and over all of the ranks."""
    folder = str(run_dir / "checkpoint")
    whole = train(*PLAIN, "--save", folder, "--save-interval", "2", ranks=1)
    resume = ("--load", folder, "--ckpt-step", "2", "--no-load-rng")
    split = train(*PLAIN, *resume, "--context-parallel-size", str(ranks), ranks=ranks)
    torch.testing.assert_close(split.losses, whole.losses[2:], rtol=1e-5, atol=0.0)
    for one, other in zip(split.gradients[0], whole.gradients[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # Each rank saw tokens of its own.
    first, second = (local[0][0] for local in split.local_gradients[:2])
    assert not torch.equal(first, second)


def test_positions_are_megatrons() -> None:
    from megatron.core import utils
    from megatron.training.cpu_layers import positions

    class Rank:
        """As much of a process group as the function that splits a batch asks for."""

        def __init__(self, rank: int) -> None:
            self.number = rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda group: 4)
        patch.setattr(torch.distributed, "get_rank", lambda group: group.number)
        for rank in range(4):
            batch = {"tokens": torch.arange(16).view(1, 16)}
            split = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=Rank(rank))
            assert split["tokens"][0].tolist() == positions(rank, 4, 4).tolist()
