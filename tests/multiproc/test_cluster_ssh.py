"""cluster.sh over a real ssh: up, status, logs and down, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests.multiproc.cluster import REPOSITORY, RUN_S, clean_environment
from tests.multiproc.sshd import HOSTS, Sshd
from tests.multiproc.test_cluster_script import alive

pytestmark = pytest.mark.requires("sshd", "root")

PROGRAM = """
import os, time, torch, byteps.torch as bps
bps.init()
print(f"rank {bps.rank()} is on {os.environ['SSH_CONNECTION'].split()[2]}", flush=True)
while True:
    bps.push_pull(torch.ones(1000), average=False, name="x")
    time.sleep(0.02)
"""


def wait_for(what: str, say: Callable[[], str], pattern: str) -> str:
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        said = say()
        if re.search(pattern, said, re.M):
            return said
        time.sleep(0.5)
    raise AssertionError(f"never saw {what}: {said}")


def test_a_cluster_over_ssh(run_dir: Path) -> None:
    ports = free_ports(4)
    (run_dir / "job.py").write_text(PROGRAM)
    name = f"ssh-{uuid.uuid4().hex[:12]}"
    hosts = run_dir / "hosts.txt"
    hosts.write_text(f"scheduler {HOSTS[0]}\nserver {HOSTS[1]}\nworker {HOSTS[2]}\n")
    with Sshd(run_dir / "sshd", ports) as sshd:
        env = {**clean_environment(run_dir), "CLUSTER_SSH": sshd.command, "TMPDIR": "/tmp"}

        def cluster(action: str, *words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [REPOSITORY / "scripts/cluster.sh", action, hosts, "--name", name, *words],
                env=env, capture_output=True, text=True, check=False, timeout=RUN_S,
            )  # fmt: skip

        try:
            up = cluster(
                "up", "--port", str(ports + 1), "--status-port", str(ports + 2),
                "--master-port", str(ports + 3), "--", str(run_dir / "job.py"),
            )  # fmt: skip
            assert up.returncode == 0, up.stdout + up.stderr
            said = wait_for(
                "the running job", lambda: cluster("status").stdout,
                rf"(?s)job running at {HOSTS[0]}:{ports + 1}: 1 of 1 workers, 1 of 1 servers.*"
                rf"^server 0 +{HOSTS[1]}:\d+ .*^worker 0 +{HOSTS[2]} ",
            )  # fmt: skip
            groups = [int(pid) for pid in re.findall(r"running \(pid (\d+)\)", said)]
            assert len(groups) == 3, said
            wait_for(
                "the worker's line", lambda: cluster("logs").stdout,
                rf"^worker {HOSTS[2]}: .*rank 0 is on {HOSTS[2]}$",
            )  # fmt: skip
        finally:
            down = cluster("down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert not [line for group in groups for line in alive(group)]
        assert not Path(f"/tmp/megatron-byteps-{os.geteuid()}-{name}").exists()
        gone = cluster("status")
        assert gone.returncode == 1
        assert gone.stdout.count("not started") == 3
