"""The packages of integrations/: what they ask for is what their locks hold, and their wheels work
where nothing of this checkout is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("ray", "hf", "rl")
TRIED = {
    "ray": ["-m", "megatron_byteps_ray", "--help"],
    "hf": ["-c", "from megatron_byteps_hf.options import Options; print(Options)"],
    "rl": ["-m", "megatron_byteps_rl", "--help"],
}
"""What needs none of their dependencies."""


def _project(folder: str) -> dict[str, str | list[str]]:
    project: dict[str, str | list[str]] = tomllib.loads(
        (ROOT / folder / "pyproject.toml").read_text()
    )["project"]
    return project


@pytest.mark.parametrize("name", NAMES)
def test_its_environment_holds_what_it_asks_for(name: str) -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "scripts/locks.py", "show", name],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", shown.stdout, re.MULTILINE))
    for other in (f"integrations/{one}" for one in NAMES):
        project = _project(other)
        versions[str(project["name"])] = str(project["version"])
    for requirement in map(Requirement, _project(f"integrations/{name}")["dependencies"]):
        assert Version(versions[requirement.name]) in requirement.specifier, requirement


@pytest.mark.slow
@pytest.mark.thorough
def test_wheels_work_elsewhere(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    build: list[str | Path] = [ROOT / "scripts/wheel.sh", "--integrations-only", "--out", wheels]
    subprocess.run(build, check=True, timeout=400)
    found = {path.name.split("-")[0] for path in wheels.iterdir()}
    assert found == {f"megatron_byteps_{name}" for name in NAMES}
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
    python = str(environment / "bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", *wheels.iterdir()], check=True, timeout=300)
    for name in NAMES:
        done = subprocess.run(
            [environment / "bin/python", *TRIED[name]],
            env={"PATH": "/usr/bin:/bin"},
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout
        where = f"import megatron_byteps_{name} as package; print(package.__file__)"
        path = subprocess.check_output([environment / "bin/python", "-c", where], cwd=tmp_path)
        assert path.decode().startswith(str(environment))
