"""cluster.sh: a whole job on a list of hosts, up, seen, and down without a trace."""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests.multiproc.cluster import LOOPBACK, REPOSITORY, RUN_S, START_S, clean_environment

SCRIPT = REPOSITORY / "scripts/cluster.sh"
# What ssh does, without a network: the command goes to a shell, the host into a file.
SSH = """#!/bin/sh
echo "$1" >>"$0.hosts"
shift
exec sh -c "$*"
"""
HOSTS = f"""# the machines of this test
scheduler {LOOPBACK}
server    {LOOPBACK} 2   # two processes
worker    me@{LOOPBACK}
worker    {LOOPBACK}
"""


class Job:
    """A job with a name of its own, on hosts that are all this machine."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.hosts = folder / "hosts.txt"
        self.hosts.write_text(HOSTS)
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH)
        self.ssh.chmod(0o755)
        self.env = {**clean_environment(folder), "CLUSTER_SSH": str(self.ssh), "TMPDIR": "/tmp"}
        # The script makes one.
        del self.env["BYTEPS_SECRET"]

    @property
    def left(self) -> Path:
        return Path(f"/tmp/megatron-byteps-{os.geteuid()}-{self.name}")

    def run(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, action, self.hosts, "--name", self.name, *words],
            env=self.env, capture_output=True, text=True, check=False, timeout=RUN_S,
        )  # fmt: skip


@pytest.fixture
def job(run_dir: Path) -> Iterator[Job]:
    made = Job(run_dir)
    yield made
    made.run("down")


def up(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    # Not in a row: the status of the job is at the port after the scheduler's.
    return job.run("up", "--port", str(free_ports(2)), "--master-port", str(free_ports()), *words)


def wait_for(job: Job, pattern: str, count: int) -> str:
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        said = job.run("status").stdout
        if len(re.findall(pattern, said, re.M)) == count:
            return said
        time.sleep(0.2)
    raise AssertionError(said + job.run("logs").stdout)


def test_a_job_from_up_to_down(job: Job, run_dir: Path) -> None:
    program = run_dir / "sum.py"
    program.write_text(
        "import torch, byteps.torch as bps\n"
        "bps.init()\n"
        "x = bps.push_pull(torch.full((1000,), bps.rank() + 1.0), average=False, name='x')\n"
        "assert torch.equal(x, torch.full((1000,), 3.0)), x\n"
        "print(f'rank {bps.rank()} of {bps.size()} has the sum', flush=True)\n"
        "bps.shutdown()\n"
    )
    said = up(job, "--", str(program))
    assert said.returncode == 0, said.stdout + said.stderr
    assert [line.split()[0] for line in said.stdout.splitlines()] == [
        "scheduler", "server", "worker", "worker",
    ]  # fmt: skip
    secrets = list(job.left.glob("*/secret"))
    assert len({path.read_text() for path in secrets}) == 1 and len(secrets) == 4
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert f"me@{LOOPBACK}" in Path(f"{job.ssh}.hosts").read_text().split()
    # The job is over by itself: all of them ended.
    wait_for(job, r": ended", 4)
    # torchrun may say much at its end, of a store that went with the other agent.
    logs = job.run("logs", "--lines", "1000").stdout
    for rank in (0, 1):
        assert re.search(rf"^worker \S+: .*rank {rank} of 2 has the sum", logs, re.M), logs
    assert job.run("down").returncode == 0
    assert not job.left.exists()
    assert job.run("status").returncode == 1


def alive(group: int) -> list[str]:
    """The processes of a group. What has ended and was not waited for yet is not among them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:  # it has ended since
            continue
        state, _, its_group = text.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state not in "ZX":
            found.append(text)
    return found


def test_down_ends_what_runs(job: Job, run_dir: Path) -> None:
    program = run_dir / "sleep.py"
    program.write_text("import time\ntime.sleep(3600)\n")
    assert up(job, "--", str(program)).returncode == 0
    said = job.run("status")
    assert said.stdout.count("running (pid") == 4, said.stdout
    groups = [int(pid) for pid in re.findall(r"running \(pid (\d+)\)", said.stdout)]
    again = up(job, "--", str(program))
    assert again.returncode == 1
    assert "runs already" in again.stdout
    assert job.run("down").returncode == 0
    assert not job.left.exists()
    assert not [line for group in groups for line in alive(group)]


