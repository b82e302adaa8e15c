"""Unauthenticated peers can neither stop nor change a job."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.children import free_ports
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    REPOSITORY,
    SECRET,
    Cluster,
    Nursery,
    server_executable,
    wait_all,
    wait_for_file,
)
from tests.multiproc.endings import demand_error, wait_for_text
from tests.multiproc.flood import (
    ADD_NODE,
    CHALLENGE_BYTES,
    JOB_FAILED,
    MAGIC,
    VERSION,
    Hello,
    answer_to,
    frame,
    greeted,
    job_of,
    meta,
    read_all,
    refusal,
)

STATUS = REPOSITORY / "scripts/status.sh"
NOTED = "(the two nodes have different job secrets|it has no secret)"
WORKER_0 = 9
"""Node id of worker 0."""


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Cluster]:
    """A job of two workers and a server, which must still work after all of these tests."""
    with Cluster(tmp_path_factory.mktemp("steady"), nursery, workers=2, servers=1) as cluster:
        cluster.start("failures:steady")
        cluster.wait_mark("looping", range(2))
        yield cluster
        cluster.go("end")
        cluster.finish()
        for process in cluster.everyone():
            assert "the invariant '" not in process.text, process.text


def nodes_of(cluster: Cluster) -> dict[str, tuple[str, int]]:
    port = wait_for_file(cluster.folder / "server 0.port", END_S).split()[1]
    return {"scheduler": (LOOPBACK, cluster.port), "server": (LOOPBACK, int(port))}


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=END_S) as stranger:
        yield stranger


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x00" * 416],
    ids=["browser", "ones", "zeros"],
)
def test_other_protocols_are_told_so(steady: Cluster, said: bytes) -> None:
    for address in nodes_of(steady).values():
        assert "does not speak this protocol" in refusal(answer_to(said, address))


def test_another_version_is_named(steady: Cluster) -> None:
    for address in nodes_of(steady).values():
        text = refusal(answer_to(Hello(version=9).encode(), address))
        assert "wire version 9" in text
        assert "install the same byteps" in text


def test_a_server_takes_its_own_job_alone(steady: Cluster) -> None:
    hello = Hello(job=12345, node_id=WORKER_0)
    with greeted(nodes_of(steady)["server"], hello, SECRET) as (_, said):
        assert "another job" in said


def test_a_server_takes_its_own_generation_alone(steady: Cluster) -> None:
    """A connection of an older or newer generation of the job is refused by its number."""
    nodes = nodes_of(steady)
    hello = Hello(job=job_of(nodes["scheduler"]) + 1, node_id=WORKER_0)
    for node in ("server", "scheduler"):
        with greeted(nodes[node], hello, SECRET) as (_, said):
            pass
        assert "it is of generation 2 of the job, and this node of generation 1" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "another process is connected"),
        ({"rank": 1}, "rank"),
        ({"resumes": True, "sender": 5, "node_id": 13, "rank": 2}, "given the connection up"),
    ],
    ids=["route", "rank", "resumes"],
)
def test_no_one_takes_a_workers_place(steady: Cluster, change: dict[str, Any], reason: str) -> None:
    """Even a peer that has the secret is refused, because the worker is connected. The worker stays
    connected. peer_table_test.cc tests the other reasons."""
    nodes = nodes_of(steady)
    hello = Hello(**{"job": job_of(nodes["scheduler"]), "node_id": WORKER_0, **change})
    with greeted(nodes["server"], hello, SECRET) as (_, said):
        assert re.search(reason, said)


def test_who_has_not_the_secret_is_told_and_closed(steady: Cluster) -> None:
    nodes = nodes_of(steady)
    hello = Hello(job=job_of(nodes["scheduler"]), node_id=WORKER_0)
    for address in nodes.values():
        with greeted(address, hello, "another secret, as long") as (_, text):
            assert "different job secrets" in text and "BYTEPS_SECRET_FILE" in text
        text = refusal(answer_to(Hello(authenticates=False).encode(), address))
        assert "has a secret" in text and "BYTEPS_AUTH=0" in text


def test_a_proof_is_of_use_once(steady: Cluster) -> None:
    """A proof overheard on one connection is useless on the next."""
    address = nodes_of(steady)["scheduler"]
    heard = []
    for _ in range(2):
        with connected(address) as stranger:
            stranger.sendall(Hello().encode())
            heard.append(stranger.recv(96, socket.MSG_WAITALL))
    assert heard[0][24:] != heard[1][24:]


@pytest.mark.parametrize(
    ("change", "error", "status"),
    [
        (
            {"BYTEPS_SECRET": "another secret, as long"},
            "different job secrets.*BYTEPS_SECRET",
            1,
        ),
        ({"BYTEPS_AUTH": "0"}, "has a secret, and the peer has none.*BYTEPS_AUTH=0", 1),
        ({"BYTEPS_SECRET": ""}, "has no secret.*--new-secret.*BYTEPS_AUTH=0", 2),
        ({"BYTEPS_SECRET": "short"}, "BYTEPS_SECRET has 5 bytes and needs 16", 2),
        ({"BYTEPS_SECRET_FILE": "/nowhere"}, "both set", 2),
        (
            {"BYTEPS_SECRET": "", "BYTEPS_SECRET_FILE": "/nowhere"},
            "/nowhere cannot be read: No such file",
            2,
        ),
    ],
    ids=["another", "without", "none", "short", "both", "no-file"],
)
def test_a_node_that_has_not_the_secret(
    make_cluster: Callable[..., Cluster], change: dict[str, str], error: str, status: int
) -> None:
    """A node without the secret gets an error that says what to do."""
    port = free_ports()
    cluster = make_cluster(
        workers=1, servers=1,
        env={"BYTEPS_START_TIMEOUT_S": "20", "BYTEPS_STATUS_PORT": str(port)},
    )  # fmt: skip
    cluster.start_scheduler()
    worker = cluster.start_worker(0, "failures:init_only", env=change)
    wait_all([worker], END_S)
    demand_error(worker, error)
    cluster.set_env(change)
    server = cluster.start_server()
    assert server.wait(END_S) == status
    assert re.search(error, server.text), server.text
    if status == 1:
        wait_for_text(cluster.scheduler, noted := rf"refused a connection: .*{NOTED}.*{LOOPBACK}")
        [line] = re.findall(noted, cluster.scheduler.text)
        ask = [str(STATUS), f"{LOOPBACK}:{port}"]
        page = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=END_S)
        assert line in page.stdout, "it is said once a minute, and shown"


def test_a_scheduler_without_the_secret(make_cluster: Callable[..., Cluster]) -> None:
    """Nodes do not trust a scheduler without the secret."""
    cluster = make_cluster(workers=1, servers=1, env={"BYTEPS_AUTH": "0"})
    cluster.start_scheduler()
    worker = cluster.start_worker(0, "failures:init_only", env={"BYTEPS_AUTH": "1"})
    wait_all([worker], END_S)
    demand_error(worker, "goes without a secret.*BYTEPS_SECRET_FILE")


def test_what_a_false_scheduler_says_is_quoted(make_cluster: Callable[..., Cluster]) -> None:
    """An unauthenticated scheduler's text is escaped, so that it cannot add log lines or escape
    sequences."""
    forged = "\x1b[2J\x1b]0;owned\x07\n2026-01-01T00:00:00Z ERROR the job was stopped\r\xe9"
    cluster = make_cluster(workers=1, servers=1)
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(END_S)
        cluster.port = listener.getsockname()[1]
        server = cluster.start_server()
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(END_S)
            peer.recv(len(Hello().encode()), socket.MSG_WAITALL)
            said = forged.encode()
            head = struct.pack("<IHH", MAGIC, VERSION, len(said))
            peer.sendall(head + bytes(CHALLENGE_BYTES - len(head)) + said)
            assert server.wait(END_S) != 0
    assert re.search(r"has not authenticated, and says: \"\\x1b\[2J\\x1b\]0;owned", server.text)
    assert server.text.isascii()
    assert all(line.isprintable() for line in server.text.splitlines()), server.text
    assert not re.search("^2026-01-01T00", server.text, re.MULTILINE)


def test_a_secret_in_a_file(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_SECRET": ""})
    path = cluster.folder / "secret"
    for expected in (0, 1):  # The second time it would overwrite a secret that is in use.
        made = subprocess.run(
            [server_executable(), "--new-secret", path], capture_output=True, check=False
        )
        assert made.returncode == expected
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text().strip()) == 64
    cluster.set_env({"BYTEPS_SECRET_FILE": str(path)})
    cluster.run("failures:init_only")


def test_a_job_that_goes_without(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env={"BYTEPS_AUTH": "0", "BYTEPS_SECRET": ""}).run(
        "failures:init_only"
    )


def test_a_secret_is_not_printed() -> None:
    env = {**os.environ, "BYTEPS_SECRET": "a secret that nobody may see"}
    said = subprocess.run(
        [server_executable(), "--print-config"], env=env, capture_output=True, text=True, check=True
    )
    assert "nobody may see" not in said.stdout + said.stderr
    assert "BYTEPS_SECRET=(hidden)" in said.stdout


@pytest.mark.parametrize(
    "said",
    [
        frame(meta(command=JOB_FAILED, body=b"because")),
        frame(meta(head=2, key=1 << 16), b"\x00" * 4096),
        frame(meta(command=ADD_NODE)),
        frame(meta(command=200)),
        frame(b"\x02" * 7),
        frame(meta(command=ADD_NODE), received=1),
        struct.pack("<BBHIQ", 1, 255, 0, 2**32 - 1, 0),
        struct.pack("<BBHIQ", 9, 0, 0, 0, 0),
    ],
    ids=[
        *("fails-the-job", "pushes", "joins-as-nobody", "command", "meta"),
        *("received", "sizes", "type"),
    ],
)
def test_who_has_not_joined_has_nothing_to_say(steady: Cluster, said: bytes) -> None:
    """The scheduler must let any peer ask to join. It closes the connection of a peer that sends
    anything else."""
    with greeted(nodes_of(steady)["scheduler"], Hello(), SECRET) as (stranger, refused):
        assert refused == ""
        stranger.sendall(said)
        assert refusal(read_all(stranger)) == ""
