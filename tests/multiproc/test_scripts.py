"""scheduler.sh, server.sh and worker.sh: their settings, and a cluster started with them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from scripts.children import captured
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    RUN_S,
    START_S,
    wait_all,
    wait_for_file,
)
from tests.multiproc.scripted import (
    GOOD,
    SCRIPTS,
    Scripted,
    ask,
    checks,
    environment,
    scripted,
)

__all__ = ["scripted"]  # pytest finds this fixture by its name here.


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("role", list(GOOD))
def test_help_names_every_setting(run_dir: Path, role: str, flag: str) -> None:
    said = ask(run_dir, role, flag)
    assert said.returncode == 0
    assert said.stdout.startswith("Usage:")
    source = (SCRIPTS / f"{role}.sh").read_text()
    options = set(re.findall(r"^ *(--[a-z-]+)\)", source, re.MULTILINE)) - {"--"}
    assert "--servers" in options
    # The scheduler listens on the address of --host; another setting would have no effect.
    assert ({"--node-host", "--interface"} <= options) == (role != "scheduler")
    variables = set(re.findall(r"\b((?:DMLC|BYTEPS|SERVER)_[A-Z_]+)\b", source)) - {"DMLC_ROLE"}
    for setting in options | variables:
        assert setting in said.stdout, f"{setting} is not in the help"


def without(arguments: list[str], flag: str) -> list[str]:
    at = arguments.index(flag)
    return arguments[:at] + arguments[at + 2 :]


@pytest.mark.parametrize(
    ("role", "flag"),
    [
        *(("scheduler", flag) for flag in ("--host", "--port", "--workers", "--servers")),
        *(("server", flag) for flag in ("--scheduler", "--workers", "--servers")),
        ("worker", "--servers"),
        ("worker", "--"),
    ],
)
def test_missing_setting(run_dir: Path, role: str, flag: str) -> None:
    said = ask(run_dir, role, *without(GOOD[role], flag))
    assert said.returncode == 2
    assert "missing" in said.stderr
    assert flag in said.stderr


@pytest.mark.parametrize("role", list(GOOD))
def test_secret(run_dir: Path, role: str) -> None:
    """The scripts start only with a secret, or if it is explicitly disabled. They never show it."""
    command = ["bash", str(SCRIPTS / f"{role}.sh"), "--dry-run", *GOOD[role]]
    env = environment(run_dir)
    secret = env.pop("BYTEPS_SECRET")

    def ask_with(**settings: str) -> subprocess.CompletedProcess[str]:
        return captured(command, START_S, env={**env, **settings})

    said = ask_with()
    assert said.returncode == 2
    assert "--secret-file" in said.stderr and "--new-secret" in said.stderr
    said = ask_with(BYTEPS_SECRET_FILE="/nowhere")
    assert said.returncode == 2
    assert "'/nowhere'" in said.stderr
    said = ask_with(BYTEPS_SECRET=secret)
    assert said.returncode == 0
    assert secret not in said.stdout + said.stderr
    assert ask_with(BYTEPS_AUTH="0").returncode == 0


FLAGS = (
    ("scheduler", "--workers"),
    ("scheduler", "--servers"),
    ("server", "--workers"),
    ("server", "--instances"),
    ("worker", "--servers"),
)


@pytest.mark.parametrize(
    ("role", "flag", "value"),
    [
        *((*flag, "1x") for flag in FLAGS),
        *(("server", "--servers", n) for n in ("", "x", "0", "-1", "1.5", "9" * 11, "0x10", "1 2")),
    ],
)
def test_bad_number(run_dir: Path, role: str, flag: str, value: str) -> None:
    good = without(GOOD[role], flag) if flag in GOOD[role] else GOOD[role]
    said = ask(run_dir, role, flag, value, *good)
    assert said.returncode == 2
    assert flag in said.stderr
    assert value in said.stderr


@pytest.mark.parametrize(
    ("role", "arguments", "pattern"),
    [
        ("scheduler", ["--port", "65536"], "65535"),
        ("scheduler", ["--port", "0"], "--port-file"),
        ("scheduler", ["--host", "a b"], "'a b'"),
        ("scheduler", ["--nonsense"], "--nonsense"),
        ("scheduler", ["--workers"], "--workers needs a value"),
        ("server", ["--scheduler", "host"], "HOST:PORT"),
        ("server", ["--scheduler", "host:0"], "65535"),
        ("server", ["--scheduler", ":9000"], "HOST:PORT"),
        ("server", ["--interface", "no-such-nic"], "no-such-nic"),
        ("server", ["--instances", "2"], "more than"),
        ("server", ["--numa-nodes", "a"], "'a'"),
        ("server", ["stray"], "stray"),
        ("worker", ["--scheduler", "host:99999"], "65535"),
        ("worker", ["--interface", "no-such-nic"], "no-such-nic"),
        ("worker", ["train.py"], "after --"),
        ("worker", ["--local-servers", "x"], "--local-servers"),
        ("worker", ["--local-servers", "2"], "more than the job's --servers 1"),
        ("worker", ["--local-servers", "1", "--nnodes", "1:4"], "needs DMLC_NUM_WORKER"),
    ],
)
def test_bad_setting(run_dir: Path, role: str, arguments: list[str], pattern: str) -> None:
    good = GOOD[role]
    at = good.index("--") if "--" in good else len(good)
    said = ask(run_dir, role, *good[:at], *arguments, *good[at:])
    assert said.returncode == 2
    assert pattern in said.stderr


def test_numa_nodes_without_numactl(run_dir: Path) -> None:
    env = {**environment(run_dir), "PATH": str(run_dir / "bin")}
    (run_dir / "bin").mkdir()
    for tool in ("bash", "dirname"):
        (run_dir / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    command = ["/bin/bash", str(SCRIPTS / "server.sh"), *GOOD["server"], "--numa-nodes", "0"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_S)
    assert said.returncode == 2
    assert "numactl" in said.stderr


def test_cluster_of_scripts(scripted: Scripted) -> None:
    scheduler, server = scripted.start_nodes(workers=2, servers=2)
    worker = scripted.start_worker(servers=2, ranks=2, mode="once")
    wait_all([worker, server, scheduler], RUN_S)
    for process in (worker, server, scheduler):
        assert process.wait(0) == 0, process.text
    for rank in range(2):
        assert f"rank {rank} of 2: sums are right" in worker.text
    scripted.demand_no_process()


def test_interrupt_ends_all_that_a_script_started(scripted: Scripted) -> None:
    """SIGINT goes to worker.sh alone and ends its ranks. The others then end by themselves."""
    scheduler, server = scripted.start_nodes(workers=1, servers=2)
    worker = scripted.start_worker(servers=2, ranks=1, mode="forever")
    wait_for_file(scripted.folder / "ready.0", RUN_S, [worker])
    worker.send(signal.SIGINT)
    wait_all([worker, server, scheduler], RUN_S)
    assert worker.wait(0) == 130
    # Status 0 is possible, too: a rank that has enough time leaves the job normally.
    assert server.wait(0) in (0, 1), server.text
    assert scheduler.wait(0) == server.wait(0), scheduler.text
    scripted.demand_no_process()


@pytest.mark.parametrize("replaced", ["0", "60"], ids=["all end", "others go on"])
def test_an_instance_is_killed_before_the_script_waits(scripted: Scripted, replaced: str) -> None:
    """bash reports such a death while it runs another command. After that `wait -n` does not report
    it."""
    hook, started = scripted.folder / "hook.sh", scripted.folder / "instance"
    hook.write_text(f"""
        if [[ ${{0##*/}} == server.sh ]]; then
          wait() {{  # the first one begins when an instance is gone, and bash has said so
            if [[ -z ${{was_killed:-}} ]]; then
              was_killed=1
              local victim
              victim=$(jobs -rp | head -n 1)
              echo "$victim" >{started}.part && mv {started}.part {started}
              while kill -0 "$victim" 2>/dev/null; do command sleep 0.02; done
            fi
            builtin wait "$@"
          }}
        fi
        """)
    env = {"BYTEPS_REPLACE_SERVERS_S": replaced, "BASH_ENV": str(hook)}
    scheduler, server = scripted.start_nodes(workers=1, servers=2, env=env)
    victim = int(wait_for_file(started, RUN_S, [server]))
    os.kill(victim, signal.SIGKILL)
    if replaced == "0":
        assert server.wait(RUN_S) == 137, server.text
        assert "ended with status 137; ending the others" in server.text
    else:
        deadline = time.monotonic() + RUN_S
        while "ended with status 137; the others go on" not in server.text:
            assert server.running and time.monotonic() < deadline, server.text
            time.sleep(0.02)
        server.send(signal.SIGTERM)
        assert server.wait(END_S) == 143, server.text
    scheduler.send(signal.SIGTERM)
    assert scheduler.wait(END_S) in (1, 143), scheduler.text
    scripted.demand_no_process()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_signal_at_scheduler_and_server(
    scripted: Scripted, number: signal.Signals, status: int
) -> None:
    scheduler, server = scripted.start_nodes(workers=1, servers=2)
    scripted.wait_for_instances(2)
    server.send(number)
    assert server.wait(END_S) == status, server.text
    assert "Killed" not in server.text, "the instances ignored SIGTERM"
    scheduler.send(number)
    assert scheduler.wait(END_S) in (status, -number), scheduler.text
    scripted.demand_no_process()


@pytest.mark.parametrize("role", list(GOOD))
def test_dry_run_prints_what_a_shell_can_run(run_dir: Path, role: str) -> None:
    arguments = ["--dry-run", *GOOD[role]]
    said = ask(run_dir, role, *arguments)
    assert said.returncode == 0, said.stderr
    shown = said.stdout.replace("\\\n", "").split()
    assert f"DMLC_ROLE={role}" in shown
    assert f"DMLC_PS_ROOT_URI={LOOPBACK}" in shown
    program = "byteps.launcher.leaving" if role == "worker" else "byteps-server"
    assert any(word.endswith(program) for word in shown)


def test_dry_run_shows_each_instance(run_dir: Path) -> None:
    wanted = ["--servers", "2", "--instances", "2", "--dry-run"]
    said = ask(run_dir, "server", *without(GOOD["server"], "--servers"), *wanted)
    assert said.returncode == 0, said.stderr
    assert re.findall(r"env BYTEPS_LOCAL_RANK=(\d)", said.stdout) == ["0", "1"]
    assert "interface lo (--interface), address 127.0.0.1 (--node-host)" in said.stderr


@pytest.mark.parametrize(
    ("scheduler", "host"), [("[::1]:9", "::1"), ("[fe80::1%lo]:9", "fe80::1%lo")]
)
def test_ipv6_stands_in_brackets(run_dir: Path, scheduler: str, host: str) -> None:
    rest = without(GOOD["server"], "--scheduler")
    said = ask(run_dir, "server", "--scheduler", scheduler, *rest, "--dry-run")
    assert said.returncode == 0, said.stderr
    assert f"DMLC_PS_ROOT_URI={host} " in said.stdout
    assert "DMLC_PS_ROOT_PORT=9 " in said.stdout


def test_ipv6_without_brackets_is_refused(run_dir: Path) -> None:
    rest = without(GOOD["server"], "--scheduler")
    said = ask(run_dir, "server", "--scheduler", "::1:9", *rest, "--dry-run")
    assert said.returncode == 2
    assert "[IPV6]:PORT" in said.stderr


def test_check_of_a_scheduler(run_dir: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = str(listener.getsockname()[1])
        rest = without(GOOD["scheduler"], "--port")
        said = ask(run_dir, "scheduler", "--check", "--port", port, *rest)
    assert said.returncode == 1
    assert checks(said)[-1].startswith(f"WRONG the scheduler cannot listen on 127.0.0.1:{port}")
    said = ask(run_dir, "scheduler", "--check", "--port", port, *rest)
    assert said.returncode == 0
    assert checks(said)[-1] == f"ok    it can listen at 127.0.0.1:{port} by TCP"


def test_check_tells_of_a_scheduler_that_is_not_there(run_dir: Path) -> None:
    for role in ("server", "worker"):
        arguments = [word for word in GOOD[role] if word not in ("--", "script.py")]
        said = ask(run_dir, role, "--check", *arguments)
        assert said.returncode == 3
        assert "WRONG the scheduler (127.0.0.1:9) did not answer" in said.stdout
        assert "start it first" in said.stdout
    rest = without(GOOD["server"], "--scheduler")
    said = ask(run_dir, "server", "--check", "--scheduler", "no.such.host.invalid:9", *rest)
    assert said.returncode == 1
    assert "no.such.host.invalid" in said.stdout


def test_check_asks_the_scheduler(scripted: Scripted) -> None:
    port_file = scripted.folder / "port"
    sizes = ["--workers", "2", "--servers", "2"]
    where = ["--host", LOOPBACK, "--port", "0", "--port-file", str(port_file)]
    scheduler = scripted.start("scheduler", *where, *sizes)
    port = int(wait_for_file(port_file, START_S, [scheduler]).split()[1])
    address = ["--scheduler", f"{LOOPBACK}:{port}"]

    def check(role: str, *arguments: str) -> tuple[int, str]:
        said = ask(scripted.folder, role, "--check", *address, *arguments)
        return said.returncode, checks(said)[-1]

    status, last = check("server", *sizes, "--instances", "2")
    assert status == 0 and "would admit 2 servers of this machine: 0 of 2 servers" in last
    status, last = check("server", "--workers", "3", "--servers", "2")
    assert status == 1 and "it was started for 3 workers, the scheduler for 2 workers" in last
    status, last = check("worker", "--servers", "2", "--nproc-per-node", "2")
    assert status == 0 and "would admit 2 workers of this machine" in last
    ranks = ["--servers", "2", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2"]
    status, last = check("worker", *ranks)
    assert status == 1 and "it was started for 4 workers" in last
    status, last = check("worker", "--servers", "2", "--nproc-per-node", "2", "--", "no-script.py")
    assert status == 1
    assert scheduler.running
