"""Clang checks which lock guards what: see base/mutex.h.

Whatever clang builds is checked (byteps/CMakeLists.txt), so that `make test` fails where a lock is
forgotten. Here: that the check finds such mistakes, and that it can see all of our locks.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = Path(__file__).parent / "programs" / "guarded.cc"
HEADER = ROOT / "byteps/byteps/base/mutex.h"
MISTAKES = (
    r"reading variable 'count_' requires holding mutex 'mu_'",
    r"writing variable 'count_' requires holding mutex 'mu_'",
    r"calling function 'AddHere' requires holding mutex 'mu_'",
    r"reading variable 'count_' requires holding mutex 'mu_'",
    r"mutex 'mu_' is still held at the end of function",
    r"writing variable 'shared_' requires holding mutex 'shared_mu_' exclusively",
    r"calling function 'Wait.*' requires holding mutex 'mu_'",
)
"""In their order in SNIPPET."""
UNSEEN = re.compile(
    r"std::(mutex|shared_mutex|recursive_mutex|condition_variable|lock_guard|unique_lock|"
    r"shared_lock|scoped_lock)\b"
)


def _compile(*more: str) -> subprocess.CompletedProcess[str]:
    clang = subprocess.run(
        [ROOT / "scripts/clang.sh"], capture_output=True, text=True, timeout=600, check=True
    ).stdout.split()[-1]
    options = ["-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety"]
    options += [*more, f"-I{HEADER.parents[2]}"]
    return subprocess.run(
        [clang, *options, str(SNIPPET)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.requires("clang")
def test_what_takes_its_locks_is_accepted() -> None:
    compiled = _compile()
    assert (compiled.returncode, compiled.stderr) == (0, "")


@pytest.mark.requires("clang")
def test_forgotten_locks_are_errors() -> None:
    compiled = _compile("-DMISTAKES")
    assert compiled.returncode != 0
    errors = [line for line in compiled.stderr.splitlines() if " error: " in line]
    errors.sort(key=lambda line: int(line.split(":")[1]))
    assert len(errors) == len(MISTAKES), compiled.stderr
    for error, mistake in zip(errors, MISTAKES, strict=True):
        assert re.search(mistake, error), error
        assert "-Wthread-safety" in error


def test_all_builds_by_clang_are_checked() -> None:
    text = (ROOT / "byteps/CMakeLists.txt").read_text()
    assert "add_compile_options(-Wthread-safety -Werror=thread-safety)" in text


def test_no_lock_goes_unseen() -> None:
    """Of the standard library's clang knows nothing: ours are used everywhere."""
    sources = [path for path in (ROOT / "byteps").rglob("*") if path.suffix in (".h", ".cc")]
    assert HEADER in sources
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        if path != HEADER and "tests" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNSEEN.search(line)
    ]
    assert not found, "use base/mutex.h instead"
