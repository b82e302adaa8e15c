"""The address at which the other hosts of an embedded job reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from byteps.launcher.meeting import Store
from byteps.launcher.places import byteps_error

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the default route leads there."""
_ADDRESSES_6 = Path("/proc/net/if_inet6")
_LINK = 0x20
"""Scope of IPv6 addresses that are of no use without an interface."""
_UNUSABLE = 0x20 | 0x40 | 0x08
"""Flags of IPv6 addresses: deprecated, tentative, a duplicate."""


def loopback() -> str:
    """This host's own address for itself: IPv4 where the host has it."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.bind((LOOPBACK, 0))
        return LOOPBACK
    return LOOPBACK_6


def own_address(env: Mapping[str, str], store: Store | None = None) -> str:
    """The address of this host on the network of the job.

    DMLC_NODE_HOST, the address of DMLC_INTERFACE, or that of the interface which leads to
    MASTER_ADDR or, without one, to torch.distributed's store; where that is a file, to anywhere.

    Raises:
        BytePSError: there is none; the text says what to set.
    """
    if env.get("DMLC_NODE_HOST"):
        return env["DMLC_NODE_HOST"]
    if env.get("DMLC_INTERFACE"):
        return _interface_address(env["DMLC_INTERFACE"])
    master = env.get("MASTER_ADDR") or _host_of(store)
    return _address_towards(master) if master else _default_address()


def address_for(others: Iterable[str], own: str) -> str:
    """The address of this host, `own` to itself, at which these other hosts reach it.

    They are on a network, and it is their master, to which MASTER_ADDR may mean loopback: a hosts
    file maps the host's own name to 127.0.1.1, or a launcher tells the master alone "localhost".
    """
    if _is_loopback(own) and any(other and not _is_loopback(other) for other in others):
        return _default_address()
    return own


def _default_address() -> str:
    """The address of the default route."""
    for target in ELSEWHERE:
        with contextlib.suppress(RuntimeError):
            return _address_towards(target)
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


def _interface_address(name: str) -> str:
    """An address of an interface that others can reach: IPv4 where it has one."""
    import fcntl
    import struct

    get_interface_address = 0x8915  # SIOCGIFADDR
    request = struct.pack("256s", name.encode()[:15])
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), get_interface_address, request)[20:24])
    found = _addresses_6(name)
    if not found:
        raise byteps_error(
            f"DMLC_INTERFACE={name!r} has no address that other hosts can reach: the host has no "
            "such interface, or it has neither an IPv4 nor a global IPv6 address"
        )
    return found[0]


def _addresses_6(interface: str) -> list[str]:
    try:
        lines = _ADDRESSES_6.read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = []
    for line in lines:
        digits, _, _, scope, flags, name = line.split()
        usable = int(scope, 16) != _LINK and not int(flags, 16) & _UNUSABLE
        if name == interface and usable:
            found.append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


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
