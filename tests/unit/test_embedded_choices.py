"""What the embedded mode decides before it starts anything, and how ranks meet in a store that
still has what those of earlier lives wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from byteps.launcher import addresses, embedded, places
from byteps.launcher.child import Child
from byteps.launcher.meeting import AbsentError, meet
from byteps.launcher.places import LocalPlace

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        (TORCHRUN, (3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({}, (0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
        ({"DMLC_NUM_WORKER": "1"}, (0, 1)),
        ({"DMLC_WORKER_ID": "1", "DMLC_NUM_WORKER": "2"}, (1, 2)),
    ],
)
def test_ranks_of_the_environment(env: dict[str, str], ranks: tuple[int, int]) -> None:
    assert places.read_ranks(env) == ranks


def test_own_place_on_the_host_comes_first() -> None:
    env = {**TORCHRUN, "BYTEPS_LOCAL_RANK": "3", "BYTEPS_LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
    place = LocalPlace.own(env, "host")
    assert (place.local, place.is_named) == ((3, 4), True)
    assert LocalPlace.own(TORCHRUN, "host") == LocalPlace(host="host", local=(1, 2), is_named=False)
    assert LocalPlace.own({"LOCAL_RANK": "1"}, "host").local is None


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "4"}, "RANK='4'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two'"),
        ({"DMLC_NUM_WORKER": "5"}, "WORLD_SIZE=4 and DMLC_NUM_WORKER=5.*ranks, not its hosts"),
        ({"RANK": None}, "torchrun"),
    ],
)
def test_bad_ranks(change: dict[str, str | None], pattern: str) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=pattern):
        places.read_ranks(env)
        LocalPlace.own(env, "host")


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
        (
            {"LOCAL_WORLD_SIZE": "2"},
            "WORLD_SIZE=4 is more than this host's 2 ranks: set BYTEPS_EMBEDDED_SERVERS=1 on every",
        ),
    ],
)
def test_a_cluster_was_meant(
    change: dict[str, str], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address got lost: nothing is started in its place."""
    for name in [name for name in os.environ if name.startswith(("DMLC_", "BYTEPS_"))]:
        monkeypatch.delenv(name)
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "4", **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=pattern):
        embedded.start_if_needed()
    assert not embedded.is_running()


@pytest.mark.parametrize(
    "env",
    [
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"},
        {**TORCHRUN, "BYTEPS_EMBEDDED_SERVERS": "1"},
        {"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {},
    ],
)
def test_no_cluster_was_meant(env: dict[str, str]) -> None:
    _, size = places.read_ranks(env)
    local = LocalPlace.own(env, "host").local
    embedded.demand_no_cluster(env, size, local[1] if local else size)


def test_one_host_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"MASTER_ADDR": "10.1.2.3", "DMLC_NODE_HOST": "10.1.2.3"}
    assert addresses.scheduler_host(env, True) == "127.0.0.1"
    # Of no host, as 127.0.0.1 is where IPv4 is switched off.
    monkeypatch.setattr(addresses, "LOOPBACK", "192.0.2.1")
    assert addresses.scheduler_host(env, True) == "::1"


def test_several_hosts_take_what_is_said() -> None:
    env = {"MASTER_ADDR": "10.1.2.3", "DMLC_NODE_HOST": "host-a"}
    assert addresses.scheduler_host(env, False) == "host-a"
    assert addresses.scheduler_host({"DMLC_INTERFACE": "lo"}, False) == "127.0.0.1"


