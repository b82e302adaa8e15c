"""The guest itself: its device works, so that what fails in other tests is the transport's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rdma.relay import REPOSITORY
from tests.rdma.vm.guest import missing_tool

DEVICE = Path("/sys/class/infiniband/rxe0/ports/1")
ONE_SERVER_S = 60.0
GIVE_UP_S = 200.0


def run(command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.on_rdma
def test_port_is_active() -> None:
    assert "ACTIVE" in (DEVICE / "state").read_text()
    assert "Ethernet" in (DEVICE / "link_layer").read_text()


@pytest.mark.on_rdma
@pytest.mark.parametrize(
    ("command", "host"),
    [
        (["ib_write_bw", "-R", "-s", "65536", "-n", "20"], "10.77.0.1"),
        (["ibv_rc_pingpong", "-d", "rxe0", "-g", "2", "-n", "20"], "10.77.0.1"),
    ],
    ids=["manager", "ipv6-gid"],
)
def test_verbs_move_data(command: list[str], host: str, run_dir: Path) -> None:
    """Programs that are not ours, with and without the RDMA connection manager."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        said = moves_data(command, host, run_dir / "server.log")
        if not said:
            return
        assert time.monotonic() < deadline, said


def moves_data(command: list[str], host: str, log: Path) -> str:
    """Whether one server and its clients do; "" if so, else what the last client said.

    A server takes one client. Had that one given up in the middle, all others would be rejected.
    """
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + ONE_SERVER_S
        client = run([*command, host])
        while client.returncode != 0:  # until the server listens
            if time.monotonic() > deadline:
                return client.stdout + client.stderr
            time.sleep(0.3)
            client = run([*command, host])
        assert server.wait(30) == 0
        return ""
    finally:
        server.kill()
        server.wait()


def run_in_vm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tests/rdma/run_in_vm.py"), *arguments]
    return run(command, 200.0)


@pytest.mark.thorough
def test_two_guests_on_a_cable(tmp_path: Path) -> None:
    """Two hosts, as far as RDMA can see; output, files and exit status come back."""
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
