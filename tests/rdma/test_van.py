"""Vans that exchange messages with nothing above them, over TCP and RDMA alike.

van_test starts a scheduler, servers and workers, checks every byte of every answer, and demands the
error that it is told to expect from every process that is left.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.children import free_ports
from tests import native
from tests.rdma.transports import ADDRESS_VARIABLE, Transport

Run = Callable[..., str]

each = pytest.mark.transports("tcp", "rdma")

AT_ONCE = {"BYTEPS_RECONNECT_TIMEOUT_S": "0"}
"""A connection that breaks is a loss."""
INLINE = 4096
PAGE = 4096
EDGES = [0, 1, 7, 8, 63, 64, 65, 1000, 3000, INLINE - 1, INLINE, INLINE + 1, 3 * PAGE + 5]
LARGE = [65_536, 1_000_003, 4_096_000]


@pytest.fixture(scope="session")
def van_test() -> Path:
    """In the guest it is there already: who started the guest has built it."""
    folder = native.FOLDER if ADDRESS_VARIABLE in os.environ else native.build("van_test")
    return folder / "van_test"


@pytest.fixture
def run_van(van_test: Path, transport: Transport, run_dir: Path) -> Run:
    """Runs it over the transport; returns what it printed, and demands that it liked it."""

    def run(*flags: str, timeout_s: int = 90, env: dict[str, str] | None = None) -> str:
        name = "ibverbs" if transport.is_rdma else "tcp"
        command = [str(van_test), "--transport", name, "--host", transport.host, *flags]
        log = run_dir / "van_test.log"
        with log.open("wb") as out:
            ended = subprocess.run(
                [*command, "--timeout", str(timeout_s)],
                env={**os.environ, **transport.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s + 30,
                check=False,
            )
        assert ended.returncode == 0
        return log.read_text(errors="replace")

    return run


def sizes(counts: list[int]) -> tuple[str, str]:
    return "--sizes", ",".join(map(str, counts))


def received(text: str, role: str) -> dict[str, int]:
    """Values that the role's data endpoints received, by where the device wrote them."""
    found = re.findall(
        rf"{role} \d+: endpoint .* plane=data .* in_place=(\d+)/\d+ offered=(\d+) "
        r"in_pool=(\d+)/\d+ in_frames=(\d+)/\d+",
        text,
    )
    assert found, text
    sums = [sum(map(int, column)) for column in zip(*found, strict=True)]
    return dict(zip(("in_place", "offered", "in_pool", "in_frames"), sums, strict=True))


@pytest.mark.transports("rdma", "rdma-3-endpoints", "rdma-shallow")
def test_values_land_where_they_belong(run_van: Run) -> None:
    """None of a worker's is copied: the memory is in the cache, and the device writes there.

    A request from memory that is registered by then has told the server the place, too.
    """
    rounds = 10
    counts = [100, INLINE + 1, 20_000, 1_000_003]
    text = run_van(
        *("--places", "cached", "--rounds", str(rounds), "--workers", "2"), *sizes(counts)
    )
    large = 2 * rounds * (len(counts) - 1)
    assert received(text, "worker") == {
        "in_place": large,
        "offered": 2 * rounds,
        "in_pool": 0,
        "in_frames": 2 * rounds,
    }, text
    assert received(text, "server")["in_pool"] == large, text


@pytest.mark.transports("tcp", "rdma")
def test_places_that_are_not_in_the_cache(run_van: Run) -> None:
    """Large ones are registered for a message, the others copied there: they come all the same."""
    run_van("--places", "plain", "--rounds", "10", "--workers", "2", *sizes(EDGES + LARGE))


@pytest.mark.transports("tcp", "rdma", "rdma-one-plane", "rdma-shallow")
def test_what_is_given_up_is_not_written(run_van: Run) -> None:
    """Whatever has become of the values by then."""
    for window in ("1", "64"):
        text = run_van(
            *("--places", "cached", "--abandon", "3", "--rounds", "8", "--workers", "2"),
            *("--window", window),
            *sizes([100, 20_000, 300_000, 1_000_003] * 4),
        )
        given_up = [int(found) for found in re.findall(r"gave up (\d+) values", text)]
        assert len(given_up) == 2, text
        assert all(given_up), text


@pytest.mark.transports("rdma")
def test_what_a_stopped_peer_writes_is_given_up(run_van: Run) -> None:
    """The endpoint is broken, after a second: nothing else would keep the peer from writing."""
    text = run_van(
        *("--places", "cached", "--stall", "2", "--rounds", "2000"),
        *("--expect", "was lost"),
        *sizes([100, 20_000]),
        env=AT_ONCE,
    )
    assert "given up did not come in time" in text


@pytest.mark.transports("rdma")
def test_the_job_survives_what_a_stopped_peer_writes(run_van: Run) -> None:
    """The endpoint has another connection as soon as the peer goes on."""
    text = run_van(*("--places", "cached", "--stall", "2", "--rounds", "8"), *sizes([100, 20_000]))
    assert "made again" in text


@pytest.mark.transports("tcp", "rdma")
def test_a_refused_node_keeps_no_endpoint(run_van: Run, transport: Transport) -> None:
    """The scheduler closes it, though the node is still there."""
    text = run_van("--refused", "3", "--workers", "2", "--rounds", "300", *sizes([100, 20_000]))
    assert text.count("was refused by the scheduler") >= 3, text
    if transport.is_rdma:
        left = re.search(r"scheduler 0: endpoints left: (\d+)", text)
        assert left, text
        assert int(left[1]) <= 3, text


@each
def test_a_server_listens_where_it_is_told(run_van: Run, transport: Transport) -> None:
    port = free_ports(host=transport.host)
    told = ("--kill", "server:0:20", "--expect", f"server 0 ({transport.host}:{port})")
    run_van(*told, "--rounds", "2000", *sizes([100]), env={"BYTEPS_NODE_PORT": str(port)})


@pytest.mark.transports("rdma")
def test_no_memory_is_kept(run_van: Run) -> None:
    """Each value's is registered and let go of, by a thread that nobody waits for."""
    many = ("--window", "100", "--rounds", "10", "--workers", "2")
    run_van(*many, *sizes([10, 5000, 20_000, 300_000]), env={"BYTEPS_RDMA_POOL_BYTES": "0"})


@pytest.mark.transports("rdma", "rdma-one-plane", "rdma-shallow")
@pytest.mark.parametrize("plane", ["data", "control", "served"])
def test_a_broken_plane_is_made_again(run_van: Run, plane: str, transport: Transport) -> None:
    """By either end, amid messages and while it is made again: each answer comes, once, and right.

    Each time but the last is fixed before the next.
    """
    if not transport.has_data_plane and plane != "control":
        pytest.skip("there is no data plane")
    text = run_van(
        *("--break", f"{plane}:2:3", "--rounds", "20", "--workers", "2", "--servers", "2"),
        *("--places", "cached", "--window", "32", "--ping-ms", "5"),
        *sizes([100, 5000, 20_000, 300_000]),
    )
    name = "control" if plane == "control" else "data"
    assert len(re.findall(rf"the {name} connection 0 with server 0 broke", text)) >= 5, text
    assert len(re.findall(rf"the {name} connection 0 with worker 0 broke", text)) >= 5, text