@pytest.mark.parametrize(("master", "own"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_several_hosts_take_the_way_to_the_master(master: str, own: str) -> None:
    assert addresses.scheduler_host({"MASTER_ADDR": master}, False) == own


def test_own_name_that_means_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_address_towards", lambda host: "127.0.0.1")
    with pytest.raises(RuntimeError, match="DMLC_NODE_HOST"):
        addresses.scheduler_host({"MASTER_ADDR": "node-7"}, False)
    assert addresses.scheduler_host({"MASTER_ADDR": "localhost"}, False) == "127.0.0.1"


def test_several_hosts_without_an_address() -> None:
    with pytest.raises(RuntimeError, match="MASTER_ADDR"):
        addresses.scheduler_host({}, False)
    with pytest.raises(RuntimeError, match="no-such-nic"):
        addresses.scheduler_host({"DMLC_INTERFACE": "no-such-nic"}, False)
    with pytest.raises(RuntimeError, match=r"no path to MASTER_ADDR='no-such-host\.invalid'"):
        addresses.scheduler_host({"MASTER_ADDR": "no-such-host.invalid"}, False)


def test_an_interface_without_ipv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its global address, whatever stands before it."""
    rows = (
        "fe800000000000000000000000000007 03 40 20 80     none0",
        "20010db8000000000000000000000001 03 40 00 60     none0",  # still being looked for
        "20010db8000000000000000000000002 04 40 00 80     other",
        "20010db8000000000000000000000003 03 40 00 80     none0",
    )
    (tmp_path / "if_inet6").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(addresses, "_ADDRESSES_6", tmp_path / "if_inet6")
    assert addresses.scheduler_host({"DMLC_INTERFACE": "none0"}, False) == "2001:db8::3"


def test_executable_beside_python_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "byteps-server").write_text("#!/bin/sh\n")
        (tmp_path / folder / "byteps-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda name: str(tmp_path))
    assert embedded.find_executable() == str(tmp_path / "beside" / "byteps-server")
    (tmp_path / "beside" / "byteps-server").unlink()
    assert embedded.find_executable() == str(tmp_path / "path" / "byteps-server")
    (tmp_path / "path" / "byteps-server").unlink()
    with pytest.raises(RuntimeError, match="install the byteps wheel"):
        embedded.find_executable()


def test_does_nothing_with_a_scheduler_or_without_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    assert embedded.start_if_needed() is None
    assert not embedded.is_running()
    embedded.stop()


class TestChild:
    """One started process."""

    @staticmethod
    def start(tmp_path: Path, code: str) -> Child:
        return Child("helper", [sys.executable, "-c", code], os.environ, tmp_path / "helper.log")

    def test_ends_well(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        child = self.start(tmp_path, "print('hello')")
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (0, False)
        assert child.last_lines() == ["hello"]
        assert capfd.readouterr().err == ""

    def test_failure_is_shown_with_the_end_of_its_log(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
        child = self.start(tmp_path, code)
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (3, True)
        said = capfd.readouterr().err
        assert "helper ended with exit status 3" in said
        assert "line 99" in said and "line 79" not in said

    def test_signal_that_we_sent_is_no_failure(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        child = self.start(tmp_path, "import time; time.sleep(600)")
        assert not child.wait(time.monotonic() + 0.1)
        child.signal(signal.SIGTERM)
        assert child.wait(time.monotonic() + 30)
        assert (child.status, child.failed) == (-signal.SIGTERM, False)
        child.signal(signal.SIGTERM)  # to nobody
        assert capfd.readouterr().err == ""

    def test_missing_program(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="cannot start helper"):
            Child("helper", [str(tmp_path / "nothing")], os.environ, tmp_path / "helper.log")

    def test_outlives_the_thread_that_asked_for_it(self, tmp_path: Path) -> None:
        """The parent-death signal comes when the forking thread ends, which must not be ours."""
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


def _folder_of(state: embedded._Embedded) -> Path:
    assert state.folder is not None
    return state.folder


class TestStop:
    """How long stop() waits, and that it always ends what was started."""

    @pytest.fixture
    def started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> embedded._Embedded:
        """As after start_if_needed(), with children that the test adds."""
        folder = tmp_path / "logs"
        folder.mkdir()
        state = embedded._Embedded(pid=os.getpid(), folder=folder)
        monkeypatch.setattr(embedded, "_current", state)
        monkeypatch.setattr(embedded, "REST_S", 0.3)
        # A busy machine takes a while to end a process.
        monkeypatch.setattr(embedded, "GRACE_S", 10.0)
        return state

    @staticmethod
    def add(state: embedded._Embedded, code: str) -> Child:
        assert state.folder is not None
        log = state.folder / f"{len(state.children)}.log"
        child = Child("helper", [sys.executable, "-c", code], os.environ, log)
        state.children.append(child)
        return child

    def test_waits_for_children_to_end(self, started: embedded._Embedded) -> None:
        child = self.add(started, "import time; time.sleep(0.2)")
        embedded.stop()
        assert child.status == 0
        assert not _folder_of(started).exists()
        assert not embedded.is_running()

    def test_leaving_waits_for_nobody(self, started: embedded._Embedded) -> None:
        """Children that other ranks need live on, and the logs go with the last one."""
        done = _folder_of(started).parent / "done"
        code = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"
        child = self.add(started, code)
        embedded.leave()
        assert not embedded.is_running() and child.running
        done.touch()
        deadline = time.monotonic() + 60
        while _folder_of(started).exists() or embedded._left:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert child.status == 0

    def test_the_end_of_the_process_waits_for_what_was_left(
        self, started: embedded._Embedded
    ) -> None:
        child = self.add(started, "import time; time.sleep(0.5)")
        embedded.leave()
        given: list[tuple[list[tuple[str, int, str]], str]] = []

        def end_children(
            running: list[tuple[str, int, str]], folder: str, patience_s: float, grace_s: float
        ) -> bool:
            given.append((running, folder))
            return True

        assert embedded.stop_at_exit(end_children) and not given
        assert embedded.stop_at_exit(end_children, left=True)
        assert given == [([("helper", child.pid, str(child.log))], str(started.folder))]
        embedded.stop_left()
        assert child.status == 0

    def test_terminates_after_the_deadline(self, started: embedded._Embedded) -> None:
        child = self.add(started, "import time; time.sleep(600)")
        embedded.stop(timeout_s=0.1)
        assert child.status == -signal.SIGTERM
        assert not _folder_of(started).exists()

    def test_kills_what_does_not_terminate(
        self, started: embedded._Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(embedded, "GRACE_S", 0.3)
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
        child = self.add(started, code + "; time.sleep(600)")
        deadline = time.monotonic() + 30
        while not child.last_lines():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        embedded.stop(graceful=False)
        assert child.status == -signal.SIGKILL

    def test_does_not_wait_long_for_the_rest_of_a_failed_job(
        self, started: embedded._Embedded
    ) -> None:
        hung = self.add(started, "import time; time.sleep(600)")
        failed = self.add(started, "raise SystemExit(1)")
        embedded.stop()
        assert (failed.status, hung.status) == (1, -signal.SIGTERM)
        assert _folder_of(started).exists(), "the logs of a failure stay"

    def test_does_not_wait_long_when_dying(
        self, started: embedded._Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other ranks may be waiting for this process to end."""
        monkeypatch.setattr(sys, "last_exc", RuntimeError("uncaught"), raising=False)
        child = self.add(started, "import time; time.sleep(600)")
        embedded.stop()
        assert child.status == -signal.SIGTERM

    def test_puts_the_environment_back(
        self, started: embedded._Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DMLC_NUM_SERVER", "9")
        monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.9")
        started.saved_environment = {"DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": None}
        embedded.stop()
        assert os.environ["DMLC_NUM_SERVER"] == "2"
        assert "DMLC_PS_ROOT_URI" not in os.environ

    def test_a_forked_copy_owns_nothing(self, started: embedded._Embedded) -> None:
        child = self.add(started, "import time; time.sleep(600)")
        started.pid = os.getpid() + 1
        embedded.stop()
        assert child.running
        child.signal(signal.SIGKILL)
        assert child.wait(time.monotonic() + 30)


# Ranks meet in a store that still has what those of earlier lives wrote.


LIMIT_S = 60.0
"""Against hangs."""


def met(
    store: dist.Store, members: Sequence[int], size: int, limit_s: float = LIMIT_S
) -> list[str]:
    """The prefixes of these members, which come in this order, each once the last one waits."""
    with ThreadPoolExecutor(size) as pool:
        deadline = time.monotonic() + limit_s
        come = [pool.submit(meet, store, "name", member, size, deadline) for member in members]
        return [one.result() for one in come]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_life_has_keys_of_its_own(order: tuple[int, ...]) -> None:
    store = dist.HashStore()
    lives = [met(store, order, 3) for _ in range(4)]
    assert all(len(set(prefixes)) == 1 for prefixes in lives)
    assert len({prefixes[0] for prefixes in lives}) == 4


def test_a_first_member_that_comes_long_after_the_others() -> None:
    """They find what the last life's first member wrote, and must not take it."""
    store = dist.HashStore()
    [old, *_] = met(store, (0, 1, 2), 3)
    with ThreadPoolExecutor(3) as pool:
        deadline = time.monotonic() + LIMIT_S
        waiting = [pool.submit(meet, store, "name", member, 3, deadline) for member in (1, 2)]
        await_keys(lambda: len({store.get(f"byteps/name/nonce/{m}") for m in (1, 2)}) == 2)
        assert not any(one.done() for one in waiting)
        new = meet(store, "name", 0, 3, deadline)
        assert {one.result() for one in waiting} == {new} != {old}


def await_keys(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_member_of_the_last_life_does_not_count() -> None:
    """Its nonce is still there. Who came is told, and has keys to hear why."""
    store = dist.HashStore()
    met(store, (0, 1, 2), 3)
    found: list[str] = []
    other = threading.Thread(
        target=lambda: found.append(meet(store, "name", 1, 3, time.monotonic() + LIMIT_S))
    )
    other.start()
    with pytest.raises(AbsentError) as raised:
        meet(store, "name", 0, 3, time.monotonic() + 1.0)
    other.join(LIMIT_S)
    assert raised.value.members == [2]
    assert found == [raised.value.prefix]


def test_no_first_member() -> None:
    store = dist.HashStore()
    met(store, (0, 1), 2)
    with pytest.raises(AbsentError) as raised:
        meet(store, "name", 1, 2, time.monotonic() + 0.2)
    assert raised.value.members == [0]


def test_one_alone() -> None:
    assert meet(dist.HashStore(), "name", 0, 1, time.monotonic()).startswith("byteps/name/")
