"""Who is not part of a job can neither stop nor change it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cluster import END_S, LOOPBACK, Cluster, wait_for_file
from strangers import ADD_NODE, JOB_FAILED, Hello, frame, job_of, meta, read_all, refusal

WORKER_0 = 9
"""Its node id."""


@pytest.fixture
def steady(make_cluster: Callable[..., Cluster]) -> Iterator[Cluster]:
    """A job of two workers and a server, which must be right to its end."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start("failures:steady")
    cluster.wait_mark("looping", range(2))
    yield cluster
    cluster.go("end")
    cluster.finish()


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
        with connected(address) as stranger:
            stranger.sendall(said)
            assert "does not speak this protocol" in refusal(read_all(stranger))


def test_who_says_nothing_is_closed(steady: Cluster) -> None:
    strangers = [socket.create_connection(a, timeout=END_S) for a in nodes_of(steady).values()]
    for stranger in strangers:
        assert read_all(stranger) == b""
        stranger.close()


def test_another_version_is_named(steady: Cluster) -> None:
    for address in nodes_of(steady).values():
        with connected(address) as stranger:
            stranger.sendall(Hello(version=3).encode())
            text = refusal(read_all(stranger))
            assert "wire version 3" in text
            assert "install the same byteps" in text


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(job=0, node_id=WORKER_0), "another job"),
        (Hello(job=12345, node_id=WORKER_0), "another job"),
        (Hello(job=12345, receiver=99, node_id=WORKER_0), "not here any more"),
    ],
    ids=["no-job", "another-job", "another-process"],
)
def test_a_server_takes_its_own_job_alone(steady: Cluster, hello: Hello, reason: str) -> None:
    with connected(nodes_of(steady)["server"]) as stranger:
        stranger.sendall(hello.encode())
        assert reason in refusal(read_all(stranger))


def test_no_one_takes_a_workers_route(steady: Cluster) -> None:
    """Not even one that knows the job: the worker is connected, and stays so."""
    nodes = nodes_of(steady)
    with connected(nodes["server"]) as stranger:
        stranger.sendall(Hello(job=job_of(nodes["scheduler"]), node_id=WORKER_0).encode())
        assert "another process is connected" in refusal(read_all(stranger))


@pytest.mark.parametrize(
    "said",
    [
        frame(meta(command=JOB_FAILED, body=b"because")),
        frame(meta(head=2, key=1 << 16), b"\x00" * 4096),
        frame(meta(command=ADD_NODE)),
        frame(meta(command=200)),
        frame(b"\x02" * 7),
        struct.pack("<BBHI", 1, 255, 0, 2**32 - 1),
        struct.pack("<BBHI", 9, 0, 0, 0),
    ],
    ids=["fails-the-job", "pushes", "joins-as-nobody", "command", "meta", "sizes", "type"],
)
def test_who_has_not_joined_has_nothing_to_say(steady: Cluster, said: bytes) -> None:
    """At the scheduler, which has to let anybody ask to join."""
    with connected(nodes_of(steady)["scheduler"]) as stranger:
        stranger.sendall(Hello().encode() + said)
        assert refusal(read_all(stranger)) == ""
