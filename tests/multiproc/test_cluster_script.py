"""cluster.sh starts, shows and ends a whole job on a list of hosts, without leftovers. It also
works over a real ssh, with the test's own server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.children import captured, free_ports, last_lines
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    REPOSITORY,
    RUN_S,
    START_S,
    Spawned,
    clean_environment,
)

SCRIPT = REPOSITORY / "scripts/cluster.sh"
# Replaces ssh without a network. It gives the command to a shell, and writes the host to a file.
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
    """A job with its own name, on hosts that are all this machine."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.hosts = folder / "hosts.txt"
        self.hosts.write_text(HOSTS)
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH)
        self.ssh.chmod(0o755)
        self.env = {**clean_environment(folder), "CLUSTER_SSH": str(self.ssh), "TMPDIR": "/tmp"}
        # The script creates a secret.
        del self.env["BYTEPS_SECRET"]

    @property
    def left(self) -> Path:
        return Path(f"/tmp/megatron-byteps-{os.geteuid()}-{self.name}")

    def run(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        return captured(
            [SCRIPT, action, self.hosts, "--name", self.name, *words], RUN_S, env=self.env
        )


@pytest.fixture
def job(run_dir: Path) -> Iterator[Job]:
    made = Job(run_dir)
    yield made
    made.run("down")


def up(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    # The two ports are consecutive, because the job's status is at the port after the scheduler's.
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
    # The job ends by itself, and then the status shows four processes as ended.
    wait_for(job, r": ended", 4)
    # At its end torchrun may log errors about the store of the other agent.
    logs = job.run("logs", "--lines", "1000").stdout
    for rank in (0, 1):
        assert re.search(rf"^worker \S+: .*rank {rank} of 2 has the sum", logs, re.M), logs
    assert job.run("down").returncode == 0
    assert not job.left.exists()
    assert job.run("status").returncode == 1


def alive(group: int) -> list[str]:
    """Return the processes of a group, except zombies."""
    texts = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:  # The process has ended meanwhile.
            continue
        state, _, its_group = text.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state not in "ZX":
            texts.append(text)
    return texts


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
        said = captured([SCRIPT, *words], START_S)
        assert said.returncode == 0
        assert "cluster.sh up HOSTS" in said.stdout


# An ssh server of the test: its keys, port and settings are in the test's folder.


SSH_HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of this machine that act as hosts."""
PACKAGES = ("openssh-server", "libwrap0")


def find_sshd(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the program, and variables that it needs.

    If it is not installed, Debian's package is unpacked in `folder`: installing it would start a
    service on the machine.
    """
    for sshd in ("/usr/sbin/sshd", "/usr/local/sbin/sshd"):
        if Path(sshd).exists():
            return sshd, {}
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(
        ["apt-get", "download", "-qq", *PACKAGES], cwd=folder, env=environment, check=True,
        timeout=END_S * 4, capture_output=True,
    )  # fmt: skip
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "tree"], check=True, timeout=END_S)
    libraries = [str(path.parent) for path in (folder / "tree").rglob("libwrap.so.0")]
    return str(folder / "tree/usr/sbin/sshd"), {"LD_LIBRARY_PATH": ":".join(libraries)}


