"""Makes ranks agree on objects that each of them creates, such as optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from byteps.torch import ops, session
from byteps.torch.broadcast import broadcast_object

_made: dict[tuple[int, str], int] = {}
"""Number of objects created by this process, by job and kind."""
_WORDS = 8
_WORD_BITS = 16
"""Each word has 16 bits, so that its square can be summed over all ranks without overflow."""


def number(kind: str, description: Sequence[str]) -> str:
    """Return a name for a new object: the same on all ranks, unique within the job.

    All ranks call this, with the same kinds in the same order.

    Args:
        kind: kind of object, such as "optimizer".
        description: lines that are the same on all ranks.

    Raises:
        BytePSError: the descriptions differ; all ranks raise. The text has the first difference to
            the description of rank 0.
    """
    digest = hashlib.sha256("\n".join(description).encode()).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64)[: 2 * _WORDS]
    words = words[::2] << 8 | words[1::2]
    key = session.number(), kind
    count = _made[key] = _made.get(key, 0) + 1
    reported = torch.cat(
        [torch.tensor([count if session.rank() == 0 else 0]), words, words * words]
    )
    ops.push_pull_inplace(reported, average=False, name=f"{kind}/agreement")
    sums, squares = reported[1:].view(2, _WORDS)
    # By the Cauchy-Schwarz inequality, the two sides are equal only if all ranks have the same
    # words.
    if not torch.equal(sums * sums, squares * session.size()):
        _raise_difference(kind, description)
    return f"{kind}{int(reported[0])}"


def _raise_difference(kind: str, description: Sequence[str]) -> None:
    theirs = broadcast_object(list(description), 0, f"{kind}/description")
    what = "other ranks than this one and rank 0 have something else"
    for index in range(max(len(theirs), len(description))):
        there, here = (
            repr(lines[index]) if index < len(lines) else "nothing"
            for lines in (theirs, description)
        )
        if there != here:
            what = f"number {index} is {here} here, {there} on rank 0"
            break
    raise session.BytePSError(
        f"ranks make different {kind}s: {what}. All ranks must make the same {kind}s in the same "
        "order"
    )
