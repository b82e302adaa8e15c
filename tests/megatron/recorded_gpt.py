"""Megatron's entry script that also saves, in RECORD/REPLICA-RANK.pt, the model's parameters:
`begin` at the start, `before` and `after` each step's outer step, `evaluated` by iteration.

    RECORD=FOLDER python tests/megatron/recorded_gpt.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    from megatron.core.distributed.dpu_reduce import outer_steps
    from megatron.training import training

    record: dict[str, Any] = {"before": [], "after": [], "evaluated": {}}
    models: list[Any] = []
    begin, ended = outer_steps.begin, outer_steps.iteration_ended
    compute = training.get_forward_backward_func

    def values() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for chunk in models for p in chunk.parameters()])

    def begin_recorded(args: Any, model: Any, optimizer: Any) -> None:
        models.extend(model)
        record["begin"] = values()
        begin(args, model, optimizer)

    def ended_recorded(args: Any) -> None:
        record["before"].append(values())
        ended(args)
        record["after"].append(values())

    def get(*args: Any, **kwargs: Any) -> Any:
        step = compute(*args, **kwargs)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only"):
                record["evaluated"][len(record["after"])] = values()
            return step(*args, **kwargs)

        return recorded

    outer_steps.begin, outer_steps.iteration_ended = begin_recorded, ended_recorded
    training.get_forward_backward_func = get
    runpy.run_path(str(script), run_name="__main__")
    replica = os.environ.get("BYTEPS_REPLICA", "0").partition("/")[0]
    torch.save(record, Path(os.environ["RECORD"], f"{replica}-{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