def test_a_host_that_cannot_be_reached_undoes_the_rest(job: Job, run_dir: Path) -> None:
    job.ssh.write_text(SSH.replace("shift\n", '[ "$1" = 10.9.9.9 ] && exit 255\nshift\n', 1))
    job.hosts.write_text(f"{HOSTS}worker 10.9.9.9\n")
    said = up(job, "--", "nothing.py")
    assert said.returncode == 1
    assert "could not start worker 10.9.9.9" in said.stderr
    assert not job.left.exists()


def test_dry_run_starts_nothing(job: Job) -> None:
    said = job.run("up", "--dry-run", "--nproc-per-node", "4", "--", "train.py", "--lr", "1 e")
    assert said.returncode == 0
    lines = said.stdout.splitlines()
    assert "--workers 8 --servers 2" in lines[0]
    assert "--instances 2" in lines[1]
    assert "--node-rank 0" in lines[2] and "--node-rank 1" in lines[3]
    assert lines[3].endswith(r"-- train.py --lr 1\ e")
    assert "--keep" not in said.stdout and "--max-restarts" not in said.stdout
    assert not job.left.exists()


def test_encryption_is_asked_of_every_process(job: Job) -> None:
    files = {f"BYTEPS_TLS_{what}": f"/etc/{what}.pem" for what in ("CERT", "KEY", "CA")}
    plain = dict(job.env)
    for flag, env in (("--tls", {}), ("--tls", files), ("", {"BYTEPS_TLS": "1"}), ("", {})):
        words = [flag] if flag else []
        job.env = {**plain, **env}
        said = job.run("up", "--dry-run", *words, "--", "train.py")
        assert said.returncode == 0
        for line in said.stdout.splitlines():
            assert ("BYTEPS_TLS=1" in line) == bool(flag or env)
            assert all((f"{name}={path}" in line) == (env == files) for name, path in files.items())


def test_spares_are_no_servers_of_the_job(job: Job) -> None:
    job.hosts.write_text(HOSTS + f"spare {LOOPBACK}\n")
    said = job.run("up", "--dry-run", "--", "train.py")
    lines = said.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("scheduler", "server", "spare"),
        *("worker", "worker"),
    ]
    assert all("BYTEPS_REPLACE_SERVERS_S=60" in line and "--servers 2" in line for line in lines)
    assert "scripts/server.sh" in lines[2] and "--instances 1" in lines[2]
    job.env["BYTEPS_REPLACE_SERVERS_S"] = "300"
    said = job.run("up", "--dry-run", "--", "train.py")
    assert said.stdout.count("BYTEPS_REPLACE_SERVERS_S=300") == 5


def test_restarts_keep_scheduler_and_servers(job: Job) -> None:
    said = job.run("up", "--dry-run", "--max-restarts", "3", "--", "train.py")
    assert said.returncode == 0
    lines = said.stdout.splitlines()
    assert [line.endswith("--keep") for line in lines] == [True, True, False, False]
    assert ["--max-restarts 3 -- train.py" in line for line in lines] == [False, False, True, True]


@pytest.mark.parametrize(
    ("hosts", "complaint"),
    [
        ("server a\nworker b\n", "0 schedulers"),
        ("scheduler a\nworker b\n", "no server"),
        ("scheduler a\nserver b\n", "no worker"),
        ("scheduler a\nserver b x\nworker c\n", "line 2"),
        ("scheduler a\nserver b\nworker c 2\n", "line 3"),
        ("scheduler a\nboss b\n", "line 2: 'boss'"),
    ],
)
def test_bad_hosts_are_refused(job: Job, hosts: str, complaint: str) -> None:
    job.hosts.write_text(hosts)
    said = job.run("up", "--", "train.py")
    assert said.returncode == 2
    assert complaint in said.stderr


def test_help(job: Job) -> None:
    for words in (["-h"], ["up", "--help"]):
        said = subprocess.run(
            [SCRIPT, *words], capture_output=True, text=True, check=False, timeout=START_S
        )
        assert said.returncode == 0
        assert "cluster.sh up HOSTS" in said.stdout