class Sshd:
    """Serves this user on HOSTS, with a single authorized key. A context manager."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True, timeout=START_S,
            )  # fmt: skip
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            "".join(f"ListenAddress {host}:{port}\n" for host in SSH_HOSTS)
            + f"HostKey {folder}/host\nPidFile none\nAuthorizedKeysFile {folder}/authorized_keys\n"
            # The test's folders may have any owner.
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "MaxStartups 100\nMaxSessions 100\n"
        )
        key = (folder / "host.pub").read_text()
        known = "".join(f"[{host}]:{port} {key}" for host in SSH_HOSTS)
        (folder / "known_hosts").write_text(known)
        (folder / "ssh_config").write_text(
            f"Host *\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
            "  BatchMode yes\n  ConnectTimeout 30\n"
        )
        self.command = f"ssh -F {folder}/ssh_config"
        program, more = find_sshd(folder / "package")
        # sshd drops its privileges to the user sshd, in the folder /run/sshd. Without the package
        # neither exists. So sshd gets its own view of both.
        users = Path("/etc/passwd").read_text()
        if not re.search(r"^sshd:", users, re.M):
            users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
        (folder / "passwd").write_text(users)
        script = (
            f"mount --bind {folder}/passwd /etc/passwd && mkdir -p /run/sshd && "
            f"exec {program} -D -e -f {folder}/sshd_config"
        )
        self.process = Spawned(
            "sshd", ["unshare", "--mount", "sh", "-c", script], {**os.environ, **more}, folder
        )

    def __enter__(self) -> Sshd:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.running:
            tried = captured([*self.command.split(), SSH_HOSTS[-1], "true"], START_S * 2)
            if tried.returncode == 0:
                return self
            time.sleep(0.1)
        self.__exit__()
        raise AssertionError(f"sshd does not serve: {tried.stderr}{last_lines(self.process.log)}")

    def __exit__(self, *_: object) -> None:
        if self.process.running:
            self.process._process.terminate()
        self.process.wait(END_S)


# cluster.sh over a real ssh: up, status, logs and down, without leftovers.


PROGRAM = """
import os, time, torch, byteps.torch as bps
bps.init()
print(f"rank {bps.rank()} is on {os.environ['SSH_CONNECTION'].split()[2]}", flush=True)
while True:
    bps.push_pull(torch.ones(1000), average=False, name="x")
    time.sleep(0.02)
"""


def wait_until_said(what: str, say: Callable[[], str], pattern: str) -> str:
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        said = say()
        if re.search(pattern, said, re.M):
            return said
        time.sleep(0.5)
    raise AssertionError(f"never saw {what}: {said}")


@pytest.mark.thorough
@pytest.mark.requires("sshd", "root")
def test_a_cluster_over_ssh(run_dir: Path) -> None:
    ports = free_ports(4)
    (run_dir / "job.py").write_text(PROGRAM)
    name = f"ssh-{uuid.uuid4().hex[:12]}"
    hosts = run_dir / "hosts.txt"
    hosts.write_text(f"scheduler {SSH_HOSTS[0]}\nserver {SSH_HOSTS[1]}\nworker {SSH_HOSTS[2]}\n")
    with Sshd(run_dir / "sshd", ports) as sshd:
        env = {**clean_environment(run_dir), "CLUSTER_SSH": sshd.command, "TMPDIR": "/tmp"}

        def cluster(action: str, *words: str) -> subprocess.CompletedProcess[str]:
            return captured(
                [REPOSITORY / "scripts/cluster.sh", action, hosts, "--name", name, *words],
                RUN_S,
                env=env,
            )

        try:
            up = cluster(
                "up", "--port", str(ports + 1), "--status-port", str(ports + 2),
                "--master-port", str(ports + 3), "--", str(run_dir / "job.py"),
            )  # fmt: skip
            assert up.returncode == 0, up.stdout + up.stderr
            said = wait_until_said(
                "the running job", lambda: cluster("status").stdout,
                rf"(?s)job running at {SSH_HOSTS[0]}:{ports + 1}: 1 of 1 workers, 1 of 1 servers.*"
                rf"^server 0 +{SSH_HOSTS[1]}:\d+ .*^worker 0 +{SSH_HOSTS[2]} ",
            )  # fmt: skip
            groups = [int(pid) for pid in re.findall(r"running \(pid (\d+)\)", said)]
            assert len(groups) == 3, said
            wait_until_said(
                "the worker's line", lambda: cluster("logs").stdout,
                rf"^worker {SSH_HOSTS[2]}: .*rank 0 is on {SSH_HOSTS[2]}$",
            )  # fmt: skip
        finally:
            down = cluster("down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert not [line for group in groups for line in alive(group)]
        assert not Path(f"/tmp/megatron-byteps-{os.geteuid()}-{name}").exists()
        gone = cluster("status")
        assert gone.returncode == 1
        assert gone.stdout.count("not started") == 3
