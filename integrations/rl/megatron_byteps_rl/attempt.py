"""Runs ``python -m verl.trainer.main_ppo``, and ends the run when one of its actors dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import ray

_EVERY_S = 2.0
_GRACE_S = 20.0
"""Time for verl to end by itself, with a more precise error."""
_MEANT = ("OUT_OF_SCOPE", "REF_DELETED", "RAY_KILL", "OWNER_DIED")
"""Reasons of intended ends, or of ends that follow from another."""


def unwanted(actors: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each actor that died by itself, from Ray's table
    (``ray._private.state.actors``)."""
    lines = []
    for actor in actors.values():
        cause = actor["DeathCause"].actor_died_error_context
        reason = type(cause).Reason.Name(cause.reason)
        if actor["State"] == "DEAD" and cause.error_message and reason not in _MEANT:
            kind = actor["ActorClassName"].rpartition(".")[2]
            lines.append(
                f"actor {kind} {actor['Name']} (process {actor['Pid']}) died: "
                f"{cause.error_message.splitlines()[0]}"
            )
    return lines


def watch() -> None:
    """From now on, end this driver with status 1 and the actor's name when an actor dies."""
    threading.Thread(target=_watch, name="deaths", daemon=True).start()


def _watch() -> None:
    lines: list[str] = []
    while not lines:
        time.sleep(_EVERY_S)
        if ray.is_initialized():
            job = ray.get_runtime_context().get_job_id()
            every = ray._private.state.actors(actor_state_name="DEAD")
            lines = unwanted({name: a for name, a in every.items() if a["JobID"] == job})
    print("error: " + "\nerror: ".join(lines), file=sys.stderr, flush=True)
    time.sleep(_GRACE_S)
    print("error: verl waits for it still; ended", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    from verl.trainer.main_ppo import main

    watch()
    main()
