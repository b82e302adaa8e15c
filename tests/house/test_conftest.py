"""The rules of tests/conftest.py, seen from outside: what fails a session and what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts a pytest of its own

REPOSITORY = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, test: str, *others: str, ci: bool) -> subprocess.CompletedProcess[str]:
    """Runs one test file under the project's settings, with or without CI set."""
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copy(REPOSITORY / "tests/conftest.py", folder / "tests")
    (folder / "tests/test_it.py").write_text(f"import pytest\n\n{test}", encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("CI", "PYTEST"))}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("--basetemp", "temporary", *others),
        ],
        cwd=folder,
        env=env | ({"CI": "true"} if ci else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "test",
    [
        "def test_a():\n    pytest.skip('not today')\n",
        "@pytest.mark.skip(reason='not today')\ndef test_a():\n    pass\n",
        "pytest.skip('not today', allow_module_level=True)\n",
        "pytest.importorskip('no_such_module')\n",
    ],
    ids=["call", "mark", "module", "import"],
)
def test_skip_without_requires_fails_under_ci(tmp_path: Path, test: str) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "desk").mkdir()
    passing = "\n\ndef test_b():\n    pass\n"
    other = run_pytest(tmp_path / "desk", test + passing, ci=False)
    # A module that skips itself leaves nothing to run, which pytest reports as 5.
    assert other.returncode in (0, 5), other.stdout
    result = run_pytest(tmp_path / "ci", test + passing, ci=True)
    assert result.returncode != 0, result.stdout
    assert "skipped without requires()" in result.stdout
    assert "tests/test_it.py" in result.stdout.split("skipped without requires()")[1]


@pytest.mark.parametrize("limit", [None, 60])
def test_a_test_has_the_limit_that_it_asks_for(tmp_path: Path, limit: int | None) -> None:
    """And is not ended before, as one without is."""
    mark = f"@pytest.mark.timeout({limit})\n" if limit else ""
    test = f"import time\n\n{mark}def test_a():\n    time.sleep(2)\n"
    result = run_pytest(tmp_path, test, "-o", "faulthandler_timeout=1", ci=False)
    assert (result.returncode == 0) == (limit is not None), result.stdout + result.stderr


def test_missing_hardware_is_reported_and_passes(tmp_path: Path) -> None:
    test = "@pytest.mark.requires('nvcc', 'docker')\ndef test_a():\n    pass\n"
    os_path = os.environ["PATH"]
    try:
        os.environ["PATH"] = str(tmp_path)
        result = run_pytest(tmp_path, test, ci=True)
    finally:
        os.environ["PATH"] = os_path
    assert result.returncode == 0, result.stdout
    assert "tests/test_it.py::test_a: needs nvcc" in result.stdout
    assert "1 skipped" in result.stdout.splitlines()[-1]


def test_unknown_requirement_is_an_error(tmp_path: Path) -> None:
    test = "@pytest.mark.requires('gqu')\ndef test_a():\n    pass\n"
    result = run_pytest(tmp_path, test, ci=False)
    assert result.returncode != 0
    assert "requires('gqu') is none of gpu," in result.stdout


def test_ends_of_logs_are_shown_on_failure(tmp_path: Path) -> None:
    test = (
        "def test_a(run_dir):\n"
        "    (run_dir / 'deep').mkdir()\n"
        "    lines = ''.join(f'line {n} of the log\\n' for n in range(150))\n"
        "    (run_dir / 'deep' / 'server.log').write_text(lines)\n"
        "    assert False\n"
    )
    result = run_pytest(tmp_path, test, ci=True)
    assert result.returncode == 1
    assert "last lines of deep/server.log (150 lines)" in result.stdout
    assert "line 149 of the log" in result.stdout
    assert "line 50 of the log" in result.stdout
    assert "line 49 of the log" not in result.stdout
    assert "1 failed" in result.stdout.splitlines()[-1]


def test_hanging_test_is_ended_with_its_logs(tmp_path: Path) -> None:
    test = (
        "import time\n\n\n@pytest.mark.timeout(1)\n"
        "def test_a(run_dir):\n    (run_dir / 'a.log').write_text('where it hangs\\n')\n"
        "    time.sleep(60)\n"
    )
    result = run_pytest(tmp_path, test, ci=True)
    assert result.returncode == 1
    assert "where it hangs" in result.stdout
    assert "Timeout" in result.stdout


def test_pytest_passes_over_only_folders_that_a_target_names() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["pytest"]["ini_options"]["norecursedirs"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for pattern in patterns:
        if "/" in pattern:  # of a path
            assert pattern in makefile, f"no target runs {pattern}"
    names = [pattern for pattern in patterns if "/" not in pattern]
    files = [file.relative_to(REPOSITORY) for file in REPOSITORY.glob("tests/**/test_*.py")]
    assert files
    for file in files:
        assert not any(fnmatch(part, name) for part in file.parent.parts for name in names), file


@pytest.mark.parametrize("mark", ["", "@pytest.mark.breaks_invariant\n"], ids=["plain", "marked"])
def test_a_broken_invariant_in_a_log_fails_the_test(tmp_path: Path, mark: str) -> None:
    line = "ERROR server 0 a.cc:1: the invariant 'one is one' was broken: 2"
    body = f'(run_dir / "deep").mkdir()\n    (run_dir / "deep/server.log").write_text("{line}")\n'
    result = run_pytest(tmp_path, f"{mark}def test_a(run_dir):\n    {body}", ci=False)
    assert (result.returncode == 0) == bool(mark), result.stdout
    assert (f"deep/server.log: {line}" in result.stdout) != bool(mark), result.stdout
