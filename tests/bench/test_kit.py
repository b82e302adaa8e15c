"""What benchmarks share: emulated hosts, the kernel's figures, MPS, the verification of sums."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.kit import record
from bench.kit.emulation import Emulation, EmulationError, Host, left_behind, remove_stale, together
from bench.kit.pattern import PERIOD, Pattern
from bench.kit.plan import DTYPE_BYTES, Case, Plan, Topology
from bench.pushpull.backends import add, decode, encode
from bench.pushpull.rank import Measured, measure
from scripts import children
from tests.few_bits import BLOCK, MOST, rounded

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


@pytest.mark.requires("root")
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


def test_one_nic_is_compared_where_hosts_have_several() -> None:
    case = Case(size=4096, dtype="float32", iters=1, warmup=0)
    with pytest.raises(ValueError, match="add --nics-per-host"):
        Plan(cases=(case,), topology=TOPOLOGY, backends=("byteps", "byteps-one-nic"))


@pytest.mark.requires("root")
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


@pytest.mark.requires("root")
def test_two_at_once_do_not_meet() -> None:
    with Emulation(TOPOLOGY) as one, Emulation(TOPOLOGY) as two:
        names = {host.namespace for host in [*one.hosts, *two.hosts]}
        assert len(names) == 6
    assert of_process(os.getpid()) == []


@pytest.mark.requires("root")
def test_processes_that_make_hosts_at_once_do_not_disturb_each_other() -> None:
    """What a machine allows is changed for a moment: one must not take it back from another."""
    allowed = ALLOWED.read_text()
    made = [subprocess.Popen([sys.executable, "-c", REPEAT]) for _ in range(3)]
    assert [process.wait(120) for process in made] == [0, 0, 0]
    assert ALLOWED.read_text() == allowed


@pytest.mark.requires("root")
def test_nothing_is_left_when_the_body_or_the_making_fails() -> None:
    with pytest.raises(ZeroDivisionError), Emulation(TOPOLOGY):
        raise ZeroDivisionError
    bad = Topology(**{**TOPOLOGY.__dict__, "congestion_control": "none-such"})
    with pytest.raises(EmulationError, match="none-such"), Emulation(bad):
        pass
    assert of_process(os.getpid()) == []


@pytest.mark.requires("root")
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


# CPU time and memory, as the kernel counts them.


def test_another_process_clock_counts_what_it_used() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        first = record.process_cpu_ns(child.pid)
        assert first >= 0.3e9
        assert record.total_cpu_ns([child.pid, child.pid]) >= 2 * first
        child.communicate(b"\n")


def test_busy_is_all_but_idle() -> None:
    one = record.parse_ticks("cpu  10 0 5 80 5 0 0 0 0 0\ncpu0 1 1 1 1\n")
    other = record.parse_ticks("cpu  40 0 15 130 15 0 0 0 0 0\n")
    assert (other - one).fraction == 0.4
    assert record.Ticks(busy=0, all=0).fraction == 0.0


def test_memory_of_its_own() -> None:
    before = record.resident_bytes(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 32)
    assert record.resident_bytes(os.getpid()) - before > 24 << 20
    assert len(held) == 32 << 20


# bench/kit/emulation.py, with a service that the test plays.


SERVICE = """#!/bin/sh
# As the real one: -f serves until it is told to quit; without a word it takes a command.
state="$CUDA_MPS_PIPE_DIRECTORY/state"
if [ "$1" = -f ]; then
  {start}
  echo $$ > "$state"
  while [ "$(cat "$state")" != quit ]; do sleep 0.05; done
  echo ended >> "{told}"
else
  read -r command
  [ -e "$state" ] || exit 1
  echo "$command" >> "{told}"
  if [ "$command" = quit ]; then echo quit > "$state"; fi
