"""Every log line has time, severity, process and source, as text or as JSON. A stalled reader of
the log stops no process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.multiproc.cluster import (
    END_S,
    START_S,
    Cluster,
    Process,
    clean_environment,
    server_executable,
    wait_for_file,
)
from tests.multiproc.endings import AT_ONCE, wait_for_text

TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) (?P<severity>[A-Z]+) (?P<role>\w+) "
    r"(?P<rank>\d+|-) (?P<host>\S+) (?P<source>[\w.<>-]+:\d+): (?P<message>.*)"
)
MEMBERS = {"time", "severity", "role", "rank", "host", "source", "message"}
SEVERITIES = {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"}


def parse(line: str, form: str) -> dict[str, str | int | None]:
    if form == "json":
        fields = json.loads(line)
        assert set(fields) == MEMBERS, line
        assert fields["rank"] is None or isinstance(fields["rank"], int), line
        return fields
    match = TEXT.fullmatch(line)
    assert match is not None, f"no line of the log: {line!r}"
    fields = match.groupdict()
    return {**fields, "rank": None if fields["rank"] == "-" else int(fields["rank"])}


def parse_all(text: str, form: str) -> list[dict[str, str | int | None]]:
    records = [parse(line, form) for line in text.splitlines()]
    now = datetime.now(UTC)
    for fields in records:
        assert fields["severity"] in SEVERITIES, fields
        assert fields["host"] == socket.gethostname(), fields
        written = datetime.fromisoformat(str(fields["time"]))
        assert now - timedelta(hours=1) < written <= now + timedelta(seconds=1), fields
    return records


@pytest.mark.parametrize("form", ["text", "json"])
def test_every_line_of_a_job(make_cluster: Callable[..., Cluster], form: str) -> None:
    env = {
        "BYTEPS_LOG_FORMAT": form,
        "BYTEPS_LOG_LEVEL": "DEBUG",
        "PS_VERBOSE": "1",
        "BYTEPS_UNHEARD_OF": "1",
        "BYTEPS_PARTITION_BYTES": "4096",
    }
    cluster = make_cluster(workers=2, servers=1, env=env)
    cluster.start("lifecycle:known")
    cluster.wait_mark("done", [0, 1])
    cluster.go("end")
    cluster.finish()
    processes: list[tuple[Process, str, int]] = [
        (cluster.workers["worker 0"], "worker", 0),
        (cluster.workers["worker 1"], "worker", 1),
        (cluster.servers[0], "server", 0),
        (cluster.scheduler, "scheduler", 0),
    ]
    for process, role, rank in processes:
        lines = parse_all(process.text, form)
        assert lines, process.title
        assert {fields["role"] for fields in lines} == {role}, lines
        # A server has no rank until it has joined.
        assert {fields["rank"] for fields in lines} <= {rank, None if role == "server" else rank}
        unknown = [line for line in lines if "BYTEPS_UNHEARD_OF" in str(line["message"])]
        assert [line["severity"] for line in unknown] == ["WARNING"], lines
    pushes = [f for f in parse_all(cluster.workers["worker 1"].text, form) if f["rank"] == 1]
    assert any(str(f["message"]).startswith("PUSH 'large' partition 2 round 1") for f in pushes)
    admitted = [str(f["message"]) for f in parse_all(cluster.scheduler.text, form)]
    assert any(message.startswith("admitted server 0") for message in admitted), admitted


def test_the_error_a_server_ends_with(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env={"BYTEPS_START_TIMEOUT_S": "0.5"})
    cluster.port = 1
    server = cluster.start_server()
    assert server.wait(START_S) == 1
    said, line = parse_all(server.text, "text")
    assert str(said["message"]).startswith("listening: server ")
    assert (line["severity"], line["role"], line["rank"]) == ("ERROR", "server", None)
    assert "the scheduler (127.0.0.1:1)" in str(line["message"])
    # The source is the place of the error, not of the code that wrote the line.
    assert str(line["source"]).startswith("node_membership.cc:")


def messages(process: Process) -> list[str]:
    lines = parse_all(process.text, "text")
    assert {line["severity"] for line in lines} <= {"INFO"}, lines
    return [str(line["message"]) for line in lines]


def demand_in_order(said: list[str], patterns: list[str]) -> None:
    """Check that each pattern matches a whole message, and that no message is left over."""
    for message, pattern in zip(said, patterns, strict=False):
        assert re.fullmatch(pattern, message), f"{message!r} is not {pattern!r}\n" + "\n".join(said)
    assert len(said) == len(patterns), said


def test_how_a_job_goes(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env={"BYTEPS_PARTITION_BYTES": "4096"})
    cluster.start("lifecycle:known")
    cluster.wait_mark("done", [0, 1])
    cluster.go("end")
    cluster.finish()
    version = r"byteps \S+ at 127\.0\.0\.1:\d+, TCP, not encrypted"
    said = messages(cluster.scheduler)
    [first, *joined] = said[:5]
    demand_in_order([first], [rf"listening: scheduler of {version}, for 2 workers and 2 servers"])
    for kind, address in (("server", r"127\.0\.0\.1:\d+"), ("worker", r"127\.0\.0\.1")):
        ours = [line for line in joined if line.startswith(f"joined: {kind}")]
        expected = [rf"joined: {kind} {n} of 2, {address} \(rank [01]\)" for n in (1, 2)]
        demand_in_order(ours, expected)
    left = [rf"left: worker [01], 127\.0\.0\.1; {n} of 2 workers still there" for n in (1, 0)]
    done = "done: every worker left in order"
    complete = "admitted: the job is complete, 2 workers and 2 servers"
    demand_in_order(said[5:], [complete, *left, done])
    for rank, server in enumerate(cluster.servers):
        scheduler = rf"127\.0\.0\.1:{cluster.port}"
        # The report of the last worker may be overtaken by the end of the job.
        said = [line for line in messages(server) if not line.startswith("left: worker ")]
        demand_in_order(
            sorted(said),
            [
                r"admitted: the job is complete; this is server [01], for 2 workers",
                rf"admitted: the scheduler at {scheduler} has taken this server; .*",
                "done: every worker left in order",
                rf"listening: server of {version}, scheduler {scheduler}",
            ],
        )
        assert not cluster.workers[f"worker {rank}"].text, "workers are quiet unless they are asked"


def test_the_scheduler_logs_which_nodes_are_missing(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=3, servers=2)
    cluster.start_scheduler()
    server = cluster.start_server()
    cluster.start_worker(1, "lifecycle:known")
    pattern = (
        r"waiting for worker 0, worker 2, 1 server; 1 of 2 servers and 1 of 3 workers are here\n"
    )
    wait_for_text(cluster.scheduler, pattern)
    server.send(signal.SIGKILL)


def test_a_higher_level_is_quiet(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env={"BYTEPS_LOG_LEVEL": "WARNING"})
    cluster.start("lifecycle:known")
    cluster.wait_mark("done", [0])
    cluster.go("end")
    cluster.finish()
    assert not cluster.scheduler.text + cluster.servers[0].text


def python(make_cluster: Callable[..., Cluster], program: str, form: str | None = None) -> str:
    cluster = make_cluster(workers=1, servers=1)
    head = f"import logging\nfrom byteps import logs\nFORM = {form!r}\n"
    said = subprocess.run(
        [sys.executable, "-c", head + program],
        env=clean_environment(cluster.folder),
        capture_output=True, text=True, check=True, timeout=START_S,
    )  # fmt: skip
    return said.stderr


def test_lines_of_python(make_cluster: Callable[..., Cluster]) -> None:
    program = """
