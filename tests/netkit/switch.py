"""A switch between emulated hosts on this machine, with links that delay or drop packets by rule.

Each host is a network namespace with a TAP device, `eth0`. This process reads the frames that a
host sends and writes them to their destinations, like a switch. The kernel needs only TAP devices
(`netem` is often missing). The rate is about 10,000 frames per second.

    with Switch(2) as switch:
        switch.set_rule(0, 1, Rule(largest=600))    # from host 0 to host 1
        subprocess.run(switch.hosts[0].command(["ssh", switch.hosts[1].address]))

Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TUN = Path("/dev/net/tun")
DEVICE = "eth0"
_NAMESPACES = Path("/run/netns")
_PREFIX = "bps-switch"
_NET = "10.78.0"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_HEADER_BYTES = 14
"""Bytes of an Ethernet frame in addition to the packet."""
_MOST_BYTES = 65536
_MOST_FRAMES = 64
"""Largest number of frames that are read from a host before the next host's turn."""


class SwitchError(Exception):
    """Raised if the switch cannot be made. The text has the failed command and its error."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Treatment of the packets from a host to another."""

    largest: int | None = None
    """Largest size of a packet in bytes, with its IP header. Larger packets are dropped without an
    ICMP error."""
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    """Rate of the link. Packets that do not fit into the queue are dropped."""
    queue_bytes: int = 3_000
    """Largest number of bytes in the queue of a link with a rate."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """An emulated host, in which processes can run."""

    address: str
    namespace: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Make the command line that runs a command on this host, in the started process itself."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass
class Passed:
    """Number of frames in a direction."""

    carried: int = 0


class Switch:
    """A context manager; `hosts` exist while it is open."""

    _made = 0

    def __init__(self, hosts: int) -> None:
        stem = f"{_PREFIX}-{os.getpid()}-{Switch._made}"
        self._number = Switch._made
        Switch._made += 1
        self.hosts = [
            Host(address=f"{_NET}.{i + 1}", namespace=f"{stem}-h{i}") for i in range(hosts)
        ]
        self._lock = threading.Lock()
        self._rules: dict[tuple[int, int], Rule] = {}
        self._passed: dict[tuple[int, int], Passed] = {}
        self._free_at: dict[tuple[int, int], float] = {}
        """Time at which a link with a rate has sent its queue."""
        self._waiting: list[tuple[float, int, tuple[int, int], bytes]] = []
        self._order = itertools.count()
        self._taps: list[int] = []
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = False

    def __enter__(self) -> Self:
        _remove_stale()
        try:
            for index in range(len(self.hosts)):
                self._taps.append(self._add_host(index))
        except BaseException:
            self._down()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._down()

    def run_on(self, host: int, *command: str) -> None:
        """Run a command on the host and wait for its end. Raises SwitchError."""
        _run(*self.hosts[host].command(command))

    def set_rule(self, sender: int, receiver: int, rule: Rule) -> None:
        """Apply the rule to packets from `sender` to `receiver` (indices) from now on."""
        with self._lock:
            self._rules[sender, receiver] = rule

    def passed(self, sender: int, receiver: int) -> Passed:
        """Get the count of frames so far."""
        with self._lock:
            counted = self._passed.get((sender, receiver), Passed())
            return Passed(carried=counted.carried)

    def _add_host(self, index: int) -> int:
        name = self.hosts[index].namespace
        _ip("netns", "add", name)
        tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The device is removed when its descriptor closes, even if this process is killed.
            device = f"bps{os.getpid()}.{self._number}{index}"[-15:]
            request = struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(tap, _TUNSETIFF, request)
            _ip("link", "set", device, "netns", name, "name", DEVICE, "address", _mac(index))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.hosts[index].address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
        except BaseException:
            os.close(tap)
            raise
        return tap

    def _down(self) -> None:
        for tap in self._taps:
            os.close(tap)
        for end in self._wake:
            os.close(end)
        for host in self.hosts:
            if (_NAMESPACES / host.namespace).exists():
                _ip("netns", "delete", host.namespace)

    def _run(self) -> None:
        by_mac = {bytes.fromhex(_mac(i).replace(":", "")): i for i in range(len(self.hosts))}
        everybody = list(range(len(self.hosts)))
        with selectors.DefaultSelector() as selector:
            for index, tap in enumerate(self._taps):
                selector.register(tap, selectors.EVENT_READ, index)
            selector.register(self._wake[0], selectors.EVENT_READ)
            while not self._stop:
                wait = self._waiting[0][0] - time.monotonic() if self._waiting else None
                for key, _ in selector.select(None if wait is None else max(0.0, wait)):
                    if key.data is None:
                        continue
                    for frame in _frames(self._taps[key.data]):
                        receiver = by_mac.get(frame[:6])
                        # Broadcasts, and frames to an address that has not sent anything yet.
                        receivers = everybody if receiver is None else [receiver]
                        for other in receivers:
                            if other != key.data:
                                self._pass_on(key.data, other, frame)
                self._deliver(time.monotonic())

    def _pass_on(self, sender: int, receiver: int, frame: bytes) -> None:
        link = (sender, receiver)
        now = time.monotonic()
        with self._lock:
            rule = self._rules.get(link, Rule())
            counted = self._passed.setdefault(link, Passed())
            lost = rule.largest is not None and len(frame) > rule.largest + _HEADER_BYTES
            when = now
            if rule.bytes_per_s is not None and not lost:
                free_at = max(now, self._free_at.get(link, now))
                lost = (free_at - now) * rule.bytes_per_s > rule.queue_bytes
                if not lost:
                    when = self._free_at[link] = free_at + len(frame) / rule.bytes_per_s
            if lost:
                return
            counted.carried += 1
        heapq.heappush(self._waiting, (when + rule.delay_s, next(self._order), link, frame))

    def _deliver(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, _, (_, receiver), frame = heapq.heappop(self._waiting)
            try:
                os.write(self._taps[receiver], frame)
            except OSError:
                # the host's queue is full, or its device is down: a switch drops such frames too
                continue


def _frames(tap: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < _MOST_FRAMES:
        try:
            frames.append(os.read(tap, _MOST_BYTES))
        except BlockingIOError:
            break
        except OSError:  # the device is down
            break
    return frames


def _mac(index: int) -> str:
    return f"02:00:00:00:00:{index + 1:02x}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise SwitchError(f"{command[0]}: {error}: install iproute2") from error
    if ended.returncode != 0:
        raise SwitchError(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")


def _remove_stale() -> None:
    """Remove the namespaces of killed processes."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _ip("netns", "delete", path.name)


def available() -> bool:
    """Return whether this machine and user can make a switch."""
    if os.geteuid() != 0 or not TUN.exists():
        return False
    try:
        with Switch(1):
            return True
    except (SwitchError, OSError):
        return False
