"""Paths and modules that the design pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DESIGN = sorted(REPOSITORY.glob("docs/design/*.md"))
BASES = [
    REPOSITORY / base
    for base in (
        *("", "bench", "docs", "byteps", "byteps/byteps", "byteps/tests"),
        *("Megatron-LM", "Megatron-LM/megatron/core/distributed"),
    )
]
"""Folders that a page may omit from a path."""
UPSTREAMS = ("common/core_loops.cc", "server/server.cc")
"""Upstream's files that a page mentions as unused."""
BY_PATCHES = {
    path
    for patch in REPOSITORY.glob("patches/*/*/*.patch")
    for path in re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(encoding="utf-8"), re.M)
}
PATH = re.compile(r"`((?:[A-Za-z0-9_.-]+/)+[A-Za-z0-9_.-]*)`")
NAMES_OF = re.compile(
    r"^\| (?:file|module)s? (?:of|\(under) `([\w./]+)`\)?.*\n\|[-| ]+\n((?:\|.*\n)+)", re.M
)
"""A table whose first column has names of files in a folder, or of modules of a package."""


def named_paths(text: str) -> list[str]:
    """Find the paths on a page, with those in its tables of files and modules."""
    paths = [path for path in PATH.findall(text) if not path.startswith("build/")]
    for folder, rows in NAMES_OF.findall(text):
        for row in rows.splitlines():
            names = re.findall(r"`(\w+)`", row.split("|")[1])
            paths += [f"{folder.replace('.', '/').rstrip('/')}/{name}" for name in names]
    return paths


def exists(path: str) -> bool:
    """Tell whether a path, with or without an extension, exists here or in a patched upstream."""
    if path in UPSTREAMS or any((base / path).exists() for base in BASES):
        return True
    if any(re.fullmatch(rf"{re.escape(path)}(?:\.\w+)?", known) for known in BY_PATCHES):
        return True
    return any(list((base / path).parent.glob(f"{Path(path).name}.*")) for base in BASES)


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.stem)
def test_paths_and_modules_are_there(page: Path) -> None:
    missing = [path for path in named_paths(page.read_text(encoding="utf-8")) if not exists(path)]
    assert not missing, "\n".join(missing)
