"""Scripts have help and refuse unknown arguments; rules of locks, .ci/run and tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import build_backend
from scripts.children import captured

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = ["apply_patches.sh", "export_patches.sh", "setup.sh", "lint.sh"]
SCRIPTS += [
    "locks.py",
    "wheel.sh",
    "images.sh",
    "tools.sh",
    "tools.sh clang",
    "tools.sh valgrind",
    "tools.sh promtool",
    "tools.sh torch",
    "tools.sh site",
    "tools.sh diagrams",
    "tools.sh clean",
]


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return captured(command, 240, env=dict(os.environ) | (env or {}), cwd=REPOSITORY)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_bad_use(script: str) -> None:
    for flag in ("-h", "--help"):
        result = run(*f"scripts/{script}".split(), flag)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("usage: ")
    result = run(*f"scripts/{script}".split(), "--no-such-flag")
    assert result.returncode == 2
    assert "usage: " in result.stdout + result.stderr


@pytest.mark.parametrize("program", ["release.py", "audit.py"])
def test_help_and_bad_use_of_programs(program: str) -> None:
    """Programs that need the environment."""
    python = str(REPOSITORY / "build/venv/bin/python")
    result = run(python, f"scripts/{program}", "-h")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {program}")
    assert run(python, f"scripts/{program}", "--no-such-flag").returncode == 2


@pytest.mark.parametrize(
    "script", ["apply_patches.sh", "locks.py", "merge_traces.py", "progress.py"]
)
def test_scripts_that_need_no_environment(script: str) -> None:
    """These scripts run with any Python, without our packages."""
    command = [sys.executable, "-S", str(REPOSITORY / "scripts" / script), "--help"]
    if script.endswith(".sh"):
        command = command[2:]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_make_lists_its_targets() -> None:
    result = run("make")
    assert result.returncode == 0, result.stderr
    targets = re.findall(r"^  ([a-z-]+) +\S", result.stdout, re.MULTILINE)
    assert {"setup", "train", "test", "lint", "check-patches", "clean", "distclean"} <= {*targets}


def test_setups_that_make_the_same_at_once_keep_one(tmp_path: Path) -> None:
    """Setups run concurrently, in any order. No process sees an incomplete folder, or finds none
    after there was one."""
    makers = """
        source scripts/lib/system.sh
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
    nothing = 'source scripts/lib/system.sh; keep "$0/none" "$0/x"'
    nowhere = run("bash", "-c", nothing, str(tmp_path))
    assert nowhere.returncode == 1


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_build_folder_of_a_moved_checkout_goes(tmp_path: Path, is_moved: bool) -> None:
    made = tmp_path / "cmake"
    made.mkdir()
    at = "/elsewhere" if is_moved else made
    (made / "CMakeCache.txt").write_text(f"CMAKE_CACHEFILE_DIR:INTERNAL={at}\n")
    build_backend.drop_moved_build({"build-dir": str(made)})
    assert made.exists() != is_moved


def test_python_that_does_not_run_is_named() -> None:
    command = "source scripts/lib/system.sh; find_python"
    result = run("bash", "-c", command, env={"PYTHON": "/no/such/python"})
    assert result.returncode == 1
    assert "PYTHON=/no/such/python is not a Python >= 3.12 that runs" in result.stderr


