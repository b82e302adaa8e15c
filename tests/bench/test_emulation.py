"""Emulated hosts: they reach each other, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation, EmulationError, Host, left_behind, remove_stale
from bench.kit.plan import Topology

pytestmark = pytest.mark.requires("root")

TOPOLOGY = Topology(workers=2, servers=1, emulated_hosts=3, link_bits=100_000_000)
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")

HOLD = """
import time
from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
with Emulation(Topology(workers=1, servers=1, emulated_hosts=2, link_bits=10**8)) as emulation:
    print(*(host.namespace for host in emulation.hosts), flush=True)
    time.sleep(120)
"""

REPEAT = """
from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
for _ in range(6):
    with Emulation(Topology(workers=1, servers=1, emulated_hosts=2, link_bits=10**8)):
        pass
"""


def on(host: Host, *command: str) -> str:
    return subprocess.run(
        host.command(command), capture_output=True, text=True, check=True, timeout=120
    ).stdout


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def of_process(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"bps-bench-{pid}-")]


@pytest.mark.parametrize("fair", [True, False])
def test_hosts_reach_each_other_and_nothing_is_left(fair: bool) -> None:
    allowed, links = ALLOWED.read_text(), sorted(os.listdir("/sys/class/net"))
    topology = Topology(**{**TOPOLOGY.__dict__, "fair_queue": fair})
    greet = (
        "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); print(flush=True); "
        "c, a = s.accept(); print(a[0], c.recv(5).decode())"
    )
    call = (
        "import socket, sys; "
        "socket.create_connection((sys.argv[1], 7000), timeout=60).sendall(b'hello')"
    )
    with Emulation(topology) as made:
        one, two, _ = made.hosts
        assert sorted(os.listdir("/sys/class/net")) == links
        command = two.command([sys.executable, "-c", greet, two.address])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
            assert listening.stdout is not None
            listening.stdout.readline()
            on(one, sys.executable, "-c", call, two.address)
            output, _ = listening.communicate(timeout=120)
        assert output == f"{one.address} hello\n"
        shaper = on(one, "tc", *(("class",) if fair else ("qdisc",)), "show", "dev", one.interface)
        assert ("htb 1:ff00 root rate 100Mbit" if fair else "tbf") in shaper
        control = on(one, "sysctl", "-n", "net.ipv4.tcp_congestion_control")
        assert control.strip() == "cubic"
        assert len(of_process(os.getpid())) == 4
    assert of_process(os.getpid()) == []
    assert ALLOWED.read_text() == allowed


def test_hosts_of_two_links_have_two_subnets() -> None:
    topology = Topology(**{**TOPOLOGY.__dict__, "nics_per_host": 2})
    with Emulation(topology) as made:
        one, two, _ = made.hosts
        assert one.interfaces == ("eth0", "eth1")
        for rail, interface in enumerate(one.interfaces):
            address = two.address.replace("77.0.", f"77.{rail}.")
            assert f"dev {interface} src" in on(one, "ip", "route", "get", address)
            assert "htb 1:ff00 root rate 100Mbit" in on(
                one, "tc", "class", "show", "dev", interface
            )
        made.set_link(0, 1, up=False)
        assert "NO-CARRIER" not in on(two, "ip", "link", "show", "eth1")
        assert "state DOWN" in on(one, "ip", "link", "show", "eth1")
        made.set_link(0, 1, up=True)
        made.cut_link(1, 1, cut=True)
        assert "NO-CARRIER" in on(two, "ip", "link", "show", "eth1")
        assert "state UP" in on(one, "ip", "link", "show", "eth1")
    assert of_process(os.getpid()) == []


def test_two_at_once_do_not_meet() -> None:
    with Emulation(TOPOLOGY) as one, Emulation(TOPOLOGY) as two:
        names = {host.namespace for host in [*one.hosts, *two.hosts]}
        assert len(names) == 6
    assert of_process(os.getpid()) == []


def test_processes_that_make_hosts_at_once_do_not_disturb_each_other() -> None:
    """What a machine allows is changed for a moment: one must not take it back from another."""
    allowed = ALLOWED.read_text()
    made = [subprocess.Popen([sys.executable, "-c", REPEAT]) for _ in range(3)]
    assert [process.wait(120) for process in made] == [0, 0, 0]
    assert ALLOWED.read_text() == allowed


def test_nothing_is_left_when_the_body_or_the_making_fails() -> None:
    with pytest.raises(ZeroDivisionError), Emulation(TOPOLOGY):
        raise ZeroDivisionError
    bad = Topology(**{**TOPOLOGY.__dict__, "congestion_control": "none-such"})
    with pytest.raises(EmulationError, match="none-such"), Emulation(bad):
        pass
    assert of_process(os.getpid()) == []


def test_what_a_killed_run_left_is_recognised_and_removed() -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        made = holder.stdout.readline().split()
        assert len(made) == 2
        remove_stale()  # it is not stale while its owner lives
        assert set(made) <= set(namespaces())
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    assert set(made) <= set(left_behind())
    assert set(made) <= set(remove_stale())
    assert of_process(holder.pid) == []
