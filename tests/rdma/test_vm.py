"""A guest, two guests with a cable, and scripts/check_rdma.sh, which finds faults of a machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.children import captured
from tests.rdma.transports import REPOSITORY
from tests.rdma.vm.guest import Guest, Link, compiled, missing_tool


def run(command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def run_in_vm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tests/rdma/run_in_vm.py"), *arguments]
    return run(command, 200.0)


@pytest.mark.thorough
def test_two_guests_on_a_cable(tmp_path: Path) -> None:
    """Two guests are two hosts for RDMA. Their output, files and exit status come back."""
    lacking = missing_tool()
    if lacking is not None:
        pytest.skip(lacking)
    script = tmp_path / "both.sh"
    script.write_text(
        "echo $GUEST >$OUT/number\n"
        "command=(ib_write_bw -R -s 65536 -n 20)\n"
        'if [ $GUEST = 1 ]; then exec timeout 60 "${command[@]}"; fi\n'
        "for try in {1..100}; do\n"
        '  timeout 60 "${command[@]}" 10.77.0.1 && exit 7\n'
        "  sleep 0.5\n"
        "done\n"
    )
    out = tmp_path / "out"
    command = ["--guests", "2", "--out", str(out), "--timeout", "120", "--", "bash", str(script)]
    ended = run_in_vm(*command)
    assert ended.returncode == 7, ended.stdout + ended.stderr
    assert "BW average" in ended.stdout
    assert [(out / f"guest{n}/number").read_text().strip() for n in (1, 2)] == ["1", "2"]


# A job over RDMA between two machines: two guests with a cable.


LIMIT_S = 580.0


@pytest.fixture
def guests(run_dir: Path) -> Iterator[list[Guest]]:
    lacking = missing_tool()
    if lacking is not None:
        pytest.skip(lacking)
    program = str(REPOSITORY / "tests/rdma/two_hosts.py")
    bytecode = compiled(("byteps.torch",))
    with ExitStack() as stack:
        started = []
        for number in (1, 2):
            folder = run_dir / f"guest{number}"
            command = [sys.executable, program, str(folder), str(number)]
            paths = (run_dir / "cable", run_dir / "second-cable")
            cables = [Link(path=path, listens=number == 1) for path in paths]
            env = {"PATH": os.environ["PATH"], **bytecode}
            guest = Guest(folder, command, number=number, links=cables, memory="3G", env=env)
            started.append(stack.enter_context(guest).plugged_in(cables))
        yield started


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_jobs_between_machines(guests: list[Guest]) -> None:
    """Three jobs end well, although one of them loses a path. Then the second machine dies, and all
    processes of the first one report it in time."""
    deadline = time.monotonic() + LIMIT_S
    first, second = guests
    status = first.wait(max(1.0, deadline - time.monotonic()))
    assert status == 0, "\n".join(guest.last_words(60) for guest in guests)
    while second.running and time.monotonic() < deadline:
        time.sleep(0.1)
    assert second.status is None, second.last_words()
    folder = first.folder / "job9003"
    lost = re.compile(r"(worker 1|server [01])\b.*was lost: ")
    error = (folder / "worker.log").read_text().strip().splitlines()[-1]
    assert "BytePSError" in error, error
    assert lost.search(error), error
    for node in ("scheduler", "server"):
        assert lost.search((folder / f"{node}.log").read_text())


# scripts/check_rdma.sh reports each fault with the command that fixes it.


SCRIPT = str(REPOSITORY / "scripts/check_rdma.sh")
V2 = "RoCE v2"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"

Checked = subprocess.CompletedProcess[str]


def check(
    *flags: str, prefix: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Checked:
    """Run the script with none of this process's settings."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "CHECK_"))
    }
    return captured([*prefix, SCRIPT, *flags], 100, env={**clean, **(env or {})})


def wrongs(checked: Checked) -> list[str]:
    """Get the findings, except about the build of this machine's byteps-server."""
    lines = checked.stdout.splitlines()
    return [line for line in lines if line.startswith("WRONG") and "byteps-server" not in line]


