"""The switch itself: what its rules do to packets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.netkit.switch import Rule, Switch

SILENCE_S = 1.0
HEADERS = 28
"""Of IP and UDP."""

pytestmark = pytest.mark.requires("tap")


@pytest.fixture
def switch() -> Iterator[Switch]:
    with Switch(3) as made:
        yield made


def ping(switch: Switch, receiver: int, *, count: int = 1, size: int = 84) -> list[float]:
    """So many packets of that size from host 0 at once: the time of each that comes back, in s."""
    with (
        switch.socket_on(0, socket.SOCK_DGRAM) as near,
        switch.socket_on(receiver, socket.SOCK_DGRAM) as far,
    ):
        far.bind((switch.hosts[receiver].address, 0))
        near.connect(far.getsockname())
        begin = time.monotonic()
        for number in range(count):
            near.send(number.to_bytes(4) + bytes(size - HEADERS - 4))
        for end in near, far:
            end.settimeout(SILENCE_S)
        times: list[float] = []
        try:
            while len(times) < count:
                packet, sender = far.recvfrom(65536)
                assert len(packet) == size - HEADERS
                far.sendto(packet[:4], sender)
                near.recv(65536)
                times.append(time.monotonic() - begin)
        except TimeoutError:
            pass
        return times


def test_large_packets_are_dropped_one_way(switch: Switch) -> None:
    switch.set_rule(0, 1, Rule(largest=600))
    assert len(ping(switch, 1, size=600)) == 1
    assert ping(switch, 1, size=601) == []
    assert switch.passed(0, 1).dropped == 1
    assert len(ping(switch, 2, size=601)) == 1


def test_delay(switch: Switch) -> None:
    ping(switch, 1)
    switch.set_rule(0, 1, Rule(delay_s=0.2))
    switch.set_rule(1, 0, Rule(delay_s=0.1))
    (taken,) = ping(switch, 1)
    assert taken >= 0.3


def test_loss(switch: Switch) -> None:
    ping(switch, 1)
    switch.set_rule(0, 1, Rule(loss=0.5))
    came = len(ping(switch, 1, count=40))
    assert 0 < came < 40
    # The kernel may ask for an address meanwhile, and lose that frame as well.
    assert switch.passed(0, 1).dropped >= 40 - came


def test_rate(switch: Switch) -> None:
    """Ten packets of 1,000 bytes at once, at 10 kB/s: the queue holds three of them."""
    ping(switch, 1)
    switch.set_rule(0, 1, Rule(bytes_per_s=10_000, queue_bytes=3_000))
    times = ping(switch, 1, count=10, size=1000)
    assert len(times) >= 3
    assert all(taken >= 0.1 * (number + 1) for number, taken in enumerate(times))
    assert switch.passed(0, 1).dropped == 10 - len(times)
