"""Runs ``python -m verl.trainer.main_ppo``, and ends the run when one of its actors dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import ray
from ray.experimental import internal_kv

REPLACED = "megatron-byteps-rl/replaced/"
"""Prefix of keys in Ray's store. Each names an actor whose place a spare has taken."""
_EVERY_S = 2.0
_GRACE_S = 20.0
"""Time in seconds that verl has to end by itself, with a more precise error."""
_REPLACED_S = 300.0
"""Time in seconds that a spare has to take the place of a lost actor."""
_MEANT = ("OUT_OF_SCOPE", "REF_DELETED", "RAY_KILL", "OWNER_DIED")
"""Reasons of ends that were intended, or that follow from another end."""


def unwanted(actors: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return a line for each actor that has died by itself, by its id. ``actors``: Ray's table
    (``ray._private.state.actors``)."""
    lines = {}
    for name, actor in actors.items():
        cause = actor["DeathCause"].actor_died_error_context
        reason = type(cause).Reason.Name(cause.reason)
        if actor["State"] == "DEAD" and cause.error_message and reason not in _MEANT:
            kind = actor["ActorClassName"].rpartition(".")[2]
            lines[name] = (
                f"actor {kind} {actor['Name']} (process {actor['Pid']}) died: "
                f"{cause.error_message.splitlines()[0]}"
            )
    return lines


def watch(spares: int) -> None:
    """From now on, end this driver with status 1 when an actor dies that no spare replaces. The
    error names the actor."""
    threading.Thread(target=_watch, args=[spares], name="deaths", daemon=True).start()


def _watch(spares: int) -> None:
    since: dict[str, float] = {}
    lines: list[str] = []
    grace_s = _REPLACED_S if spares else 0.0
    while not lines:
        time.sleep(_EVERY_S)
        if not ray.is_initialized():
            continue
        job = ray.get_runtime_context().get_job_id()
        every = ray._private.state.actors(actor_state_name="DEAD")
        dead = unwanted({name: a for name, a in every.items() if a["JobID"] == job})
        for name, line in dead.items():
            if name not in since:
                since[name] = time.monotonic()
                print(f"error: {line}", file=sys.stderr, flush=True)
            late = time.monotonic() - since[name] >= grace_s
            if late and not (spares and was_replaced(name)):
                lines.append(line)
    time.sleep(_GRACE_S)
    print("error: verl waits for it still; ended", file=sys.stderr, flush=True)
    os._exit(1)


def was_replaced(actor: str) -> bool:
    """Return whether a spare has taken the place of the actor with this id, in hexadecimal."""
    return bool(internal_kv._internal_kv_get(REPLACED + actor))


def _runner(plain: Any, spares: int) -> Any:
    """Return verl's task runner as a Ray actor class. Its trainer has this number of spares."""

    class TaskRunner(plain):
        """Task runner of verl whose synchronous trainer survives losses."""

        def run(self, config: Any) -> None:
            from megatron_byteps_rl import survival

            survival.install(spares)
            super().run(config)

    return ray.remote(TaskRunner)


if __name__ == "__main__":
    from verl.trainer import main_ppo

    spares = int(sys.argv.pop(1))
    if spares:
        plain = main_ppo.TaskRunnerV1.__ray_actor_class__
        main_ppo.TaskRunnerV1 = _runner(plain, spares)
    watch(spares)
    main_ppo.main()