fi
"""


def plan_of(workers: int, device: str = "cuda") -> Plan:
    case = Case(size=1024, dtype="float32", iters=1, warmup=0)
    topology = Topology(workers=workers, servers=1)
    return Plan(cases=(case,), topology=topology, backends=("byteps",), device=device)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a service on PATH writes what it is told; the machine has two GPUs."""
    return install(tmp_path, monkeypatch)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, start: str = ":") -> Path:
    told = folder / "told"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(SERVICE.format(told=told, start=start))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(children, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return told


def test_ranks_that_share_gpus_have_the_service_while_they_need_it(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with together(plan_of(4)):
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "state").exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not folder.exists()
    assert told.read_text().split() == ["get_server_list", "quit", "ended"]
    assert "4 ranks share 2 GPUs, at once" in capsys.readouterr().err


def test_it_ends_with_an_error_too(told: Path) -> None:
    with pytest.raises(RuntimeError, match="a rank failed"), together(plan_of(4)):
        raise RuntimeError("a rank failed")
    assert told.read_text().split()[-1] == "ended"


def test_the_users_own_service_is_left_alone(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    with together(plan_of(4)):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps" and not told.exists()


def test_ranks_take_turns_where_the_service_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, start="echo no permission; exit 1")
    with together(plan_of(4)):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    said = capsys.readouterr().err
    assert "4 ranks share 2 GPUs, one after the other" in said and "no permission" in said


# Every result is verified; these are wrong ones, and the verification must find them.


RANKS = 8


def patterns(size: int, dtype: str) -> list[Pattern]:
    return [
        Pattern(rank=rank, ranks=RANKS, size=size, dtype=dtype, device="cpu")
        for rank in range(RANKS)
    ]


def filled(pattern: Pattern, count: int, dtype: str, round_: int, offset: int = 0) -> torch.Tensor:
    tensor = torch.empty(count, dtype=getattr(torch, dtype))
    pattern.fill(tensor, round_, offset)
    return tensor


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("count", [1, 1000, PERIOD, 5 * PERIOD + 17])
def test_a_sum_in_the_element_type_is_exact(dtype: str, count: int) -> None:
    everyone = patterns(count, dtype)
    total = filled(everyone[0], count, dtype, 3)
    for pattern in everyone[1:]:
        total += filled(pattern, count, dtype, 3)
    assert everyone[0].count_wrong(total, 3) == 0


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 129, 3 * PERIOD + 17])
def test_a_sum_in_blocks_is_exact(form: str, ranks: int, count: int) -> None:
    everyone = [
        Pattern(rank=rank, ranks=ranks, size=count, dtype="float32", device="cpu", form=form)
        for rank in range(ranks)
    ]
    inputs = [filled(pattern, count, "float32", 5) for pattern in everyone]
    if form in MOST:
        total = rounded(torch.stack([rounded(one, form) for one in inputs]).sum(0), form)
    elif form == "fp8":
        padding = (0, -count % BLOCK)
        sent = [encode(torch.nn.functional.pad(one, padding)) for one in inputs]
        total = decode(add(torch.cat(sent), ranks))[:count].clone()
    else:
        total = torch.stack(inputs).sum(0).to(torch.bfloat16).float()
    wrong = total.clone()
    assert everyone[0].count_wrong(total, 5) == 0
    if count > 1:
        wrong[[0, 1]] += 1
        assert everyone[0].count_wrong(wrong, 5) == 2


def summed(count: int, round_: int = 3, offset: int = 0) -> torch.Tensor:
    inputs = [filled(p, count, "float32", round_, offset) for p in patterns(4096, "float32")]
    return torch.stack(inputs).sum(0)


def test_one_changed_element_is_found() -> None:
    total = summed(3 * PERIOD)
    total[2 * PERIOD + 5] += 1
    assert patterns(4096, "float32")[0].count_wrong(total, 3) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: summed(4 * PERIOD, round_=2),
        lambda: summed(4 * PERIOD).roll(1),
        lambda: summed(4 * PERIOD, offset=1024),
        lambda: summed(4 * PERIOD) - filled(patterns(4096, "float32")[5], 4 * PERIOD, "float32", 3),
        lambda: filled(patterns(4096, "float32")[0], 4 * PERIOD, "float32", 3),
        lambda: torch.zeros(4 * PERIOD),
    ],
    ids=["stale round", "shifted", "another tensor", "a rank is missing", "not summed", "zeros"],
)
def test_what_is_no_sum_of_this_round_is_found(wrong: Callable[[], torch.Tensor]) -> None:
    found = patterns(4096, "float32")[0].count_wrong(wrong(), 3)
    assert found > 2 * PERIOD


def test_exchanged_partitions_are_found() -> None:
    total = summed(4 * 4096)
    total[:4096], total[4096:8192] = total[4096:8192].clone(), total[:4096].clone()
    assert patterns(4096, "float32")[0].count_wrong(total, 3) > 4096


def test_ranks_that_the_type_cannot_count_are_refused() -> None:
    pattern = Pattern(rank=0, ranks=300, size=64, dtype="bfloat16", device="cpu")
    with pytest.raises(ValueError, match="300 ranks cannot be verified in bfloat16"):
        pattern.fill(torch.empty(32, dtype=torch.bfloat16), 0)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summing:
    """A backend for one rank, whose input is the sum already."""

    sums = True

    def __init__(self, spoil: Callable[[int, torch.Tensor], None]) -> None:
        self._spoil = spoil
        self._rounds = 0

    def form(self, wire: str) -> str:
        return wire

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        for tensor in tensors:
            self._spoil(self._rounds, tensor)
        self._rounds += 1

    def close(self) -> None:
        pass


def outcome(spoil: Callable[[int, torch.Tensor], None]) -> Measured:
    case = Case(size=4096, dtype="float32", tensors=2, iters=3, warmup=1)
    found = measure(case, Summing(spoil), device="cpu", one_clock=True, node_pids=[], label="x")
    assert found is not None
    return found


def test_a_measurement_counts_wrong_elements(one_rank: None) -> None:
    assert outcome(lambda _, tensor: None).wrong == 0

    def spoil_round_two(round_: int, tensor: torch.Tensor) -> None:
        if round_ == 2:
            tensor[7] += 1

    assert outcome(spoil_round_two).wrong == 2  # one in each of the two tensors

    def spoil_the_warm_up(round_: int, tensor: torch.Tensor) -> None:
        if round_ == 0:
            tensor[7] = float("nan")

    found = outcome(spoil_the_warm_up)
    assert found.wrong == 2
    assert len(found.samples_s) == 3