logs.install(3, form=FORM)
logs.install(4, form=FORM)  # as after a fork: no line comes twice
logging.getLogger("byteps.torch.engine").warning("one\\ntwo %s", "\\"quoted\\"")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("megatron.core.distributed.dpu_reduce.plan").exception("three")
"""
    text = parse_all(python(make_cluster, program, "text"), "text")
    assert [line["message"] for line in text[:2]] == ["one", 'two "quoted"']
    assert {(line["role"], line["rank"]) for line in text} == {("worker", 4)}
    assert "ZeroDivisionError" in str(text[-1]["message"])
    lines = parse_all(python(make_cluster, program, "json"), "json")
    assert [line["severity"] for line in lines] == ["WARNING", "ERROR"]
    assert lines[0]["message"] == 'one\ntwo "quoted"'


def test_a_program_with_logging_of_its_own_keeps_it(make_cluster: Callable[..., Cluster]) -> None:
    program = """
logging.basicConfig(format="mine: %(message)s")
logs.install(0, form=FORM)
logging.getLogger("byteps.torch.engine").warning("hello")
"""
    assert python(make_cluster, program) == "mine: hello\n"
    [line] = parse_all(python(make_cluster, program, "json"), "json")
    assert line["message"] == "hello"


# A stalled reader of the log stops neither a server nor its end.


LOUD = {
    **AT_ONCE, "BYTEPS_LOG_LEVEL": "DEBUG", "PS_VERBOSE": "2", "BYTEPS_PEER_TIMEOUT_S": "5"
}  # fmt: skip


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe that is full."""
    reader, writer = os.pipe()
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        pass
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def start(
    cluster: Cluster, role: str, stderr: int, port_file: Path | None = None
) -> subprocess.Popen[bytes]:
    arguments = ["--port-file", str(port_file)] if port_file is not None else []
    return subprocess.Popen(
        [server_executable(), "--role", role, "--die-with-parent", *arguments],
        env=cluster.node_environment(), stdin=subprocess.DEVNULL, stderr=stderr,
    )  # fmt: skip


