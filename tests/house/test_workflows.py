"""The GitHub workflows match this repository, with no more rights than necessary."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.releasekit.contents import ship_tools

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}


def commands(name: str) -> list[str]:
    jobs = WORKFLOWS[name]["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_what_is_there(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = "\n".join(commands(name))
    assert text
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for script in re.findall(r"(?:scripts|\.ci)/[\w.]+", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_few_rights_and_an_end(name: str) -> None:
    workflow = WORKFLOWS[name]
    wanted = "write" if name == "docs" else "read"  # it pushes the branch of the pages
    assert workflow["permissions"] == {"contents": wanted}
    for job in workflow["jobs"].values():
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used), used
        assert "timeout-minutes" in job or "outputs" in job


def test_checks_tests_and_wheels_are_among_them() -> None:
    assert commands("check") == ["make check"]
    assert "make test" in commands("test")
    assert commands("release") == ['make release ARGS="--images none"']


@pytest.mark.slow
def test_each_version_has_its_documentation(tmp_path: Path) -> None:
    """Run the command of the workflow, with the programs of locks/ship.lock."""
    (command,) = commands("docs")
    installs = ("python3 -m venv", ". build/", "pip install")
    lines = [line for line in command.splitlines() if not line.startswith(installs)]
    assert len(lines) == len(command.splitlines()) - len(installs)
    origin, clone = tmp_path / "origin.git", tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--bare", ROOT, origin], check=True)
    subprocess.run(["git", "clone", "--quiet", origin, clone], check=True)
    env = {**os.environ, "PATH": f"{ship_tools()}:{os.environ['PATH']}"}
    for ref in ("refs/heads/main", "refs/tags/v1.0.0"):
        subprocess.run(
            ["bash", "-ec", "\n".join(lines)],
            cwd=clone, env={**env, "GITHUB_REF": ref}, check=True, timeout=300,
        )  # fmt: skip
    shown = subprocess.check_output(["git", "-C", origin, "show", "gh-pages:versions.json"])
    versions = {version["version"]: version["aliases"] for version in json.loads(shown)}
    assert versions == {"dev": [], "1.0.0": ["latest"]}
