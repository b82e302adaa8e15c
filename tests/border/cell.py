"""A cell of the matrix on a rank: a scenario over gloo, and then through an interface."""

from __future__ import annotations

import gc
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.border import interfaces, scenarios


def run(
    folder: Path,
    interface: str,
    scenario: str,
    pause_s: float,
    rounds: int,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Run the scenario twice in this process: over gloo, and through the interface.

    Returns:
        "reference" and "values": name -> tensor. "reference_error" and "error": the error that
        ended each run, or "". "reduced_bytes" and "pushed_bytes": bytes that had to be reduced, and
        that this rank has sent to servers. "held": tensors that are still declared. "seconds":
        duration of the second run.
    """
    os.chdir(folder)
    torch.set_num_threads(1)
    program = scenarios.SCENARIOS[scenario]
    ours = interfaces.make(interface)
    os.environ.pop("BYTEPS_C10D", None)
    plain = interfaces.make(ours.references.get(scenario, ours.reference))
    reference = _run(program, plain, folder, 0.0, rounds)
    outcome = _run(program, ours, folder, pause_s, rounds)
    result = {"reference": reference["values"], "reference_error": reference["error"], **outcome}
    if scenario == "exit-after-the-last-sum" and os.environ["RANK"] == "1":
        torch.save(result, folder / "rank1.pt")
        os._exit(0)
    if not outcome["error"]:
        # Leaving may fail with a named error if another rank has gone already.
        try:
            ours.end()
        except Exception as error:
            if scenario != "exit-after-the-last-sum":
                raise
            result["end"] = f"{type(error).__name__}: {error}"
    return result


def _run(program: Any, interface: Any, folder: Path, pause_s: float, rounds: int) -> dict[str, Any]:
    interface.start(folder)
    rank = int(os.environ["RANK"])
    this = scenarios.Run(
        interface=interface, folder=folder, rank=rank, pause_s=pause_s, rounds=rounds
    )
    before, begin, error = _pushed_bytes(interface), time.monotonic(), ""
    try:
        program(this)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    outcome = {
        "values": this.values,
        "error": error,
        "seconds": time.monotonic() - begin,
        "reduced_bytes": this.reduced_bytes,
        "pushed_bytes": _pushed_bytes(interface) - before,
        "held": _held_tensors(interface),
    }
    if not interface.through_servers:
        interface.end()
    return outcome


def _held_tensors(interface: Any) -> int:
    """Count the tensors that are still declared after this rank's models are collected."""
    if not interface.through_servers:
        return 0
    import byteps.torch as bps

    gc.collect()
    return int(bps.get_metrics()["byteps_worker_declared_tensors"])


def _pushed_bytes(interface: Any) -> int:
    if not interface.through_servers:
        return 0
    import byteps.torch as bps

    return int(bps.get_metrics()["byteps_worker_pushed_bytes_total"])
