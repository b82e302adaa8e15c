"""The address at which the other hosts of an embedded job reach this one."""

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
"""Addresses of no host (RFC 5737, RFC 3849): the default route leads there."""


def loopback() -> str:
    """This host's own address for itself: IPv4 where the host has it."""
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
    """The address of this host on the network of the job.

    DMLC_NODE_HOST, the address of DMLC_INTERFACE, or that of the interface which leads to
    MASTER_ADDR or, without one, to torch.distributed's store. Where that is this host itself, which
    may know its master by a loopback address alone (its hosts file maps its own name to 127.0.1.1,
    or the launcher tells it "localhost"), that which leads to the other hosts; where the store is a
    file, that of the default route, or of this host's name.

    Args:
        others: addresses of other hosts of the job, as far as these know them.

    Raises:
        BytePSError: there is none; the text says what to set.
    """
    if env.get("DMLC_NODE_HOST"):
        return env["DMLC_NODE_HOST"]
    if env.get("DMLC_INTERFACE"):
        from byteps.torch import c_lib

        return c_lib.interface_address(env["DMLC_INTERFACE"])
    master = env.get("MASTER_ADDR") or _host_of(store)
    own = _address_towards(master) if master else ""
    reachable = [other for other in others if other and not _is_loopback(other)]
    if own and not (_is_loopback(own) and reachable):
        return own
    for target in (*reachable, *ELSEWHERE, os.uname().nodename):
        with contextlib.suppress(RuntimeError):
            own = _address_towards(target)
            if not _is_loopback(own):
                return own
    raise byteps_error(
        "embedded mode on several hosts cannot tell at which address the others reach the "
        "scheduler: set MASTER_ADDR, DMLC_NODE_HOST or DMLC_INTERFACE"
    )


def _host_of(store: object) -> str:
    """The host of a TCPStore, which others may be around; empty: it is none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address_towards(host: str) -> str:
    """The local address that packets to `host` leave from (no packet is sent)."""
    failure: OSError | None = None
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        targets, failure = [], error
    for family, kind, _, _, target in targets:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise byteps_error(f"embedded mode: no path to MASTER_ADDR={host!r}: {failure}")
