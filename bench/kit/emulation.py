"""Emulated hosts on this machine: network namespaces with one or more rate-limited links each.

The first links of all hosts are ports of a bridge (an ideal switch), the second links ports of
another bridge, and so on. Each bridge has a subnet of its own. The bridges are in a separate
namespace: no link, address or route is visible outside, and no packet leaves. A link is shaped at
both ends, so its rate holds in both directions. With a fair queue, a shaper serves a class per
peer, round robin. Without it, the link is a single queue, and TCP decides how flows share it.

Names contain the pid and the start time of the process that created them. So `remove_stale` finds
what a killed run has left behind, and two runs never conflict. Needs root and iproute2.

Ranks that share a GPU of this machine run on it concurrently through CUDA's Multi-Process Service.
Without the service the GPU is time-sliced, and a collective between such ranks waits for time
slices, which never happens on a cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.kit.plan import Plan, Topology
from scripts.children import Late, Spawned, end_all

DEVICE = "eth"
LARGEST = 64
_PREFIX = "bps-bench"
_NET = "10.77"
_NAMESPACES = Path("/run/netns")
_CONTROLS = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_LOCK = Path("/run/bps-bench.lock")

# Least burst in bytes. It holds several packets of 64 KiB (the kernel passes these to a link before
# it cuts them), and the bytes that pass while a timer is late.
_LEAST_BURST = 256 << 10
_BURST_S = 0.001
_QUEUE = 16 << 20  # bytes per peer, never full, so that nothing is dropped
_QUANTUM = 70_000  # bytes: one packet of 64 KiB with its headers


class EmulationError(Exception):
    """Error if the emulated hosts could not be created. The text has the command and its error
    output."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host on which processes run."""

    address: str
    """Address of the first interface."""
    interfaces: tuple[str, ...]
    namespace: str | None = None
    """Network namespace; None: this machine's own network."""

    @property
    def interface(self) -> str:
        """Return the first interface."""
        return self.interfaces[0]

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on this host. The started process becomes
        `command`, so its process id is that of `command`."""
        if self.namespace is None:
            return list(command)
        return ["ip", "netns", "exec", self.namespace, *command]


LOOPBACK = Host(address="127.0.0.1", interfaces=("lo",))


def _run(command: Sequence[str], given: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise EmulationError(f"{command[0]}: {error}: install iproute2") from error
    if done.returncode != 0:
        raise EmulationError(f"`{' '.join(command)}` failed: {done.stderr.strip()}\n{given or ''}")
    return done.stdout


def started_at(pid: int) -> str | None:
    """Return the start time of a process in kernel ticks; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _owner_lives(name: str) -> bool:
    pid, _, started = name.removeprefix(f"{_PREFIX}-").partition("-")
    return pid.isdigit() and started_at(int(pid)) == started.partition("-")[0]


def left_behind() -> list[str]:
    """Return the namespaces of runs that have ended."""
    if not _NAMESPACES.is_dir():
        return []
    ours = sorted(entry.name for entry in _NAMESPACES.glob(f"{_PREFIX}-*"))
    return [name for name in ours if not _owner_lives(name)]


def remove_stale() -> list[str]:
    """Delete hosts and links that killed runs have left. Return their names."""
    with _locked():
        names = left_behind()
        for name in names:
            _run(["ip", "netns", "delete", name])
    return names


