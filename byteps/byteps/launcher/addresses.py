"""Address at which the other hosts of an embedded job reach this host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping

from byteps.launcher.meeting import Store
from byteps.launcher.places import byteps_error

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, RFC 3849). Packets to them would take the default route."""


def loopback() -> str:
    """Return the loopback address: of IPv4 if the host has IPv4, otherwise of IPv6."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.bind((LOOPBACK, 0))
        return LOOPBACK
    return LOOPBACK_6


def own_address(
    env: Mapping[str, str], store: Store | None = None, others: Iterable[str] = ()
) -> str:
    """Return the address of this host on the network of the job.

    The address is DMLC_NODE_HOST, or else that of DMLC_INTERFACE. Without these it is the address
    of the interface that leads to MASTER_ADDR or, if that is not set, to torch.distributed's store.
    On the host of MASTER_ADDR or of the store, that may be a loopback address: the hosts file maps
    the host's own name to 127.0.1.1, or the launcher calls the host "localhost". Then the interface
    counts that leads to the other hosts. If the store is a file, the interface of the default route
    counts, or else the address of the host name.

    Args:
        others: addresses of other hosts of the job; an address that its host does not know is
            empty.

    Raises:
        BytePSError: no such address was found; the text says what to set.
    """
    if env.get("DMLC_NODE_HOST"):
        return env["DMLC_NODE_HOST"]
    if env.get("DMLC_INTERFACE"):
        from byteps.torch import c_lib

        return c_lib.interface_address(env["DMLC_INTERFACE"])
    master = env.get("MASTER_ADDR") or _host_of(store)
    try:
        own = _address_towards(master) if master else ""
    except OSError as error:
        raise byteps_error(f"embedded mode: no path to MASTER_ADDR={master!r}: {error}") from None
    reachable = [other for other in others if other and not _is_loopback(other)]
    if own and not (_is_loopback(own) and reachable):
        return own
    for target in (*reachable, *ELSEWHERE, os.uname().nodename):
        with contextlib.suppress(OSError):
            own = _address_towards(target)
            if not _is_loopback(own):
                return own
    raise byteps_error(
        "embedded mode on several hosts cannot tell at which address the others reach the "
        "scheduler: set MASTER_ADDR, DMLC_NODE_HOST or DMLC_INTERFACE"
    )


def _host_of(store: object) -> str:
    """Return the host of a TCPStore, even if other stores wrap it; "" for another kind of store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_addresses() -> list[str]:
    """Return the addresses of this host on its default routes, IPv4 and IPv6."""
    addresses = []
    for target in ELSEWHERE:
        with contextlib.suppress(OSError):
            addresses.append(_address_towards(target))
    return addresses


def _address_towards(host: str) -> str:
    """Return the local address from which packets to `host` leave. No packet is sent.

    Raises:
        OSError: no path leads there.
    """
    failure = OSError("it has no address")
    for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure
