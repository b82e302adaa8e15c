"""Embedded mode: decisions before any process starts, and the end of started processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from byteps.forecast.machines import CORES_PER_GPU, Machines
from byteps.launcher import addresses, child, embedded, embedded_nodes, host_servers
from byteps.launcher.child import Child, find_executable
from byteps.launcher.embedded_nodes import EmbeddedNodes
from byteps.launcher.host_servers import HostServers
from byteps.launcher.places import LocalPlace
from byteps.launcher.start import Start, demand_one_secret, secret_mark

LIMIT_S = 60.0
"""Limit in seconds, against hangs."""
CLUSTERS_OWN = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
Add = Callable[[str], Child]
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_own_place_on_the_host_comes_first() -> None:
    env = {**TORCHRUN, "BYTEPS_LOCAL_RANK": "3", "BYTEPS_LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
    own = LocalPlace.own(env, "host")
    assert (own.local, own.is_named) == ((3, 4), True)
    assert LocalPlace.own(TORCHRUN, "host") == LocalPlace(host="host", local=(1, 2), is_named=False)
    assert LocalPlace.own({"LOCAL_RANK": "1"}, "host").local is None


@pytest.mark.parametrize(
    ("rank", "wanted"),
    [(None, "needs RANK: start it with torchrun"), ("0", "init_process_group.*DMLC_PS_ROOT_URI")],
)
def test_a_worker_of_several_needs_a_rank_and_a_store(
    rank: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*CLUSTERS_OWN, "RANK", "DMLC_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(RuntimeError, match=wanted):
        embedded.start_if_needed(0, 4)


@pytest.mark.parametrize("value", ["0", "2x", ""])
def test_bad_number_of_servers(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLUSTERS_OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BYTEPS_EMBEDDED_SERVERS", value)
    with pytest.raises(RuntimeError, match=f"BYTEPS_EMBEDDED_SERVERS=.?{value}"):
        embedded.start_if_needed(0, 1)
    assert not embedded.is_running()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"DMLC_NUM_SERVER": "4"}, "DMLC_PS_ROOT_URI is unset, but DMLC_NUM_SERVER=4 is set"),
        ({"DMLC_PS_ROOT_PORT": "9000"}, "DMLC_PS_ROOT_PORT=9000 is set"),
        ({"BYTEPS_REPLICA": "0/2"}, "DMLC_PS_ROOT_URI is unset, but BYTEPS_REPLICA=0/2 is set"),
        (
            {"DMLC_PS_ROOT_URI": "", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "4"},
            "is empty, but DMLC_PS_ROOT_PORT=9000 and DMLC_NUM_WORKER=4 are set",
        ),
    ],
)
def test_a_cluster_was_meant(
    change: dict[str, str], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that lost the cluster's address starts nothing instead."""
    for name in [name for name in os.environ if name.startswith(("DMLC_", "BYTEPS_"))]:
        monkeypatch.delenv(name)
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "4", **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=pattern):
        embedded.start_if_needed(3, 4)
    assert not embedded.is_running()


@pytest.mark.parametrize("env", [TORCHRUN, {"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2"}, {}])
def test_environments_without_a_cluster_are_accepted(env: dict[str, str]) -> None:
    """A job over several hosts starts its own nodes, too."""
    embedded.demand_no_cluster(env)


def test_restarts_with_the_store_of_ended_ranks_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch's own groups would fail there before an error of ours could explain the reason."""
    env = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ):
        embedded._warn_of_restarts({**env, name: value})
    assert not caplog.messages
    embedded._warn_of_restarts(env)
    assert re.search(
        "--max-restarts 3 .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*--rdzv-backend c10d",
        caplog.messages[0],
    )


# Servers of a host.


def mask(cores: Sequence[int]) -> str:
    return f"{sum(1 << core for core in cores):x}"


def means(cores: Sequence[Sequence[int]], **change: object) -> list[dict[str, object]]:
    """Make the messages of a host's ranks that may use these cores."""
    facts = {"servers": 0, "near": "0", "quota": None, "gbps": 25.0, "nodes": 1, **change}
    return [{**facts, "cores": mask(ranks_cores)} for ranks_cores in cores]


def servers(cores: Sequence[Sequence[int]], count: int = 1, **change: object) -> HostServers:
    return HostServers.fit(means(cores, **change), count)


@pytest.mark.parametrize(
    ("fitted", "io_threads", "adding_threads", "cores"),
    [
        # 2 x 25 Gbit/s at 20 per core; four-bit values cost 1.5 cores.
        (servers([range(64)] * 8), 3, 4, 64),
        (servers([range(128)] * 8, gbps=100.0), 10, 6, 128),
        (servers([range(128)] * 8, gbps=100.0, count=2), 5, 3, 128),
        (servers([range(128)] * 8, gbps=10.0, nodes=2), 2, 4, 128),
        # A rate that the kernel does not report is assumed to be 40.
        (servers([range(16)], gbps=0.0), 4, 4, 16),
        # Servers get half of the cores that the ranks leave, and at least one thread of each kind.
        (servers([range(8)] * 4, gbps=100.0), 1, 1, 8),
        (servers([range(2)] * 2), 1, 1, 2),
        (servers([range(64)] * 8, quota=12.0), 1, 1, 12),
        # The launcher binds each rank to some cores.
        (servers([range(8), range(32, 40)]), 3, 4, 16),
    ],
)
def test_servers_fit_their_host(
    fitted: HostServers, io_threads: int, adding_threads: int, cores: int
) -> None:
    assert (fitted.io_threads, fitted.adding_threads) == (io_threads, adding_threads)
    assert fitted.cores_in_all == cores
    text = host_servers.cost_text([fitted])
    assert f"at most {fitted.busy_cores} of {cores} cores" in text


def test_a_forecast_counts_with_the_cores_that_servers_take() -> None:
    fitted = servers([range(int(CORES_PER_GPU) * 8)] * 8, gbps=3200.0)
    assert fitted.busy_cores == Machines(hosts=8, gpus=8, link_gbps=400, nics=8).network_cores


def test_threads_that_are_named_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_IO_THREADS", "7")
    monkeypatch.setenv("BYTEPS_SERVER_ENGINE_THREAD", "9")
    fitted = servers([range(2)])
    assert fitted.environment == {"BYTEPS_IO_THREADS": "7", "BYTEPS_SERVER_ENGINE_THREAD": "9"}
    assert fitted.busy_cores == 2


@pytest.mark.parametrize(
    ("near", "cores"),
    [
        # The second of two NUMA nodes has the NIC. Then comes a node with too few cores.
        (range(16, 32), range(16, 32)),
        (range(30, 34), range(32)),
        ((), range(32)),
    ],
)
def test_servers_run_near_the_nics(near: Sequence[int], cores: Sequence[int]) -> None:
    assert servers([range(16), range(16, 32)], near=mask(near)).cores == list(cores)


@pytest.mark.parametrize(
    ("gbps", "counts"),
    [
        ((25.0, 25.0, 25.0), [1, 1, 1]),
        ((25.0, 100.0, 100.0), [1, 4, 4]),
        ((40.0, 25.0), [3, 2]),
        ((100.0, 10.0), [8, 1]),
        # The rate of the last NIC is unknown.
        ((100.0, 25.0, 0.0), [1, 1, 1]),
    ],
)
def test_bytes_follow_the_rates_of_nics(gbps: Sequence[float], counts: list[int]) -> None:
    hosts = [means([range(64)], gbps=rate) for rate in gbps]
    fitted = host_servers.fit_hosts(hosts)
    assert [host.count for host in fitted] == counts
    assert all(host.io_threads * host.count <= 16 for host in fitted), (
        "threads are divided, not added"
    )
    for host in hosts[0]:
        host["servers"] = 2
    assert [host.count for host in host_servers.fit_hosts(hosts)] == [2, *counts[1:]]


