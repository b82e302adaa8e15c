"""What Ray's metrics show of the job, by the driver."""

from __future__ import annotations

import collections
from typing import Any

from ray.util.metrics import Counter, Gauge

_WINDOW = 20


class Metrics:
    """Gauges and counters, each with the job's name as a tag."""

    def __init__(self, job: str) -> None:
        self._tags = {"job": job}
        self._gauges: dict[str, Gauge] = {}
        self._restarts = Counter(
            "megatron_byteps_restarts_total", description="Restarts so far", tag_keys=("job",)
        )
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=_WINDOW)
        self.tokens_per_s = 0.0
        """Over the last 20 steps; 0 before the second."""

    def _set(self, name: str, description: str, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(f"megatron_byteps_{name}", description=description, tag_keys=("job",))
            self._gauges[name] = gauge
        gauge.set(value, tags=self._tags)

    def ranks(self, ranks: int, spares: int, incarnation: int) -> None:
        self._recent.clear()
        self._set("ranks", "Ranks that train", ranks)
        self._set("spares", "Warm spares", spares)
        self._set("incarnation", "Generation of the job, from 0", incarnation)

    def step(self, step: dict[str, Any]) -> None:
        self._recent.append((step["time"], step["tokens"]))
        spent = self._recent[-1][0] - self._recent[0][0]
        if spent > 0:
            tokens = sum(count for _, count in list(self._recent)[1:])
            self.tokens_per_s = tokens / spent
        self._set("step", "Number of the last step", step["step"])
        for name, value in step["values"].items():
            self._set(name.replace(" ", "_").replace("lm_loss", "loss"), name, value)
        self._set("tokens_per_second", "Tokens a second over 20 steps", self.tokens_per_s)

    def restart(self) -> None:
        self._restarts.inc(tags=self._tags)

    def recovery(self, seconds: float) -> None:
        self._set("recovery_seconds", "From the last failure to training again", seconds)