@pytest.fixture
def stalled(
    make_cluster: Callable[..., Cluster], full_pipe: tuple[int, int]
) -> Iterator[tuple[Cluster, subprocess.Popen[bytes]]]:
    """Start a job of one worker that sums; the log of its server is not read."""
    cluster = make_cluster(workers=1, servers=1, env=LOUD)
    cluster.start_scheduler()
    server = start(cluster, "server", full_pipe[1])
    yield cluster, server
    if server.poll() is None:
        server.kill()
    server.wait(END_S)


def test_a_job_goes_on(stalled: tuple[Cluster, subprocess.Popen[bytes]]) -> None:
    cluster, server = stalled
    cluster.start_worker(0, "lifecycle:known")
    cluster.wait_mark("done", [0])
    cluster.go("end")
    assert cluster.workers["worker 0"].wait(END_S) == 0
    assert server.wait(END_S) == 0
    cluster.demand_checks()


def test_a_signal_ends_it(stalled: tuple[Cluster, subprocess.Popen[bytes]]) -> None:
    cluster, server = stalled
    cluster.start_worker(0, "failures:loop")
    cluster.wait_mark("looping", [0])
    server.send_signal(signal.SIGTERM)
    assert server.wait(END_S) == 143


def test_a_scheduler_with_a_full_pipe(
    make_cluster: Callable[..., Cluster], full_pipe: tuple[int, int]
) -> None:
    """The scheduler listens and admits nodes, and a late reader gets all its messages."""
    cluster = make_cluster(workers=1, servers=1)
    reader, writer = full_pipe
    port_file = cluster.folder / "port"
    scheduler = start(cluster, "scheduler", writer, port_file)
    try:
        cluster.port = int(wait_for_file(port_file, START_S).split()[1])
        cluster.start_server()
        cluster.start_worker(0, "lifecycle:known")
        cluster.wait_mark("done", [0])
        text = b""
        while b"the job is complete" not in text:
            text += os.read(reader, 4096)
        assert b"INFO scheduler 0" in text and b"dropped" not in text
        cluster.go("end")
        assert scheduler.wait(END_S) == 0
    finally:
        if scheduler.poll() is None:
            scheduler.kill()
        scheduler.wait(END_S)