def test_the_tightest_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job of Slurm or systemd has its limit above the process's own group."""
    monkeypatch.setattr(host_servers, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_servers, "_OWN_CGROUP", tmp_path / "own")
    assert host_servers._quota() is None
    (tmp_path / "own").write_text("0::/job/step\n")
    for folder, limit in ((".", "900000"), ("job", "250000"), ("job/step", "max")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(f"{limit} 100000\n")
    assert host_servers._quota() == 2.5


def test_several_hosts_have_servers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hosts with different sizes and numbers of ranks, and no given number of servers, get some."""
    program = tmp_path / "byteps-server"
    # The file appears with all of its text, as that of the real program does.
    program.write_text(
        '#!/bin/sh\neval "file=\\${$#}"; echo host 4711 > "$file.part"; mv "$file.part" "$file"\n'
        "exec sleep 600\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(embedded_nodes, "find_executable", lambda: str(program))
    monkeypatch.setenv("DMLC_NODE_HOST", "2001:db8::7")
    for name in ("BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_AUTH", "BYTEPS_TLS"):
        monkeypatch.delenv(name, raising=False)
    nodes = EmbeddedNodes(0)
    start = Start(0, 3, None, nodes)
    messages = [
        {"starts": True, "problem": "", "address": "", "secret": ""}
        | {"place": {"host": host, "local": None, "is_named": False}}
        | {"means": means([range(cores)], gbps=10.0)[0]}
        for host, cores in (("a", 16), ("b", 4), ("a", 16))
    ]
    answers = start.answers(messages)
    assert [answer["local"] for answer in answers] == [(0, 2), (0, 1), (1, 2)]
    threads = [answer.get("servers", {}).get("adding_threads") for answer in answers]
    assert threads == [4, 1, None]
    address = answers[0]["address"]
    assert address["DMLC_NUM_SERVER"] == "2" and address["DMLC_PS_ROOT_PORT"] == "4711"
    assert len(address["BYTEPS_SECRET"]) == 64
    said = capfd.readouterr().err
    assert "scheduler at [2001:db8::7]:4711" in said and "2 in all on 2 host(s)" in said
    assert "at most 2 of 4 to 5 of 16 cores" in said and "1.25 GiB" in said
    # With TLS and no secret of the user, the job's key would travel unencrypted, so this is
    # refused.
    monkeypatch.setenv("BYTEPS_TLS", "1")
    with pytest.raises(RuntimeError, match=r"BYTEPS_TLS=1 and no secret.*--new-secret"):
        start.answers(messages)
    (tmp_path / "job.secret").write_text(f"{'a' * 16}\n")
    monkeypatch.setenv("BYTEPS_SECRET_FILE", str(tmp_path / "job.secret"))
    assert "BYTEPS_SECRET" not in start.answers(messages)[0]["address"]
    nodes.end(time.monotonic())


def test_ranks_with_different_secrets_start_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "job.secret").write_text(f"{'a' * 16}\n")
    for name in ("BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_AUTH"):
        monkeypatch.delenv(name, raising=False)
    messages = [{"secret": secret_mark()}]
    for name, value in (
        ("BYTEPS_SECRET", "a" * 16),
        ("BYTEPS_SECRET", "b" * 16),
        ("BYTEPS_AUTH", "0"),
    ):
        monkeypatch.setenv(name, value)
        messages.append({"secret": secret_mark()})
    monkeypatch.delenv("BYTEPS_AUTH")
    monkeypatch.delenv("BYTEPS_SECRET")
    monkeypatch.setenv("BYTEPS_SECRET_FILE", str(tmp_path / "job.secret"))
    assert secret_mark() == messages[1]["secret"], "the same secret in a file"
    for message, other in itertools.combinations(messages, 2):
        with pytest.raises(
            RuntimeError, match=r"ranks \[1\] of 3 have another secret.*SECRET_FILE"
        ):
            demand_one_secret([message, other, message])


def test_one_host_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.loopback() == "127.0.0.1"
    # The address is not of this host, like 127.0.0.1 if IPv4 is switched off.
    monkeypatch.setattr(addresses, "LOOPBACK", "192.0.2.1")
    assert addresses.loopback() == "::1"


def test_several_hosts_take_what_is_said() -> None:
    env = {"MASTER_ADDR": "10.1.2.3", "DMLC_NODE_HOST": "host-a"}
    assert addresses.own_address(env) == "host-a"
    assert addresses.own_address({"DMLC_INTERFACE": "lo"}) == "127.0.0.1"


@pytest.mark.parametrize(("master", "own"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_several_hosts_take_the_way_to_the_master(master: str, own: str) -> None:
    assert addresses.own_address({"MASTER_ADDR": master}) == own


def test_several_hosts_without_a_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under mp.spawn a rank takes the address of its route to torch's store, or of its default
    route."""
    towards: list[str] = []
    own = {"node-7": "127.0.1.1", "10.0.0.1": "10.0.0.2", "192.0.2.1": "10.9.0.2"}
    own |= {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}

    def find(host: str) -> str:
        towards.append(host)
        return own[host]

    monkeypatch.setattr(addresses, "_address_towards", find)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert addresses.own_address({}, dist.PrefixStore("default", store)) == "127.0.0.1"
    assert addresses.own_address({}, dist.FileStore(str(tmp_path / "store"), 1)) == "10.9.0.2"
    assert towards == ["127.0.0.1", "192.0.2.1"]
    own["10.9.0.3"] = "10.9.0.4"
    for master in ("node-7", "localhost"):  # names that may be valid on their own host only
        env = {"MASTER_ADDR": master}
        assert addresses.own_address(env, others=["", "10.9.0.3"]) == "10.9.0.4"
        there = addresses.own_address(env, others=["127.0.0.1"])
        assert there == own[master], "hosts that are emulated"
    env = {"MASTER_ADDR": "10.0.0.1"}
    assert addresses.own_address(env, others=["10.9.0.3"]) == "10.0.0.2"


def test_several_hosts_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no-such-nic"):
        addresses.own_address({"DMLC_INTERFACE": "no-such-nic"})
    with pytest.raises(RuntimeError, match=r"no path to MASTER_ADDR='no-such-host\.invalid'"):
        addresses.own_address({"MASTER_ADDR": "no-such-host.invalid"})
    monkeypatch.setattr(addresses, "ELSEWHERE", ("no-such-host.invalid",))
    monkeypatch.setattr(addresses.os, "uname", lambda: SimpleNamespace(nodename="no-such.invalid"))
    with pytest.raises(RuntimeError, match="set MASTER_ADDR, DMLC_NODE_HOST or DMLC_INTERFACE"):
        addresses.own_address({})


def test_executable_beside_python_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "byteps-server").write_text("#!/bin/sh\n")
        (tmp_path / folder / "byteps-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(child.sysconfig, "get_path", lambda name: str(tmp_path))
    assert find_executable() == str(tmp_path / "beside" / "byteps-server")
    (tmp_path / "beside" / "byteps-server").unlink()
    assert find_executable() == str(tmp_path / "path" / "byteps-server")
    (tmp_path / "path" / "byteps-server").unlink()
    with pytest.raises(RuntimeError, match="install the byteps wheel"):
        find_executable()


def test_does_nothing_with_a_scheduler_or_without_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    assert embedded.start_if_needed(0, 2) == {}
    assert not embedded.is_running()
    embedded.stop()


class TestChild:
    """Tests of a started process."""

    @staticmethod
    def start(tmp_path: Path, code: str) -> Child:
        return Child("helper", [sys.executable, "-c", code], os.environ, tmp_path / "helper.log")

    def test_a_child_that_ends_well_prints_nothing(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        child = self.start(tmp_path, "print('hello')")
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (0, False)
        assert child.last_lines() == ["hello"]
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize(
        ("line", "shown"),
        [
            ("ValueError: bad", ": ValueError: bad"),
            ("2026-11-30T06:13:58Z INFO server - h f.cc:1: has left", ""),
            ("2026-11-30T06:13:58Z ERROR server - h f.cc:1: worker 0 failed", ": worker 0 failed"),
        ],
    )
    def test_the_error_that_a_child_logged_is_shown(
        self, line: str, shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        child = self.start(tmp_path, f"print('line 1')\nprint({line!r})\nraise SystemExit(3)")
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (3, True)
        (said,) = capfd.readouterr().err.splitlines()
        assert said.endswith(f"helper ended with exit status 3{shown}; its log is {child.log}")

    def test_signal_that_we_sent_is_no_failure(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        child = self.start(tmp_path, "import time; time.sleep(600)")
        assert not child.wait(time.monotonic() + 0.1)
        child.signal(signal.SIGTERM)
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (-signal.SIGTERM, False)
        child.signal(signal.SIGTERM)  # no process gets this port
        assert capfd.readouterr().err == ""

    def test_missing_program(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="cannot start helper"):
            Child("helper", [str(tmp_path / "nothing")], os.environ, tmp_path / "helper.log")

    def test_outlives_the_thread_that_asked_for_it(self, tmp_path: Path) -> None:
        """The kernel sends the parent-death signal when the forking thread ends. So this thread
        must outlive the caller's thread."""
        code = (
            "import ctypes, time\n"
            "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
            "print('ready', flush=True); time.sleep(600)"
        )
        made: list[Child] = []
        asker = threading.Thread(target=lambda: made.append(self.start(tmp_path, code)))
        asker.start()
        asker.join(30)
        [child] = made
        deadline = time.monotonic() + 30
        while child.last_lines() != ["ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not child.wait(time.monotonic() + 0.5)
        child.signal(signal.SIGKILL)
        assert child.wait(time.monotonic() + 30)


def test_import_needs_neither_torch_nor_the_engine() -> None:
    code = "import sys, byteps.launcher.embedded; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


class TestEnd:
    """Started processes always end, within a time limit."""

    @pytest.fixture
    def nodes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EmbeddedNodes:
        """The state after start_if_needed(), with children that the test adds."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        nodes = EmbeddedNodes(0)
        monkeypatch.setattr(embedded, "_current", nodes)
        monkeypatch.setattr(embedded, "_left", [])
        monkeypatch.setattr(embedded, "REST_S", 0.3)
        monkeypatch.setattr(embedded_nodes, "REST_S", 0.3)
        # A busy machine takes a while to end a process.
        monkeypatch.setattr(embedded_nodes, "GRACE_S", 10.0)
        return nodes

    @pytest.fixture
    def add(self, nodes: EmbeddedNodes, monkeypatch: pytest.MonkeyPatch) -> Add:
        """Starts a child that runs this code."""

        def add(code: str) -> Child:
            program = nodes.folder / f"program-{len(nodes.children)}"
            program.write_text(f"#!{sys.executable}\n{code}\n")
            program.chmod(0o755)
            monkeypatch.setattr(embedded_nodes, "find_executable", lambda: str(program))
            return nodes.start(f"helper {len(nodes.children)}", "server", {})

        return add

    def test_leaving_waits_for_nobody(self, nodes: EmbeddedNodes, add: Add, tmp_path: Path) -> None:
        """Children that other ranks need stay alive, and the logs go with the last child."""
        code = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'done')!r}): "
        helper = add(code + "time.sleep(0.01)")
        embedded.leave()
        assert not embedded.is_running() and helper.running and embedded.has_left()
        (tmp_path / "done").touch()
        deadline = time.monotonic() + LIMIT_S
        while nodes.folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert helper.status == 0 and not embedded.has_left()

    def test_the_end_of_the_process_waits_for_what_was_left(
        self, nodes: EmbeddedNodes, add: Add
    ) -> None:
        helper = add("import time; time.sleep(0.5)")
        given: list[tuple[list[tuple[str, int, str]], str]] = []

        def end_children(
            running: list[tuple[str, int, str]], folder: str, patience_s: float, grace_s: float
        ) -> bool:
            given.append((running, folder))
            return True

        embedded.leave()
        assert embedded.end_at_exit(end_children) and embedded.end_at_exit(end_children)
        assert given == [([("helper 0", helper.pid, str(helper.log))], str(nodes.folder))], "once"
        embedded.end_left()
        assert helper.status == 0 and not nodes.folder.exists()

    @pytest.mark.parametrize("hurries", [True, False])
    def test_terminates_after_the_deadline(
        self, nodes: EmbeddedNodes, add: Add, hurries: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other ranks may be waiting for this process to end."""
        helper = add("import time; time.sleep(600)")
        monkeypatch.setenv("BYTEPS_OP_TIMEOUT_S", "600" if hurries else "0.1")
        embedded.leave()
        embedded.end_left(hurries=hurries)
        assert helper.status == -signal.SIGTERM
        assert not nodes.folder.exists()

    def test_kills_what_does_not_terminate(
        self, nodes: EmbeddedNodes, add: Add, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(embedded_nodes, "GRACE_S", 0.3)
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
        helper = add(code + "; time.sleep(600)")
        deadline = time.monotonic() + LIMIT_S
        while not helper.last_lines():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        embedded.stop()
        assert helper.status == -signal.SIGKILL

    def test_does_not_wait_long_for_the_rest_of_a_failed_job(
        self, nodes: EmbeddedNodes, add: Add
    ) -> None:
        hung = add("import time; time.sleep(600)")
        failed = add("raise SystemExit(1)")
        embedded.leave()
        embedded.end_left()
        assert (failed.status, hung.status) == (1, -signal.SIGTERM)
        assert nodes.folder.exists(), "the logs of a failure stay"

    def test_end_with_a_process_that_fails_is_no_failure(
        self, nodes: EmbeddedNodes, add: Add, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The last lines that a user sees are the script's own error."""
        helper = add("import time; time.sleep(0.3); raise SystemExit(1)")
        embedded.expect_end()
        embedded.leave()
        embedded.end_left()
        assert helper.status == 1 and not nodes.folder.exists()
        assert not capfd.readouterr().err

    def test_logs_of_a_job_that_did_not_start_stay_and_are_named(
        self, nodes: EmbeddedNodes, add: Add, caplog: pytest.LogCaptureFixture
    ) -> None:
        add("import time; time.sleep(600)")
        embedded.stop(keeps_logs=True)
        assert nodes.folder.exists() and str(nodes.folder) in caplog.text

    def test_a_forked_copy_owns_nothing(self, nodes: EmbeddedNodes, add: Add) -> None:
        helper = add("import time; time.sleep(600)")
        nodes._pid = os.getpid() + 1
        embedded.stop()
        assert helper.running
        helper.signal(signal.SIGKILL)
        assert helper.wait(time.monotonic() + LIMIT_S)
