"""torchrun for a replica that is told to end: it is not started again, and the status says why."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiproc.cluster import IMPORT_S, REPOSITORY, clean_environment

SCRIPT = """
import os, signal, sys, time
from byteps.launcher import leaving

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
with open(sys.argv[2], "a") as lives:
    lives.write("life\\n")
# torchrun ends the other rank with the first one that fails: it may not have begun.
while open(sys.argv[2]).read().count("life") % 2:
    time.sleep(0.01)
if sys.argv[1] == "told":
    os.kill(os.getpid(), signal.SIGTERM)
while sys.argv[1] in ("told", "torchrun is told") and not told:
    time.sleep(0.01)
sys.exit(leaving.status() if told else int(sys.argv[1]))
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "byteps.launcher.leaving", "--standalone"),
            *("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"),
            *(str(script), what, str(folder / "lives")),
        ],
        env=clean_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("what", "status", "lives"),
    [("told", 143, 2), ("torchrun is told", 143, 2), ("0", 0, 2), ("3", 1, 4)],
)
def test_status(run_dir: Path, what: str, status: int, lives: int) -> None:
    """Two ranks: each life is two lines."""
    process = start(run_dir, what)
    written = run_dir / "lives"
    try:
        deadline = time.monotonic() + IMPORT_S
        while what == "torchrun is told" and process.poll() is None:
            if written.exists() and len(written.read_text().splitlines()) == 2:
                process.send_signal(signal.SIGTERM)
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        text = process.communicate(timeout=IMPORT_S)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, text
    assert len(written.read_text().splitlines()) == lives, text
    assert ("was told to end (SIGTERM), and has left the others" in text) == (status == 143)


@pytest.mark.parametrize(
    ("replica", "module"), [(None, "torch.distributed.run"), ("1/2", "byteps.launcher.leaving")]
)
def test_worker_sh_starts_it(run_dir: Path, replica: str | None, module: str) -> None:
    words = ["--scheduler", "127.0.0.1:9", "--servers", "1"]
    words += ["--replica", replica] if replica else []
    said = subprocess.run(
        ["bash", str(REPOSITORY / "scripts/worker.sh"), "--dry-run", *words, "--", "script.py"],
        env=clean_environment(run_dir),
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
    )
    assert said.returncode == 0, said.stderr
    assert f" -m {module} script.py" in said.stdout