class FakeMachine:
    """Files like a kernel's for a healthy RoCE NIC; a test then breaks something."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for module in ("ib_core", "ib_uverbs", "rdma_ucm"):
            (root / "sys/module" / module).mkdir(parents=True)
        self.write("proc/self/status", "CapEff:\t000001ffffffffff")
        self.add_device("mlx5_0", "uverbs0", "eth7")
        self.write("dev/infiniband/rdma_cm", "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add_device(self, name: str, verbs: str, interface: str) -> None:
        self.write(f"sys/class/infiniband_verbs/{verbs}/ibdev", name)
        self.write(f"dev/infiniband/{verbs}", "")
        self.write(f"sys/class/infiniband/{name}/device/numa_node", "0")
        port = f"sys/class/infiniband/{name}/ports/1"
        self.write(f"{port}/state", "4: ACTIVE")
        self.write(f"{port}/phys_state", "5: LinkUp")
        self.write(f"{port}/link_layer", "Ethernet")
        self.write(f"{port}/rate", "100 Gb/sec (4X EDR)")
        for index, gid in enumerate((LINK_LOCAL, MAPPED, MAPPED)):
            self.write(f"{port}/gids/{index}", gid)
            self.write(f"{port}/gid_attrs/types/{index}", "IB/RoCE v1" if index == 1 else V2)
            self.write(f"{port}/gid_attrs/ndevs/{index}", interface)
        self.write(f"sys/class/net/{interface}/mtu", "9000")

    def check(self, *flags: str, **env: str) -> Checked:
        return check(*flags, env={"CHECK_RDMA_ROOT": str(self.root), **env})


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


PORT = "sys/class/infiniband/mlx5_0/ports/1"


def test_good_machine(machine: FakeMachine) -> None:
    checked = machine.check()
    assert not wrongs(checked), checked.stdout
    assert "port 1 is active: Ethernet, 100 Gb/sec" in checked.stdout
    assert "GIDs of RoCE v2 for IPv4: 2 \n" in checked.stdout
    assert "RDMA packets hold 4096 bytes" in checked.stdout


def break_gids(machine: FakeMachine) -> None:
    machine.write(f"{PORT}/gids/2", LINK_LOCAL)


def break_port(machine: FakeMachine) -> None:
    machine.write(f"{PORT}/state", "1: DOWN")


def no_manager(machine: FakeMachine) -> None:
    machine.write(f"{PORT}/link_layer", "InfiniBand")
    machine.write(f"{PORT}/state", "2: INIT")


def no_files(machine: FakeMachine) -> None:
    shutil.rmtree(machine.root / "dev/infiniband")


def no_modules(machine: FakeMachine) -> None:
    shutil.rmtree(machine.root / "sys/module/rdma_ucm")


def no_device(machine: FakeMachine) -> None:
    shutil.rmtree(machine.root / "sys/class/infiniband")


def nothing(machine: FakeMachine) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "env", "says", "mends"),
    [
        (break_gids, {}, "no RoCE v2 GID", "ip addr add ADDRESS/24 dev eth7"),
        (break_port, {}, "port 1 is not active", "ip link set eth7 up"),
        (no_manager, {}, "waits for a subnet manager", "opensm"),
        (no_files, {}, "/dev/infiniband/uverbs0 is not there", "--device=/dev/infiniband"),
        (no_modules, {}, "not loaded: rdma_ucm", "modprobe -a rdma_ucm"),
        (no_device, {}, "no RDMA device", "rdma link add rxe0"),
        (nothing, {"DMLC_INTERFACE": "eth1"}, "eth1 has no RDMA device", "DMLC_INTERFACE=eth7"),
        (nothing, {"BYTEPS_RDMA_DEVICE": "mlx4_0"}, "no RDMA device 'mlx4_0'", "DEVICE=mlx5_0"),
        (nothing, {"BYTEPS_RDMA_DEVICE": ":2"}, "has no port 2", "BYTEPS_RDMA_DEVICE=mlx5_0:1"),
        (nothing, {"BYTEPS_RDMA_DEVICE": "::1"}, "GID 1 of BYTEPS_RDMA_DEVICE is", "one of: 2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_wrong_is_named(
    machine: FakeMachine,
    spoil: Callable[[FakeMachine], None],
    env: dict[str, str],
    says: str,
    mends: str,
) -> None:
    spoil(machine)
    checked = machine.check(**env)
    assert checked.returncode == 1
    assert any(says in line for line in wrongs(checked)), checked.stdout
    assert any("do: " in line and mends in line for line in checked.stdout.splitlines())


def test_small_mtu_is_a_warning(machine: FakeMachine) -> None:
    machine.write("sys/class/net/eth7/mtu", "1500")
    checked = machine.check()
    assert not wrongs(checked), checked.stdout
    assert "MTU of eth7 is 1500, so that RDMA packets hold 1024 bytes" in checked.stdout
    assert "ip link set eth7 mtu 9000" in checked.stdout
    report = machine.check(BYTEPS_RDMA_MTU="4096")
    assert "BYTEPS_RDMA_MTU=4096 is more than" in wrongs(report)[0]


def test_device_of_the_interface_is_taken(machine: FakeMachine) -> None:
    machine.add_device("mlx5_1", "uverbs1", "eth8")
    assert "device mlx5_1, interface eth8" in machine.check("--interface", "eth8").stdout
    assert "device mlx5_0, interface eth7" in machine.check("--device", "mlx5_0").stdout
    both = machine.check("--interface", "eth8", "--device", "mlx5_0")
    assert "interface eth8 belongs to mlx5_1, not to mlx5_0" in wrongs(both)[0]
    assert "several devices" in machine.check().stdout


def test_low_limit_on_locked_memory(machine: FakeMachine) -> None:
    machine.write("proc/self/status", "CapEff:\t0000000000000000")
    limited = ("bash", "-c", 'ulimit -l 64 && exec "$@"', "-")
    checked = check(prefix=limited, env={"CHECK_RDMA_ROOT": str(machine.root)})
    assert "may lock 64 KiB of memory (ulimit -l)" in wrongs(checked)[0]
    assert "memlock unlimited" in checked.stdout


@pytest.mark.parametrize("flags", [["--frobnicate"], ["--device", "mlx5_0:x"], ["--client"]])
def test_bad_use(flags: list[str]) -> None:
    checked = check(*flags)
    assert checked.returncode == 2
    assert "check_rdma.sh" in checked.stderr
    assert not checked.stdout


def test_help() -> None:
    checked = check("-h")
    assert checked.returncode == 0
    assert checked.stdout.startswith("Usage: check_rdma.sh")


@pytest.mark.on_rdma
def test_guest_is_good() -> None:
    checked = check("--node-host", "10.77.0.1")
    assert checked.returncode == 0, checked.stdout
    assert "device rxe0" in checked.stdout
    assert "is soft-RoCE" in checked.stdout


@pytest.mark.on_rdma
def test_guest_with_little_locked_memory() -> None:
    """A user without the capability to lock any amount of memory."""
    less = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock")
    poor = (*less, "bash", "-c", 'ulimit -l 64 && exec "$@"', "-")
    checked = check("--device", "rxe0", prefix=poor)
    assert checked.returncode == 1, checked.stdout
    assert "may lock 64 KiB of memory (ulimit -l)" in wrongs(checked)[0]


@pytest.mark.on_rdma
def test_guest_under_another_interface() -> None:
    checked = check("--interface", "lo")
    assert checked.returncode == 1, checked.stdout
    assert "interface lo has no RDMA device" in wrongs(checked)[0]


@pytest.mark.on_rdma
def test_link_is_measured(run_dir: Path) -> None:
    """Both ends of the measured link are on the same device."""
    with (run_dir / "server.log").open("w") as log:
        server = subprocess.Popen([SCRIPT, "--device", "rxe0", "--server"], stdout=log)
    try:
        deadline = time.monotonic() + 90
        while True:
            client = check("--device", "rxe0", "--client", "10.77.0.1")
            if client.returncode == 0 or time.monotonic() > deadline:
                break
            assert server.poll() is None
        assert client.returncode == 0, client.stdout
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
    for said in (client.stdout, (run_dir / "server.log").read_text()):
        assert "Gbit/s (ib_write_bw, 1 MiB)" in said
