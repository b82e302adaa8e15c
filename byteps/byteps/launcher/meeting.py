"""How the ranks of a job find each other: by their environment, and torch.distributed's store.

Here is the one place where keys for that store are made. torchrun lends all lives of a job one
store, so a rank that was started again finds what the last life wrote there.
TORCHELASTIC_RESTART_COUNT does not tell lives apart: each host's agent counts its own restarts. So
ranks use no key before they have agreed on a random one, which no earlier life has seen:

1. Each member writes a random number, its nonce, at a place that all lives share.
2. The first member answers every nonce that it finds, at a place named by the nonce, with the key.
   It does so again where a nonce changes: the one it had answered was of an earlier life.
3. Each member says that it has the key, at a place named by the key.

Processes of one life may meet under one name as often as they like.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands in the job, as its launcher says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def single_host(self) -> bool:
        return self.world_size == self.local_world_size


def byteps_error(text: str) -> RuntimeError:
    """The package's own error where it is importable: this module also loads without the engine."""
    try:
        from byteps.torch import BytePSError
    except ImportError:
        return RuntimeError(text)
    return BytePSError(text)


def integer(env: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """A variable's whole number, None where it is not set. Raises BytePSError outside low..high."""
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise byteps_error(f"{name}={text!r} is not a whole number from {low} to {high}")
    return int(text)


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """A variable's seconds. Raises BytePSError where they are not positive."""
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise byteps_error(f"{name}={text!r} is not a positive number of seconds")
    return value


def read_ranks(env: Mapping[str, str]) -> Ranks:
    """Rank and size from RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

    DMLC_WORKER_ID and DMLC_NUM_WORKER stand in for the first two, and BYTEPS_LOCAL_RANK and
    BYTEPS_LOCAL_SIZE come before the others. A process with none of them is the only one of its
    job. Raises BytePSError for a value that cannot be, or a partial set.
    """
    big = 1 << 20
    world = integer(env, "WORLD_SIZE", 1, big)
    dmlc_world = integer(env, "DMLC_NUM_WORKER", 1, big)
    if world is not None and dmlc_world is not None and world != dmlc_world:
        raise byteps_error(f"WORLD_SIZE={world} and DMLC_NUM_WORKER={dmlc_world} disagree")
    size = world if world is not None else dmlc_world
    if size is None or size == 1:
        return Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    rank = integer(env, "RANK", 0, size - 1)
    if rank is None:
        rank = integer(env, "DMLC_WORKER_ID", 0, size - 1)
    local_rank = integer(env, "BYTEPS_LOCAL_RANK", 0, size - 1)
    if local_rank is None:
        local_rank = integer(env, "LOCAL_RANK", 0, size - 1)
    local_world = integer(env, "BYTEPS_LOCAL_SIZE", 1, size)
    if local_world is None:
        local_world = integer(env, "LOCAL_WORLD_SIZE", 1, size)
    if rank is None or local_rank is None or local_world is None:
        raise byteps_error(
            f"embedded mode with {size} workers needs RANK, LOCAL_RANK and LOCAL_WORLD_SIZE: start "
            "the job with torchrun, or set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT to join a cluster"
        )
    return Ranks(rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_world)


def demand_no_cluster(env: Mapping[str, str], ranks: Ranks) -> None:
    """For a job that names no scheduler. Raises BytePSError where it was meant to name one.

    What only a cluster needs is set, or the ranks are on several hosts and nobody said how many
    servers each of these is to start. DMLC_NUM_WORKER alone may stand in for WORLD_SIZE.
    """
    names = ["DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"]
    if "WORLD_SIZE" in env:
        names.append("DMLC_NUM_WORKER")
    if env.get("BYTEPS_REPLICA"):  # all replicas join one scheduler
        names.append("BYTEPS_REPLICA")
    given = [f"{name}={env[name]}" for name in names if name in env]
    be = "is" if len(given) == 1 else "are"
    unset = "unset" if "DMLC_PS_ROOT_URI" not in env else "empty"
    if given:
        raise byteps_error(
            f"DMLC_PS_ROOT_URI is {unset}, but {' and '.join(given)} {be} set: set "
            "DMLC_PS_ROOT_URI to the scheduler's address to join a cluster, or unset the others to "
            "have a scheduler and servers started next to the ranks (embedded mode)"
        )
    if not ranks.single_host and "BYTEPS_EMBEDDED_SERVERS" not in env:
        raise byteps_error(
            f"DMLC_PS_ROOT_URI is {unset}, and WORLD_SIZE={ranks.world_size} is more than this "
            f"host's {ranks.local_world_size} ranks: set BYTEPS_EMBEDDED_SERVERS=1 on every host "
            "to start one server next to the ranks of each (embedded mode), or DMLC_PS_ROOT_URI, "
            "DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER to join a cluster"
        )


def _interface_address(name: str) -> str:
    import fcntl
    import struct

    get_interface_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), get_interface_address, request)
        except OSError as error:
            raise byteps_error(f"DMLC_INTERFACE={name!r} has no IPv4 address: {error}") from error
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    """The local address that packets to `host` leave from (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise byteps_error(
                f"embedded mode: no path to MASTER_ADDR={host!r}: {error}"
            ) from error
        return probe.getsockname()[0]


def scheduler_host(env: Mapping[str, str], ranks: Ranks) -> str:
    """The address of this host at which every rank of the job reaches it.

    Loopback for a job on one host. Otherwise DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the
    address of the interface that MASTER_ADDR is reached by. Raises BytePSError when that is
    loopback though MASTER_ADDR was not given as such: a hosts file that maps the host's own name to
    127.0.1.1 would hand the other hosts an address that is their own.
    """
    if ranks.single_host:
        return LOOPBACK
    if env.get("DMLC_NODE_HOST"):
        return env["DMLC_NODE_HOST"]
    if env.get("DMLC_INTERFACE"):
        return _interface_address(env["DMLC_INTERFACE"])
    master = env.get("MASTER_ADDR")
    if not master:
        raise byteps_error(
            "embedded mode on several hosts needs MASTER_ADDR, DMLC_NODE_HOST or DMLC_INTERFACE to "
            "know at which address the others reach the scheduler"
        )
    address = _address_towards(master)
    if ipaddress.ip_address(address).is_loopback and not _says_loopback(master):
        raise byteps_error(
            f"embedded mode: MASTER_ADDR={master!r} means {address} on its own host, where the "
            "others cannot reach it: set DMLC_NODE_HOST or DMLC_INTERFACE"
        )
    return address


def _says_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.1
"""The first member looks for nonces as often as this, and more and more rarely."""


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AbsentError(RuntimeError):
    """Members did not come in time."""

    def __init__(self, members: list[int], prefix: str) -> None:
        super().__init__(f"members {members} did not come in time")
        self.members = members
        self.prefix = prefix
        """Of the keys that those who came use; empty where the first member is absent."""


def meet(store: Store, name: str, member: int, size: int, deadline: float) -> str:
    """Return the prefix of keys that the processes which meet now have for themselves.

    All `size` members call this, each with its number. The first one returns when all others have
    the prefix, the others as soon as they have it themselves.

    Args:
        name: of what they meet for, the same on all.
        deadline: of time.monotonic().

    Raises:
        AbsentError: the first member names the others that did not come; others that one.
        RuntimeError: the store failed, which is a DistStoreError.
    """
    place = f"byteps/{name}"
    if member == 0:
        return _lead(store, place, size, deadline)
    nonce = secrets.token_hex(8)
    answer = f"{place}/answer/{nonce}"
    store.set(f"{place}/nonce/{member}", nonce)
    if not wait_for(store, [answer], deadline):
        raise AbsentError([0], "")
    prefix = store.get(answer).decode()
    store.set(f"{prefix}/has/{member}", "")
    return prefix


def _lead(store: Store, place: str, size: int, deadline: float) -> str:
    prefix = f"{place}/{secrets.token_hex(8)}"
    unseen = [f"{place}/nonce/{member}" for member in range(1, size)]
    have = [f"{prefix}/has/{member}" for member in range(1, size)]
    seen: list[str] = []
    answered: set[bytes] = set()
    pause = FIRST_LOOK_S
    while have:
        before, unseen = unseen, []
        for key in before:
            (seen if store.check([key]) else unseen).append(key)
        # To answer a nonce of an earlier life, too, does no harm: nobody reads it.
        for nonce in set(store.multi_get(seen) if seen else ()) - answered:
            store.set(f"{place}/answer/{nonce.decode()}", prefix)
            answered.add(nonce)
        if not unseen and store.check(have):
            break
        if time.monotonic() > deadline:
            absent = [member for member, key in enumerate(have, 1) if not store.check([key])]
            raise AbsentError(absent, prefix)
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK_S)
    return prefix


def wait_for(store: Store, keys: list[str], deadline: float) -> bool:
    """Whether all keys were there before `deadline`, of time.monotonic().

    Raises:
        RuntimeError: the store failed.
    """
    left = max(0.001, deadline - time.monotonic())
    try:
        store.wait(keys, timedelta(seconds=left))
    except RuntimeError:  # DistStoreError is one
        if time.monotonic() >= deadline - 0.05:
            return False
        raise
    return True


# The ranks' agreement on where the scheduler is.


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