class Emulation:
    """Emulated hosts of a topology: a context manager that removes them at its end."""

    _made = 0

    def __init__(self, topology: Topology) -> None:
        if os.geteuid() != 0:
            raise EmulationError("--emulate makes network namespaces: run it as root")
        if not 1 <= topology.emulated_hosts <= LARGEST:
            raise EmulationError(f"--emulate makes 1 to {LARGEST} hosts")
        pid = os.getpid()
        # A process may create several emulations, one after the other, so the name has their
        # number.
        self._stem = f"{_PREFIX}-{pid}-{started_at(pid)}-{Emulation._made}"
        Emulation._made += 1
        self._topology = topology
        self._switch = f"{self._stem}-switch"
        interfaces = tuple(f"{DEVICE}{rail}" for rail in range(topology.nics_per_host))
        self.hosts = [
            Host(address=_address(0, i), interfaces=interfaces, namespace=f"{self._stem}-h{i}")
            for i in range(topology.emulated_hosts)
        ]

    def __enter__(self) -> Emulation:
        remove_stale()
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """Delete every namespace, and with them all links."""
        for name in [self._switch, *(str(host.namespace) for host in self.hosts)]:
            if (_NAMESPACES / name).exists():
                _run(["ip", "netns", "delete", name])

    def _up(self) -> None:
        mtu = str(self._topology.mtu)
        _run(["ip", "netns", "add", self._switch])
        _sysctl(self._switch, _NO_IPV6)
        for rail in range(self._topology.nics_per_host):
            bridge = [f"br{rail}", "type", "bridge", "stp_state", "0", "forward_delay", "0"]
            _run(["ip", "-n", self._switch, "link", "add", *bridge, "mcast_snooping", "0"])
            _run(["ip", "-n", self._switch, "link", "set", f"br{rail}", "mtu", mtu, "up"])
        with _allowed(self._topology.congestion_control):
            for index in range(len(self.hosts)):
                self._add_host(index)

    def _add_host(self, index: int) -> None:
        topology, name = self._topology, str(self.hosts[index].namespace)
        _run(["ip", "netns", "add", name])
        _sysctl(
            name,
            {
                **_NO_IPV6,
                "net.ipv4.tcp_congestion_control": topology.congestion_control,
                # TCP's metrics of one launch must not influence the next.
                "net.ipv4.tcp_no_metrics_save": "1",
                "net.ipv4.tcp_slow_start_after_idle": "0",
            },
        )
        _run(["ip", "-n", name, "link", "set", "lo", "up"])
        for rail in range(topology.nics_per_host):
            self._add_link(index, rail)

    def _add_link(self, index: int, rail: int) -> None:
        name, port = str(self.hosts[index].namespace), port_of(index, rail)
        device = self.hosts[index].interfaces[rail]
        one_queue = ["mtu", str(self._topology.mtu), "numtxqueues", "1", "numrxqueues", "1"]
        link = ["link", "add", port, *one_queue, "type", "veth"]
        peer = ["peer", "name", device, "netns", name, *one_queue, "address", _mac(rail, index)]
        _run(["ip", "-n", self._switch, *link, *peer])
        others = [i for i in range(len(self.hosts)) if i != index]
        address = f"addr add {_address(rail, index)}/24 dev {device}"
        lines = [address, f"link set {device} up", *self._neighbours(rail, others)]
        _run(["ip", "-n", name, "-batch", "-"], "\n".join(lines))
        _run(["ip", "-n", self._switch, "link", "set", port, "master", f"br{rail}", "up"])
        self._shape(name, device, "dst", rail, others)
        self._shape(self._switch, port, "src", rail, others)

    def _neighbours(self, rail: int, others: Sequence[int]) -> list[str]:
        """Return commands for static neighbours, so that nothing is looked up or expires during a
        measurement."""
        return [
            f"neigh replace {_address(rail, i)} lladdr {_mac(rail, i)} "
            f"dev {DEVICE}{rail} nud permanent"
            for i in others
        ]

    def set_link(self, index: int, rail: int, up: bool) -> None:
        """Set a host's link down or up at the host's end."""
        name, device = str(self.hosts[index].namespace), self.hosts[index].interfaces[rail]
        _run(["ip", "-n", name, "link", "set", device, "up" if up else "down"])
        if up:  # the kernel has dropped the neighbours
            others = [i for i in range(len(self.hosts)) if i != index]
            _run(["ip", "-n", name, "-batch", "-"], "\n".join(self._neighbours(rail, others)))

    def cut_link(self, index: int, rail: int, cut: bool) -> None:
        """Cut or restore a host's link at the switch. The host sees that its carrier is lost."""
        state = "down" if cut else "up"
        _run(["ip", "-n", self._switch, "link", "set", port_of(index, rail), state])

    def set_rate(self, index: int, rail: int, bits: int) -> None:
        """Change the rate of a host's link in both directions. Flows then share a single queue."""
        ends = [(str(self.hosts[index].namespace), self.hosts[index].interfaces[rail])]
        ends += [(self._switch, port_of(index, rail))]
        for namespace, device in ends:
            shape = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{bits}bit"]
            _run(["tc", "-n", namespace, *shape, "burst", str(_LEAST_BURST), "limit", str(_QUEUE)])

    def sent_bytes(self, index: int) -> list[int]:
        """Return the bytes that each link of a host has sent, with packet headers."""
        host = self.hosts[index]
        show = ["ip", "-n", str(host.namespace), "-s", "-j", "link", "show", "dev"]
        links = [json.loads(_run([*show, interface]))[0] for interface in host.interfaces]
        return [int(link["stats64"]["tx"]["bytes"]) for link in links]

    def _shape(
        self, namespace: str, device: str, key: str, rail: int, peers: Sequence[int]
    ) -> None:
        """Limit the traffic that leaves through a device. ``key``: address field by which peers are
        told apart."""
        rate = self._topology.link_bits
        burst = max(_LEAST_BURST, int(rate / 8 * _BURST_S))
        if not self._topology.fair_queue or not peers:
            lines = [f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} limit {_QUEUE}"]
        else:
            lines = self._fair_lines(device, key, rail, peers, burst)
        _run(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines))

    def _fair_lines(
        self, device: str, key: str, rail: int, peers: Sequence[int], burst: int
    ) -> list[str]:
        rate = self._topology.link_bits
        share = max(1, rate // len(peers))
        add, tail = f"class add dev {device} parent", f"quantum {_QUANTUM}"
        lines = [
            f"qdisc add dev {device} root handle 1: htb default ff r2q 1000",
            f"{add} 1: classid 1:ff00 htb rate {rate}bit ceil {rate}bit "
            f"burst {burst} cburst {burst} {tail}",
        ]
        for peer in peers:
            mark, address = f"1:{peer + 1:x}", _address(rail, peer)
            lines += [
                f"{add} 1:ff00 classid {mark} htb rate {share}bit ceil {rate}bit "
                f"burst {_QUANTUM} cburst {burst} {tail}",
                f"qdisc add dev {device} parent {mark} bfifo limit {_QUEUE}",
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
                f"match ip {key} {address}/32 flowid {mark}",
            ]
        return lines


_NO_IPV6 = {"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1"}


def _sysctl(namespace: str, values: dict[str, str]) -> None:
    settings = [f"{name}={value}" for name, value in values.items() if _present(name)]
    if not settings:
        return
    _run(["ip", "netns", "exec", namespace, "sysctl", "-q", "-w", *settings])


def _present(setting: str) -> bool:
    """Return whether the kernel has a setting. Without IPv6, for example, there is nothing to
    disable."""
    return not setting.startswith("net.ipv6") or Path("/proc/sys/net/ipv6").is_dir()


@contextmanager
def _locked() -> Iterator[None]:
    """Return a context that only one process of the machine can enter at a time. Otherwise a run
    could delete hosts that another one needs."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _allowed(chosen: str) -> Iterator[None]:
    """Return a context that allows a congestion control to all, because a namespace may choose only
    an allowed one."""
    with _locked():
        allowed = _CONTROLS.read_text().strip()
        added = chosen not in allowed.split()
        if added:
            _write_control(f"{allowed} {chosen}")
        try:
            yield
        finally:
            if added:
                _write_control(allowed)


def _write_control(value: str) -> None:
    try:
        _CONTROLS.write_text(value)
    except OSError as error:
        raise EmulationError(f"congestion control {value.split()[-1]!r}: {error}") from error


def port_of(index: int, rail: int = 0) -> str:
    """Return the name of the switch's end of a host's link."""
    return f"port{index}" if rail == 0 else f"port{index}-{rail}"


def _address(rail: int, index: int) -> str:
    return f"{_NET}.{rail}.{index + 1}"


def _mac(rail: int, index: int) -> str:
    return f"02:00:5e:00:{rail:02x}:{index + 1:02x}"


_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_S, _QUIT_S = 10.0, 10.0


@contextmanager
def together(plan: Plan) -> Iterator[None]:
    """Return a context in which ranks of the plan that share a GPU run on it concurrently, if this
    machine has the service. Logs to stderr. Does nothing if the user has set
    ``CUDA_MPS_PIPE_DIRECTORY``.
    """
    sharing = _sharing(plan)
    if not sharing:
        yield
    elif _PIPES in os.environ:
        _tell(f"{sharing}, by the service at {_PIPES}={os.environ[_PIPES]}")
        yield
    elif shutil.which(_PROGRAM) is None:
        _tell(f"{sharing}, one after the other: {_PROGRAM} is not on PATH")
        yield
    else:
        # The folder's path is short, because the length of a socket's path is limited.
        with tempfile.TemporaryDirectory(prefix="bps-mps-", dir="/tmp") as folder:
            yield from _served(Path(folder), sharing)


def _sharing(plan: Plan) -> str:
    """Describe how many ranks share which GPUs. Empty if each rank has a GPU of its own."""
    if not plan.shares_gpus():
        return ""
    from scripts.children import count_gpus

    return f"{plan.topology.workers} ranks share {count_gpus()} GPUs"


def _served(folder: Path, sharing: str) -> Iterator[None]:
    variables = {_PIPES: str(folder), _LOGS: str(folder)}
    service = Spawned("mps", [_PROGRAM, "-f"], {**os.environ, **variables}, folder)
    try:
        if _answers(service, variables):
            _tell(f"{sharing}, at once: by the Multi-Process Service")
            os.environ |= variables
        else:
            why = f"{_PROGRAM} does not serve: {service.text.strip()}"
            _tell(f"{sharing}, one after the other: {why}")
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        if service.running and _ask("quit", variables):
            with suppress(Late):
                service.wait(_QUIT_S)
        end_all([service], _QUIT_S)


def _answers(service: Spawned, variables: dict[str, str]) -> bool:
    deadline = time.monotonic() + _START_S
    while service.running and time.monotonic() < deadline:
        if _ask("get_server_list", variables):
            return True
        time.sleep(0.1)
    return False


def _ask(command: str, variables: dict[str, str]) -> bool:
    """Send a command to the service. Return whether it has succeeded."""
    try:
        done = subprocess.run(
            [_PROGRAM],
            input=f"{command}\n",
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_QUIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


@contextmanager
def hosts_of(plan: Plan) -> Iterator[Sequence[Host]]:
    """Return a context with the hosts of a plan's topology. Their GPUs may be shared by ranks."""
    with together(plan):
        if not plan.topology.emulated_hosts:
            yield [LOOPBACK]
            return
        with Emulation(plan.topology) as emulation:
            yield emulation.hosts
