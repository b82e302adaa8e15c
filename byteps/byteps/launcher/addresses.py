"""The addresses at which the ranks of an embedded job reach its scheduler."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from byteps.launcher.places import byteps_error

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
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


def scheduler_host(env: Mapping[str, str], single_host: bool) -> str:
    """The address of this host at which every rank of the job reaches it.

    Loopback for a job on one host. Otherwise DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the
    address of the interface that MASTER_ADDR is reached by. Raises BytePSError when that is
    loopback though MASTER_ADDR was not given as such: a hosts file that maps the host's own name to
    127.0.1.1 would hand the other hosts an address that is their own.
    """
    if single_host:
        return loopback()
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
