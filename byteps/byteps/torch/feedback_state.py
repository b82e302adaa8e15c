"""What rounding to few bits has lost, to be saved and loaded as a part of a job's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from byteps.torch import operations, session
from byteps.torch.wire import feedback


def state_dict() -> dict[str, dict[str, torch.Tensor]]:
    """What was lost of each tensor of this process, by the name under which it is summed.

    Each rank has its own; that of the servers is with the lowest rank of each group. All is in
    bfloat16, on the CPU, and a copy. Not collective: each rank calls it between two steps.

    Raises:
        BytePSError: a server is lost.
    """
    session.launched()
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for name in feedback.names():
        lost = feedback.get(name)
        assert lost is not None
        saved[name] = {"lost": lost.to("cpu", torch.bfloat16, copy=True)}
        found = feedback.of_servers(name)
        if found is None:
            continue
        if isinstance(found, torch.Tensor) or found[6].lowest() == session.rank():
            saved[name]["of_servers"] = operations.read_feedback(name, lost.numel()).clone()
    return saved


def load_state_dict(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Go on with what the same rank of as many has saved; what was lost until now is dropped.

    All ranks call it between the same steps. A tensor is looked up when it is next sent.
    """
    feedback.drop()
    for name, saved in state.items():
        feedback.put(name, saved["lost"], saved.get("of_servers"))
