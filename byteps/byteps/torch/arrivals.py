"""Updated parameters that are still in flight when a step has returned."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from byteps.torch import in_flight
from byteps.torch.session import BytePSError

if TYPE_CHECKING:
    from byteps.torch.server_bucket import ServerBucket
    from byteps.torch.server_transfer import Started


class Arrivals:
    """Buckets whose parameters are in flight, in the order in which a forward pass needs them.

    The model always takes the buckets in this order, because the ranks of a host gather a bucket
    together, but may run their modules in different orders.
    """

    def __init__(self) -> None:
        self._started: dict[ServerBucket, Started] = {}
        self.are_lost = False
        """Whether the job ended while parameters were in flight."""
        in_flight.holders.add(self)

    def __bool__(self) -> bool:
        """Return whether a wait for all parameters would block or fail."""
        return bool(self._started) or self.are_lost

    def expect(self, bucket: ServerBucket, started: Started) -> None:
        """Record that parameters of `bucket` are in flight. The caller records buckets in the order
        in which a forward pass needs them."""
        self._started[bucket] = started

    def wait_for(self, bucket: ServerBucket) -> None:
        """Block until the model has the parameters of `bucket`.

        Raises:
            BytePSError: the parameters did not arrive; the text says why.
            RuntimeError: a rank of this host was lost.
        """
        self._demand_job()
        while bucket in self._started:
            self._take_next()

    def wait_for_all(self) -> None:
        """Block until the model has all parameters. Raises: as `wait_for`."""
        self._demand_job()
        while self._started:
            self._take_next()

    def end(self) -> None:
        """Block until all transfers have ended. Their values do not go into the model."""
        self.are_lost = False
        while self._started:
            bucket, started = self._started.popitem()
            with suppress(BytePSError):
                bucket.wait(started, failed=True)

    def forget(self) -> None:
        """Drop all buckets, because the job has ended, and with it all transfers."""
        self.are_lost = self.are_lost or bool(self._started)
        self._started.clear()

    def _take_next(self) -> None:
        bucket = next(iter(self._started))
        bucket.wait(self._started.pop(bucket))
        bucket.take_parameters()

    def _demand_job(self) -> None:
        if self.are_lost:
            raise BytePSError(
                "the job was left while parameters of the last step were in flight: some of the "
                "model's parameters are from before that step, others from after it. Load a "
                "checkpoint"
            )
