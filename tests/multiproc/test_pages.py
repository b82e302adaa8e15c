"""Programs accept the lines of README and docs/use/ that start a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from scripts.children import captured
from tests.multiproc.cluster import START_S
from tests.multiproc.scripted import environment
from tests.pages import REPOSITORY, block_under, lines_with

ROLE = r"^(?:scripts/|megatron-byteps )(?:scheduler|server|worker)\b"


@pytest.mark.parametrize("words", lines_with(ROLE), ids=shlex.join)
def test_a_line_that_starts_a_role(run_dir: Path, words: list[str]) -> None:
    """With --dry-run, the program checks the line's options, and prints the command it
    would run."""
    (run_dir / "job.secret").write_text("0123456789abcdef" * 2)
    if words[0] == "megatron-byteps":
        words = [sys.executable, "-m", "byteps.cli", *words[1:]]
        words.insert(4, "--dry-run")
    else:
        words = [str(REPOSITORY / words[0]), "--dry-run", *words[1:]]
    env = {**environment(run_dir), "BYTEPS_SECRET_FILE": "job.secret"}
    del env["BYTEPS_SECRET"]
    said = captured(words, START_S, env=env, cwd=run_dir)
    assert said.returncode == 0, said.stderr
    assert "byteps-server --role" in said.stdout or "byteps.launcher.leaving" in said.stdout


def test_the_hosts_of_two_machines(run_dir: Path) -> None:
    lines = block_under("docs/use/quick-start.md", "Two machines")
    end = lines.index("END")
    assert lines[0].split()[:3] == ["cat", ">", "hosts.txt"]
    (run_dir / "hosts.txt").write_text("\n".join(lines[1:end]) + "\n")
    script, *words = shlex.split(lines[end + 1])
    said = captured(
        [REPOSITORY / script, *words[:1], "--dry-run", *words[1:]],
        START_S, env=environment(run_dir), cwd=run_dir,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    roles = ["scheduler 10.0.0.1", "server 10.0.0.2", "worker 10.0.0.1"]
    assert [line.partition(":")[0] for line in said.stdout.splitlines()] == roles
