"""A switch between hosts of this machine, whose links delay or drop what a rule says.

Each host is a network namespace with one TAP device, `eth0`. This process reads the frames that a
host sends and writes them to the hosts that they are for, as a switch does; so it needs nothing of
the kernel but TAP devices (`netem` is not everywhere). It carries some 10,000 frames a second.

    with Switch(2) as switch:
        switch.set_rule(0, 1, Rule(largest=600))    # what host 0 sends to host 1
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
"""Of Ethernet: what a frame has in addition to the packet."""
_MOST_BYTES = 65536
_MOST_FRAMES = 64
"""Read from one host before the others have their turn."""


class SwitchError(Exception):
    """It could not be made; the text has the command and its complaint."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes of the packets that one host sends to another one."""

    largest: int | None = None
    """Bytes of a packet with its IP header; larger ones are dropped, and nobody is told."""
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    """The link's rate; what does not fit into the queue is dropped."""
    queue_bytes: int = 3_000
    """What may wait for the link, where it has a rate."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a process runs."""

    address: str
    namespace: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, to be run on this host. The process that it starts is the command's own."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass
class Passed:
    """Frames of one direction."""

    carried: int = 0


class Switch:
    """A context manager; `hosts` are there while it is open."""

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
        """When a link with a rate has sent what it has."""
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
        """Run a command on that host, and wait for it. Raises SwitchError."""
        _run(*self.hosts[host].command(command))

    def set_rule(self, sender: int, receiver: int, rule: Rule) -> None:
        """For what `sender` sends to `receiver`, by their indices, from now on."""
        with self._lock:
            self._rules[sender, receiver] = rule

    def passed(self, sender: int, receiver: int) -> Passed:
        """What has become of the frames so far."""
        with self._lock:
            counted = self._passed.get((sender, receiver), Passed())
            return Passed(carried=counted.carried)

    def _add_host(self, index: int) -> int:
        name = self.hosts[index].namespace
        _ip("netns", "add", name)
        tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The device goes with the descriptor, whatever becomes of this process.
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
                        # Broadcasts, and what nobody has said yet where it belongs.
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
                continue  # its queue is full, or it is down: a switch drops that, too


def _frames(tap: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < _MOST_FRAMES:
        try:
            found.append(os.read(tap, _MOST_BYTES))
        except BlockingIOError:
            break
        except OSError:  # it is down
            break
    return found


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
    """What processes that were killed have left."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _ip("netns", "delete", path.name)


def available() -> bool:
    """Whether this machine and this user can have one."""
    if os.geteuid() != 0 or not TUN.exists():
        return False
    try:
        with Switch(1):
            return True
    except (SwitchError, OSError):
        return False
