"""Frameworks that know nothing of byteps learn the same through servers as by gloo.

Every script runs as it is, by torchrun; ``BYTEPS_C10D=1`` alone differs. Optimizers are such that a
difference of a gradient in its last bits stays one: SGD, or sums of two values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.job import LIMIT_S, Learned, Script

FLAT = {"BYTEPS_C10D_BACKEND": "flat"}
NODE_FIRST = {"BYTEPS_C10D_BACKEND": "node-first"}
CLOSE = 2.0**-16
"""Of the largest update of a tensor. A sum of four values of fp32 is rounded three times at most in
any order: gradients differ by 2**-22 of their size, more where values cancel each other, and four
steps multiply that by little. A gradient that is missing or old makes a difference of order 1."""
ROUNDED = 2.0**-23
"""Of the largest parameter, for each step: it is rounded when the update is added."""
MOST = 0.9
"""Of the gradients' bytes: what is shorter than 64 KiB stays with gloo."""

ROWS = {
    # Four values are added in another order than gloo's.
    "lightning-ddp": (Script(name="plain_lightning.py", arguments=["ddp"]), NODE_FIRST, 1, False),
    "lightning-ddp-4-hosts": (
        Script(name="plain_lightning.py", arguments=["ddp"], hosts=4, ranks_per_host=1),
        {},  # four servers: BytePS decides by itself that they are faster
        4,
        False,
    ),
    "transformers-trainer": (Script(name="plain_trainer.py"), FLAT, 2, False),
    "deepspeed-zero-1": (Script(name="plain_deepspeed.py", arguments=["1"]), FLAT, 2, False),
    "deepspeed-zero-2": (Script(name="plain_deepspeed.py", arguments=["2"]), NODE_FIRST, 1, False),
    # Each sum between hosts is of two values.
    "lightning-hsdp": (Script(name="plain_lightning.py", arguments=["hsdp"]), FLAT, 2, True),
    "torchtitan-hsdp": (Script(name="plain_torchtitan.py", arguments=["hsdp"]), FLAT, 2, True),
    "torchtitan-ddp": (
        Script(name="plain_torchtitan.py", arguments=["ddp"], ranks_per_host=1),
        FLAT,
        1,
        True,
    ),
}
"""The script, settings, servers, and whether all bits must be the same."""


def demand_same(ours: Learned, theirs: Learned, *, bits: bool) -> None:
    """That both learned the same, and something."""
    assert len(ours.after) == len(theirs.after) > 0
    for number, before in enumerate(theirs.before):
        assert torch.equal(ours.before[number], before), "another model"
        mine, other = ours.after[number], theirs.after[number]
        update = (other - before).abs().max()
        assert update > 0, f"parameter {number} did not learn"
        difference = (mine - other).abs().max()
        if bits:
            assert torch.equal(mine, other), f"parameter {number}: {difference} of {update}"
        close = CLOSE * update + ours.steps * ROUNDED * other.abs().max()
        assert difference <= close, f"parameter {number}: {difference} of {update}"


@pytest.mark.timeout(2 * LIMIT_S + 100)
@pytest.mark.parametrize("row", ROWS)
def test_learns_the_same(run_dir: Path, row: str) -> None:
    script, env, servers, bits = ROWS[row]
    theirs = script.natively(run_dir / "gloo")
    ours, reduced = script.through_servers(run_dir / "servers", env, servers)
    assert "BytePS" not in theirs.text
    assert f"over {script.ranks} ranks on {script.hosts} host(s): BytePS" in ours.text or (
        "over 2 ranks on 2 host(s): BytePS flat" in ours.text
    ), ours.text
    assert reduced >= MOST * ours.steps * ours.nbytes, f"{reduced} bytes of {ours.nbytes} a step"
    demand_same(ours, theirs, bits=bits)
