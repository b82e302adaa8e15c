"""The ranks' agreement on where the scheduler is, through torch.distributed's store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from byteps.launcher.environment import Ranks, byteps_error
from byteps.launcher.meeting import AbsentError, Store, meet, wait_for

GRACE_S = 2.0
"""For which the others wait longer than rank 0."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """What every rank must know to join the cluster."""

    host: str
    port: int
    servers: int
    secret: str
    """Empty: the environment has one, or the job goes without."""

    def environment(self, ranks: Ranks) -> dict[str, str]:
        plain = {
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_NUM_WORKER": str(ranks.world_size),
        }
        return {**plain, "BYTEPS_SECRET": self.secret} if self.secret else plain


@dataclass(frozen=True, kw_only=True)
class Board:
    """The ranks' agreement on one address, through the store.

    Each rank reports how many servers it will start (or why it cannot); rank 0 adds them up, starts
    the scheduler for that many and publishes its address (or the reason why there is none, so that
    every rank fails at once, with the cause).
    """

    store: Store
    prefix: str
    """Of keys that the ranks of this start of the job have for themselves."""
    ranks: Ranks
    timeout_s: float

    @classmethod
    def open(cls, store: Store, ranks: Ranks, timeout_s: float, deadline: float) -> Board:
        """All ranks call this, and return when the others have come.

        Raises:
            BytePSError: some did not; the text names them.
        """

        def board(prefix: str) -> Board:
            return cls(store=store, prefix=prefix, ranks=ranks, timeout_s=timeout_s)

        # Rank 0 gives up at its own deadline and says so; leave it the time to.
        until = deadline if ranks.rank == 0 else deadline + GRACE_S
        try:
            prefix = meet(store, "embedded", ranks.rank, ranks.world_size, until)
        except AbsentError as error:
            if ranks.rank != 0:
                raise byteps_error(
                    f"embedded mode: rank 0 did not answer within {timeout_s:g} s "
                    "(BYTEPS_START_TIMEOUT_S): did it call bps.init(), with DMLC_PS_ROOT_URI unset?"
                ) from None
            absent = byteps_error(
                f"embedded mode: ranks {error.members} of {ranks.world_size} did not call "
                f"bps.init() within {timeout_s:g} s (BYTEPS_START_TIMEOUT_S), or have "
                "DMLC_PS_ROOT_URI set"
            )
            board(error.prefix)._publish_error(absent)
            raise absent from None
        except RuntimeError as error:
            raise _store_failed(error) from error
        return board(prefix)

    def _rank_key(self, rank: int) -> str:
        return f"{self.prefix}/rank/{rank}"

    @property
    def _address_key(self) -> str:
        return f"{self.prefix}/address"

    def report(self, servers: int, problem: Exception | None) -> None:
        entry: dict[str, int | str] = {"servers": servers}
        if problem is not None:
            entry["error"] = str(problem)
        self.store.set(self._rank_key(self.ranks.rank), json.dumps(entry))

    def publish(self, start: Callable[[int], Address], deadline: float) -> None:
        """On rank 0: `start` makes the scheduler for the number of servers that it is given."""
        try:
            address = start(self._count_servers(deadline))
        except Exception as error:
            self._publish_error(error)
            raise
        self.store.set(self._address_key, json.dumps(vars(address)))

    def _publish_error(self, error: Exception) -> None:
        self.store.set(self._address_key, json.dumps({"error": str(error)}))

    def _count_servers(self, deadline: float) -> int:
        keys = [self._rank_key(rank) for rank in range(self.ranks.world_size)]
        if not self._wait(keys, deadline):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise byteps_error(
                f"embedded mode: ranks {missing} of {self.ranks.world_size} ended, or said nothing "
                f"more, within {self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S)"
            )
        entries = [json.loads(self.store.get(key)) for key in keys]
        for rank, entry in enumerate(entries):
            if "error" in entry:
                raise byteps_error(f"embedded mode, rank {rank}: {entry['error']}")
        return sum(entry["servers"] for entry in entries)

    def address(self, deadline: float) -> Address:
        # Rank 0 gives up at its own deadline and publishes that; leave it the time to.
        if not self._wait([self._address_key], deadline + GRACE_S):
            raise byteps_error(
                f"embedded mode: rank 0 did not publish the scheduler's address within "
                f"{self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S)"
            )
        entry = json.loads(self.store.get(self._address_key))
        if "error" in entry:
            raise byteps_error(f"embedded mode, rank 0: {entry['error']}")
        return Address(**entry)

    def _wait(self, keys: list[str], deadline: float) -> bool:
        try:
            return wait_for(self.store, keys, deadline)
        except RuntimeError as error:
            raise _store_failed(error) from error


def _store_failed(error: Exception) -> RuntimeError:
    return byteps_error(f"embedded mode: torch.distributed's store failed: {error}")