def test_python_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    """pyenv puts such shims on PATH for installed versions that are not selected."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    real = tmp_path / "pyenv/versions/3.12.9/bin/python3.12"
    real.parent.mkdir(parents=True)
    real.symlink_to(REPOSITORY / "build/venv/bin/python")
    for name in ("python3", "python3.13", "python3.14", "uv"):
        (tmp_path / name).symlink_to(shim)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "PYTHON": ""}
    result = run("bash", "-c", "source scripts/lib/system.sh; find_python", env=env)
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
    # Each name occurs once, in whatever lock.
    assert len(versions) == len(pins)
    for requirement in _named(group):
        assert versions[requirement.name] in requirement.specifier
    # The patched tree replaces megatron-core.
    assert "megatron-core" not in versions


def test_a_lock_holds_nothing_that_an_included_one_has() -> None:
    base = {*(REPOSITORY / "locks/base.lock").read_text().splitlines()}
    for group in ("ray", "hf", "rl", "s3", "frameworks"):
        own = (REPOSITORY / "locks" / f"{group}.lock").read_text().splitlines()
        assert not [line for line in own if "==" in line and line in base], group


# Continuous integration (.ci/run): its parts exist, and a commit always has the same part.


SCRIPT = REPOSITORY / ".ci/run"


def ci(*arguments: str) -> subprocess.CompletedProcess[str]:
    return captured(["bash", SCRIPT, *arguments], 60)


def test_each_part_runs_something() -> None:
    listed = ci("--list").stdout.split()
    script = SCRIPT.read_text(encoding="utf-8")
    branches = re.findall(r"^  ([a-z]+)\) #.*\n((?:    .*\n)+)", script, re.MULTILINE)
    assert sorted(listed) == sorted(name for name, _ in branches)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for name, commands in branches:
        targets = re.findall(r"run make ([a-z-]+)", commands)
        assert targets, name
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("arguments", [("--part",), ("--part", "nothing"), ("--pat", "rdma")])
def test_bad_use(arguments: tuple[str, ...]) -> None:
    assert ci(*arguments).returncode == 2


# The rules of tests/conftest.py from outside: failures of a session and its output.


def run_pytest(folder: Path, test: str, *others: str, ci: bool) -> subprocess.CompletedProcess[str]:
    """Run a test file under the project's settings, with or without CI set."""
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copy(REPOSITORY / "tests/conftest.py", folder / "tests")
    (folder / "tests/test_it.py").write_text(f"import pytest\n\n{test}", encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("CI", "PYTEST"))}
    return captured(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("--basetemp", "temporary", *others),
        ],
        120,
        env=env | ({"CI": "true"} if ci else {}),
        cwd=folder,
    )


@pytest.mark.slow
def test_pytest_passes_over_only_folders_that_a_target_names() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["pytest"]["ini_options"]["norecursedirs"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for pattern in patterns:
        if "/" in pattern:  # a pattern of a path
            assert pattern in makefile, f"no target runs {pattern}"
    names = [pattern for pattern in patterns if "/" not in pattern]
    files = [file.relative_to(REPOSITORY) for file in REPOSITORY.glob("tests/**/test_*.py")]
    assert files
    for file in files:
        assert not any(fnmatch(part, name) for part in file.parent.parts for name in names), file


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["", "@pytest.mark.breaks_invariant\n"], ids=["plain", "marked"])
def test_a_broken_invariant_in_a_log_fails_the_test(tmp_path: Path, mark: str) -> None:
    line = "ERROR server 0 a.cc:1: the invariant 'one is one' was broken: 2"
    body = f'(run_dir / "deep").mkdir()\n    (run_dir / "deep/server.log").write_text("{line}")\n'
    result = run_pytest(tmp_path, f"{mark}def test_a(run_dir):\n    {body}", ci=False)
    assert (result.returncode == 0) == bool(mark), result.stdout
    assert (f"deep/server.log: {line}" in result.stdout) != bool(mark), result.stdout


def test_environments_import_the_overlays_python() -> None:
    """A changed line needs no build, because the next test imports the changed file."""
    package = REPOSITORY / "build/python"
    overlay = {
        path.relative_to(REPOSITORY / "byteps"): path
        for path in (REPOSITORY / "byteps/byteps").rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert {name: (package / name).resolve() for name in overlay} == overlay
    spec = importlib.util.find_spec("byteps.torch")
    assert spec is not None
    assert spec.origin == str(package / "byteps/torch/__init__.py")
