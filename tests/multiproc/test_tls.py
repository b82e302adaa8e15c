"""Encrypted connections: no peer in between can read or change values, and nodes without
encryption, or with another secret or certificate, get an error."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.children import captured
from tests.multiproc.cluster import (
    END_S,
    Cluster,
    clean_environment,
    server_executable,
    stop,
    wait_all,
)
from tests.multiproc.endings import connections_of, demand_error, start_looping, wait_for_text
from tests.multiproc.test_reconnect import between, resent, server_port, wait_for_rounds


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


class Authority:
    """Signs certificates of nodes; all its files are in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / f"{name}.pem"
        self._folder = folder
        self._name = name
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def node(self, name: str = "node", days: str = "2") -> dict[str, str]:
        """Return the settings of a node with its own certificate, valid for `days` days."""
        key, request, certificate = (
            self._folder / f"{self._name}-{name}.{kind}" for kind in ("key", "csr", "pem")
        )
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name} of {self._name}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-out", certificate),
        )
        return {
            "BYTEPS_TLS_CERT": str(certificate),
            "BYTEPS_TLS_KEY": str(key),
            "BYTEPS_TLS_CA": str(self.certificate),
        }


TLS = {"BYTEPS_TLS": "1"}
SETTINGS = {**TLS, "BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_CONNECTIONS": "2"}
ONE = b"\x00\x00\x80\x3f"
"""1.0, the only value that failures:loop pushes."""


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return an authority that no node trusts, unless a test makes a node trust it."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.mark.parametrize("how", ["secret", "certificates", "certificates-alone"])
def test_sums_are_the_same(
    make_cluster: Callable[..., Cluster], authority: Authority, how: str
) -> None:
    env = dict(SETTINGS) if how == "secret" else {**SETTINGS, **authority.node()}
    if how == "certificates-alone":
        env |= {"BYTEPS_AUTH": "0", "BYTEPS_SECRET": ""}
    make_cluster(workers=2, servers=2, env=env).run("failures:checked", rounds=10)


def overheard(cluster: Cluster) -> bytes:
    """Return the bytes that workers have pushed while the server is stopped and does not read."""
    (server,) = cluster.servers
    port = server_port(cluster, 0)
    deadline = time.monotonic() + END_S
    while True:
        assert time.monotonic() < deadline, "whenever the server was stopped, nothing was under way"
        stop(server)
        connections = [
            connection for connection in connections_of(server.pid) if connection.local == port
        ]
        longest = max((connection.waiting(1 << 20) for connection in connections), key=len)
        server.send(signal.SIGCONT)
        if len(longest) > 10_000:
            return longest
        time.sleep(0.01)


@pytest.mark.parametrize("tls", ["0", "1"])
def test_a_listener_in_between_reads_nothing(
    make_cluster: Callable[..., Cluster], tls: str
) -> None:
    """A listener in between reads the values only without encryption."""
    cluster = start_looping(make_cluster, {"BYTEPS_TLS": tls}, workers=2, servers=1)
    heard = overheard(cluster)
    assert (ONE * 16 in heard) == (tls == "0")


