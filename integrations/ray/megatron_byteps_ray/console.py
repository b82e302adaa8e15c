"""A job's events as lines for a person."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PROGRESS_S = 2.0


class Console:
    """Prints what happens; steps now and then."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or (lambda text: print(text, flush=True))
        self._shown = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        text = getattr(self, f"_{event['event']}")(event)
        if text:
            self._write(text)

    def _opened(self, event: dict[str, Any]) -> str:
        return f"{event['actors']} actors are there, all imports done"

    def _incarnation(self, event: dict[str, Any]) -> str:
        return (
            f"generation {event['number']}: {event['ranks']} ranks on {event['nodes']} "
            f"{'machine' if event['nodes'] == 1 else 'machines'}, {event['spares']} warm spares"
        )

    def _step(self, event: dict[str, Any]) -> str:
        if time.monotonic() - self._shown < PROGRESS_S:
            return ""
        self._shown = time.monotonic()
        values = "  ".join(f"{name} {value:.4f}" for name, value in event["values"].items())
        return f"  step {event['step']:6d}  {values}  {event['tokens_per_s']:,.0f} tokens/s"

    def _failure(self, event: dict[str, Any]) -> str:
        failure = event["failure"]
        lines = [f"generation {event['incarnation']} failed: {failure}"]
        for end in failure.causes:
            lines += [f"  {end.who}: {line}" for line in end.lines[-12:]]
        return "\n".join(lines)

    def _recovered(self, event: dict[str, Any]) -> str:
        self._shown = 0.0
        return f"training again, after the failure:\n{event['phases'].table()}"

    def _kept(self, event: dict[str, Any]) -> str:
        if not event["first"]:
            return ""
        megabytes = event["bytes"] / 1e6
        return f"  step {event['step']:6d}  in memory: {megabytes:.1f} MB; {event['where']}"

    def _state(self, event: dict[str, Any]) -> str:
        if event["source"] == "memory":
            return (
                f"state of step {event['step']} from memory: {event['bytes'] / 1e6:.1f} MB, "
                f"{event['moved']} of {event['ranks']} ranks take it from another actor, "
                f"{event['seconds']:.2f} s"
            )
        return f"state from the last checkpoint, if any, not from memory: {event['why']}"

    def _waiting(self, event: dict[str, Any]) -> str:
        return f"{event['available']} of {event['wanted']} ranks are ready: waiting for the others"

    def _fewer(self, event: dict[str, Any]) -> str:
        return f"going on with {event['ranks']} ranks instead of {event['wanted']}"

    def _done(self, event: dict[str, Any]) -> str:
        count = event["incarnations"]
        return f"done, after {count} {'generation' if count == 1 else 'generations'}"
