"""Every script explains itself and refuses what it does not know; lock files are complete."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = ["apply_patches.sh", "export_patches.sh", "setup.sh", "lint.sh", "clean.sh"]
SCRIPTS += [
    "locks.py",
    "wheel.sh",
    "images.sh",
    "site.sh",
    "clang.sh",
    "valgrind.sh",
    "diagrams.sh",
    "torch_env.sh",
]


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=dict(os.environ) | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_bad_use(script: str) -> None:
    for flag in ("-h", "--help"):
        result = run(f"scripts/{script}", flag)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("usage: ")
    result = run(f"scripts/{script}", "--no-such-flag")
    assert result.returncode == 2
    assert "usage: " in result.stdout + result.stderr


@pytest.mark.parametrize("program", ["release.py", "audit.py"])
def test_help_and_bad_use_of_programs(program: str) -> None:
    """Those that need the environment."""
    python = str(REPOSITORY / "build/venv/bin/python")
    result = run(python, f"scripts/{program}", "-h")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {program}")
    assert run(python, f"scripts/{program}", "--no-such-flag").returncode == 2


def test_make_lists_its_targets() -> None:
    result = run("make")
    assert result.returncode == 0, result.stderr
    targets = re.findall(r"^  ([a-z-]+) +\S", result.stdout, re.MULTILINE)
    assert {"setup", "train", "test", "lint", "check-patches", "clean", "distclean"} <= {*targets}


def test_setups_that_make_the_same_at_once_keep_one(tmp_path: Path) -> None:
    """In any order: no process sees a folder that is not whole, or none where there was one."""
    makers = """
        source scripts/lib/cache.sh
        for i in $(seq 20); do
          (
            new="$0/kept.$BASHPID"
            mkdir -p "$new" && echo whole >"$new/file" && keep "$new" "$0/in/kept" || exit 1
            [[ "$(<"$0/in/kept/file")" == whole ]]
          ) &
          jobs+=($!)
        done
        for job in "${jobs[@]}"; do wait "$job" || exit 1; done
    """
    result = run("bash", "-c", makers, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "in/kept/file"
    ]
    nowhere = run("bash", "-c", 'source scripts/lib/cache.sh; keep "$0/none" "$0/x"', str(tmp_path))
    assert nowhere.returncode == 1


def test_python_that_does_not_run_is_named() -> None:
    command = "source scripts/lib/python.sh; find_python"
    result = run("bash", "-c", command, env={"PYTHON": "/no/such/python"})
    assert result.returncode == 1
    assert "PYTHON=/no/such/python is not a Python >= 3.12 that runs" in result.stderr


def test_python_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    """pyenv puts such shims on PATH for versions that it has but that are not selected."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    real = tmp_path / "pyenv/versions/3.12.9/bin/python3.12"
    real.parent.mkdir(parents=True)
    real.symlink_to(REPOSITORY / "build/venv/bin/python")
    for name in ("python3", "python3.13", "python3.14", "uv"):
        (tmp_path / name).symlink_to(shim)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "PYTHON": ""}
    result = run("bash", "-c", "source scripts/lib/python.sh; find_python", env=env)
    assert result.stdout.strip() == str(real), result.stderr


GROUPS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]


@pytest.mark.parametrize("group", GROUPS)
def test_lock_pins_by_hash_and_names_no_index(group: str) -> None:
    text = (REPOSITORY / "locks" / f"{group}.lock").read_text(encoding="utf-8")
    pins = re.findall(r"^[a-z0-9-]+==", text, re.MULTILINE)
    assert pins
    for entry in re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry
    assert "://" not in text


def test_each_lock_has_a_group() -> None:
    assert {path.stem for path in (REPOSITORY / "locks").iterdir()} == {*GROUPS}


def _named(group: str) -> Iterator[Requirement]:
    for entry in GROUPS[group]:
        if isinstance(entry, str):
            yield Requirement(entry)
        else:
            yield from _named(entry["include-group"])


@pytest.mark.parametrize("group", GROUPS)
def test_lock_holds_what_its_group_names(group: str) -> None:
    shown = run("scripts/locks.py", "show", group)
    assert shown.returncode == 0, shown.stderr
    pins = re.findall(r"^([a-z0-9-]+)==([^ ]+)", shown.stdout, re.MULTILINE)
    versions = dict(pins)
    # Each once, whichever lock it comes from.
    assert len(versions) == len(pins)
    for requirement in _named(group):
        assert versions[requirement.name] in requirement.specifier
    # The patched tree takes its place.
    assert "megatron-core" not in versions


def test_a_lock_holds_nothing_that_an_included_one_has() -> None:
    base = {*(REPOSITORY / "locks/base.lock").read_text().splitlines()}
    for group in ("ray", "hf", "rl", "s3", "frameworks"):
        own = (REPOSITORY / "locks" / f"{group}.lock").read_text().splitlines()
        assert not [line for line in own if "==" in line and line in base], group