def test_bytes_inserted_in_between_break_the_connection(
    make_cluster: Callable[..., Cluster],
) -> None:
    """Bytes inserted into a connection break it, and are in no sum."""
    cluster = make_cluster(workers=2, servers=1, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    broken = 0
    deadline = time.monotonic() + END_S
    while broken < 3:
        assert time.monotonic() < deadline, "no connection broke"
        worker = cluster.workers[f"worker {broken % 2}"]
        for connection in between(worker.pid, server_port(cluster, 0)):
            try:
                connection.insert(ONE * 100)
            except OSError:  # The socket buffer is full, or the connection has just broken.
                continue
        wait_for_rounds(cluster, 1)
        text = "".join(process.text for process in cluster.everyone())
        broken = len(re.findall("made again after", text))
    cluster.go("end")
    cluster.finish()


def test_connections_that_break(make_cluster: Callable[..., Cluster]) -> None:
    """Connections to servers and the scheduler break in the middle of rounds. Nodes restore them,
    encrypted."""
    cluster = make_cluster(workers=2, servers=2, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    broken = 0
    deadline = time.monotonic() + END_S
    while broken < 6 or not resent(cluster):
        assert time.monotonic() < deadline, "whenever a connection broke, nothing was under way"
        worker = cluster.workers[f"worker {broken % 2}"]
        port = cluster.port if broken == 5 else server_port(cluster, broken // 2 % 2)
        for connection in between(worker.pid, port):
            connection.reset()
        broken += 1
        wait_for_rounds(cluster, 1)
    cluster.go("end")
    cluster.finish()


def refused(
    make: Callable[..., Cluster], ours: dict[str, str], theirs: dict[str, str]
) -> tuple[Cluster, str]:
    """Start a scheduler with the first settings, and a worker and a server with the second. Return
    the server's last output."""
    cluster = make(workers=1, servers=1, env={"BYTEPS_START_TIMEOUT_S": "60", **ours})
    cluster.start_scheduler()
    changes: dict[str, str | None] = dict.fromkeys(ours.keys() - theirs.keys())
    worker = cluster.start_worker(0, "failures:init_only", env={**changes, **theirs})
    cluster.set_env({**dict.fromkeys(changes, ""), **theirs})
    server = cluster.start_server()
    wait_all([worker, server], END_S)
    return cluster, server.text


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "noted"),
    [
        (
            TLS,
            {**TLS, "BYTEPS_SECRET": "another secret, as long"},
            "different job secrets.*BYTEPS_SECRET_FILE",
            "different job secrets",
        ),
        (
            TLS,
            {"BYTEPS_TLS": "0"},
            "encrypts its connections, and the peer does not: set BYTEPS_TLS=1 on every node",
            "does not encrypt, and this job does: set BYTEPS_TLS=1",
        ),
        (
            {"BYTEPS_TLS": "0"},
            TLS,
            "does not encrypt, and this node does: set BYTEPS_TLS=1 on every node",
            "encrypts its connections, and this node does not: set BYTEPS_TLS=1",
        ),
    ],
    ids=["another-secret", "not-there", "not-here"],
)
def test_who_does_not_fit_is_told_and_noted(
    make_cluster: Callable[..., Cluster],
    ours: dict[str, str],
    theirs: dict[str, str],
    error: str,
    noted: str,
) -> None:
    cluster, said = refused(make_cluster, ours, theirs)
    demand_error(cluster.workers["worker 0"], error)
    assert re.search(error, said), said
    wait_for_text(cluster.scheduler, "refused a connection: .*" + noted)


@pytest.mark.parametrize(
    ("change", "error", "noted"),
    [
        ("certificate", "does not accept this node's certificate", "certificate is not accepted"),
        ("authority", "certificate is not accepted", "does not accept this node's certificate"),
        ("secret", "BYTEPS_TLS_", "BYTEPS_TLS_|encryption failed"),
        ("expired", "does not accept this node's certificate.*expired", "expired"),
    ],
)
def test_certificates_that_do_not_fit(
    make_cluster: Callable[..., Cluster],
    authority: Authority,
    stranger: Authority,
    change: str,
    error: str,
    noted: str,
) -> None:
    """`secret`: the scheduler has certificates, and these nodes use the secret."""
    good = {**TLS, **authority.node()}
    bad = dict(good)
    if change == "certificate":
        bad |= {**stranger.node(), "BYTEPS_TLS_CA": good["BYTEPS_TLS_CA"]}
    elif change == "authority":
        bad["BYTEPS_TLS_CA"] = str(stranger.certificate)
    elif change == "expired":
        bad |= authority.node("late", days="-1")
    else:
        bad = dict(TLS)
    cluster, said = refused(make_cluster, good, bad)
    demand_error(cluster.workers["worker 0"], error)
    assert re.search(error, said), said
    wait_for_text(cluster.scheduler, "refused a connection: .*" + noted)


def test_a_certificate_does_not_replace_the_secret(
    make_cluster: Callable[..., Cluster], authority: Authority
) -> None:
    """A certificate alone is not sufficient if the job also has a secret."""
    files = {**TLS, **authority.node()}
    cluster, said = refused(
        make_cluster, files, {**files, "BYTEPS_SECRET": "another, as long as it"}
    )
    demand_error(cluster.workers["worker 0"], "different job secrets")
    assert "different job secrets" in said


def files_of(authority: Authority, stranger: Authority, which: str) -> dict[str, str]:
    good = authority.node()
    return {
        "missing": {**good, "BYTEPS_TLS_CERT": "/nowhere/cert.pem"},
        "no-pem": {**good, "BYTEPS_TLS_CA": "/etc/hostname"},
        "other-key": {**good, "BYTEPS_TLS_KEY": stranger.node()["BYTEPS_TLS_KEY"]},
        "some": {"BYTEPS_TLS_CERT": good["BYTEPS_TLS_CERT"]},
        "all": good,
        "none": {},
    }[which]


@pytest.mark.parametrize(
    ("files", "env", "error"),
    [
        ("missing", TLS, "BYTEPS_TLS_CERT=/nowhere/cert.pem cannot be used: No such file"),
        ("no-pem", TLS, "BYTEPS_TLS_CA=/etc/hostname cannot be used"),
        ("other-key", TLS, "BYTEPS_TLS_KEY=.* cannot be used: .*mismatch"),
        ("some", TLS, "go together"),
        ("all", {"BYTEPS_TLS": "0"}, "nothing would be encrypted; set BYTEPS_TLS=1"),
        ("none", {**TLS, "BYTEPS_AUTH": "0", "BYTEPS_SECRET": ""}, "needs the job's secret, or"),
        ("none", {**TLS, "DMLC_ENABLE_RDMA": "ibverbs"}, "by RDMA, which no process can encrypt"),
    ],
    ids=["missing", "no-pem", "other-key", "some", "not-on", "nobody", "rdma"],
)
def test_settings_that_do_not_fit(
    authority: Authority,
    stranger: Authority,
    run_dir: Path,
    files: str,
    env: dict[str, str],
    error: str,
) -> None:
    """Settings are checked before anything is opened. The exit status is 2."""
    address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "0"}
    sizes = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
    settings = {**files_of(authority, stranger, files), **env, **address, **sizes}
    ended = captured(
        [server_executable(), "--role", "scheduler"],
        END_S,
        env={**clean_environment(run_dir), **settings},
    )
    assert ended.returncode == 2, ended.stderr
    assert re.search(error, ended.stderr), ended.stderr
