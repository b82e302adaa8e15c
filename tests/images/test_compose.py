"""docker/compose.yaml, as it is: a scheduler, two servers, and two workers that train."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.images.containers import ROOT, Podman, run

NODES = ("scheduler", "server-0", "server-1")
WORKERS = ("worker-0", "worker-1")
PROJECT = "trial"
LATEST_S = 1800.0

pytestmark = [
    pytest.mark.requires("root", "images"),
    pytest.mark.thorough,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def compose() -> list[str | Path]:
    """The command that runs docker/compose.yaml."""
    install = f"source {ROOT}/scripts/lib/ship_tools.sh; install_ship_tools {ROOT}"
    run("bash", "-euo", "pipefail", "-c", install)
    docker = ROOT / "docker"
    return [
        "env", f"BYTEPS_SECRET={secrets.token_hex(32)}",
        ROOT / "build/venv-ship/bin/podman-compose", "--no-ansi", "--project-name", PROJECT,
        "--env-file", docker / "versions.env", "--file", docker / "compose.yaml",
    ]  # fmt: skip


def container(service: str) -> str:
    return f"{PROJECT}_{service}_1"


def losses(log: str) -> list[float]:
    return [float(found) for found in re.findall(r"lm loss: (\S+)", log)]


@pytest.mark.usefixtures("worker_image")
def test_it_trains(
    server_image: Callable[[str], str], podman: Podman, compose: list[str | Path], run_dir: Path
) -> None:
    server_image("linux/amd64")

    def healthy(node: str) -> bool:
        """What the image's health check says, which Docker runs by itself."""
        check = podman.command("podman", "healthcheck", "run", container(node))
        return subprocess.run(check, env=podman.full_env, capture_output=True).returncode == 0

    def inspected() -> list[dict[str, Any]]:
        return json.loads(podman("inspect", *map(container, (*NODES, *WORKERS))))

    try:
        # They wait for their workers as long as it takes.
        podman.run(*compose, "up", "--detach", *NODES)
        deadline = time.monotonic() + LATEST_S
        while not all(healthy(node) for node in NODES):
            assert time.monotonic() < deadline, podman("ps", "--all")
            time.sleep(0.5)
        said = podman("exec", container("server-1"), "byteps-server", "--health")
        assert "server waits for the job to gather" in said
        (run_dir / "workers.log").write_text(podman.run(*compose, "up", *WORKERS))
        # Scheduler and servers end by themselves when the workers have ended.
        while any(one["State"]["Running"] for one in inspected()):
            assert time.monotonic() < deadline, podman("ps", "--all")
            time.sleep(0.5)
        told = inspected()
        ended = {one["Name"]: one["State"]["ExitCode"] for one in told}
        assert set(ended.values()) == {0}, ended
        # What compose.yaml asks for is what the containers had.
        for one in told:
            assert one["EffectiveCaps"] in (None, []), one["Name"]
            assert one["Config"]["User"] == "10001:10001", one["Name"]
        # The last rank prints the loss.
        said = podman("logs", container("worker-1"))
        assert "iteration       20/      20" in said, said[-4000:]
        fell = losses(said)
        assert len(fell) >= 4 and fell[-1] < fell[0], fell
    finally:
        podman.run(*compose, "down", "--timeout", "5")
