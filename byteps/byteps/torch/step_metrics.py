"""Cost of this worker's reductions per training step, for the training program's log."""

from __future__ import annotations

from dataclasses import dataclass

from byteps.torch import c_lib, session, spans

_WORKER = "byteps_worker_"


@dataclass(frozen=True, kw_only=True)
class _Totals:
    """Totals since the process started: bytes, and seconds."""

    sent: float = 0.0
    received: float = 0.0
    busy_s: float = 0.0
    exposed_s: float | None = 0.0

    @classmethod
    def now(cls) -> _Totals:
        counted = c_lib.metrics()
        return cls(
            sent=counted[_WORKER + "pushed_bytes_total"],
            received=counted[_WORKER + "pulled_bytes_total"],
            busy_s=counted[_WORKER + "busy_seconds_total"],
            exposed_s=spans.exposed_seconds(),
        )


class StepMeter:
    """Reads the metrics of the steps since its last reading."""

    def __init__(self) -> None:
        """The first reading covers the time since the start of the process."""
        self._last = _Totals()

    def read(self, steps: int = 1) -> dict[str, float]:
        """Return the metrics that `get_step_metrics` describes."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        before, now = self._last, _Totals.now()
        self._last = now
        sent, received = now.sent - before.sent, now.received - before.received
        busy = now.busy_s - before.busy_s
        metrics = {
            "byteps/throughput_bytes_per_s": sent / busy if busy > 0 else 0.0,
            "byteps/sent_bytes_per_step": sent / steps,
            "byteps/received_bytes_per_step": received / steps,
            "byteps/reconnections": c_lib.metrics()[_WORKER + "reconnections_total"],
            "byteps/members": _members(),
        }
        if now.exposed_s is not None and before.exposed_s is not None:
            metrics["byteps/exposed_s_per_step"] = (now.exposed_s - before.exposed_s) / steps
        return metrics


def _members() -> int:
    """Return how many workers take part in sums now; 0 before `init`."""
    if not session.is_initialized():
        return 0
    absent = c_lib.metrics()[_WORKER + "replicas_absent"]
    return session.size() - absent * (session.size() // session.replicas())


_meter = StepMeter()


def get_step_metrics(steps: int = 1) -> dict[str, float]:
    """Return the cost of this worker's reductions per step since the last call, or since the start.

    Args:
        steps: number of steps since the last call.

    Returns:
        values by name, for a logger such as TensorBoard or wandb:

        - ``byteps/throughput_bytes_per_s``: bytes sent to servers, for each second in which a
          reduction was in flight.
        - ``byteps/sent_bytes_per_step``, ``byteps/received_bytes_per_step``: gradients or
          parameters as they travel, without headers.
        - ``byteps/exposed_s_per_step``: seconds in which the program waited for servers and had
          nothing to compute. On a GPU, seconds in which the stream waited. Left out if torch itself
          waits, as in its ``DistributedDataParallel``.
        - ``byteps/reconnections``: connections that broke and were made again, since the start.
        - ``byteps/members``: workers that take part in sums now; 0 before ``init``.

    Raises:
        ValueError: `steps` is less than 1.
    """
    return _meter.read(steps)
