"""A job that `ray job submit` brings to a cluster which is there: the driver runs on its head."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ray_failures.cases import ENVIRONMENT
from bench.ray_failures.script import SCRIPT
from scripts.ports import free_ports

LIMIT_S = 400.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENV = {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head with a dashboard, which takes jobs."""
    log = tmp_path_factory.mktemp("head") / "head.log"
    # Ray's sockets need a short path, and its processes may still write there as they end.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as short:
        process, address = _start(log, short)
        try:
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(log: Path, short: str) -> tuple[subprocess.Popen[bytes], str]:
    """Again where the machine is too busy for the 30 s that Ray gives a node."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        gcs = free_ports(3)
        dashboard, client = gcs + 1, gcs + 2
        command = [*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "4"]
        command += ["--node-ip-address", "127.0.0.1", "--port", str(gcs), "--temp-dir", short]
        command += ["--dashboard-port", str(dashboard), "--ray-client-server-port", str(client)]
        command += ["--dashboard-agent-listen-port", "0", "--object-store-memory", str(100 << 20)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=ENV,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{dashboard}"
        if _wait_for(f"{address}/api/version", process):
            return process, address
        assert "timed out during startup" in log.read_text(), log.read_text()
        assert time.monotonic() < deadline, "no head starts"


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether it answers, before the process ends."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def test_a_submitted_job_trains(head: str, run_dir: Path) -> None:
    (run_dir / "script.py").write_text(SCRIPT)
    entry = [sys.executable, "-m", "megatron_byteps_ray", "--address", "auto", "--ranks", "2"]
    entry += ["--folder", str(run_dir / "job"), "--preload", "torch", "--cpus-per-rank", "0.5"]
    for name, value in ENVIRONMENT.items():
        entry += ["--environment", f"{name}={value}"]
    entry += [str(run_dir / "script.py"), "--", str(run_dir)]
    # `--`: what follows is the entrypoint.
    submit = [*RAY, "job", "submit", "--address", head, "--", *entry]
    done = subprocess.run(
        submit, env=ENV, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=run_dir
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done, after 1 generation" in done.stdout
    seen = [json.loads((run_dir / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["sum"] for one in seen] == [[9.0, 18.0, 27.0, 36.0]] * 2
    assert json.loads((run_dir / "job" / "job.json").read_text())["state"] == "done"


def test_a_job_that_fails_says_so(head: str, run_dir: Path) -> None:
    entry = [sys.executable, "-m", "megatron_byteps_ray", "--address", "auto", "nosuch.py"]
    entry += ["--preload", "torch", "--max-fruitless", "1", "--servers", "0", "--ranks", "1"]
    entry += ["--folder", str(run_dir / "job")]
    submit = [*RAY, "job", "submit", "--address", head, "--", *entry]
    done = subprocess.run(
        submit, env=ENV, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=run_dir
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: failed 1 times in a row without a step" in done.stdout
    assert "the entry 'nosuch.py' is no file on this machine" in done.stdout
