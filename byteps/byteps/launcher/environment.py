"""What a job's launcher says in the environment: ranks, settings, and addresses of this host."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

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
            f"host's {ranks.local_world_size} ranks: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT to "
            "join a cluster, or BYTEPS_EMBEDDED_SERVERS to the number of servers that each host is "
            "to start next to its ranks (embedded mode)"
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
