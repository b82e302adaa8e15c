"""docs/design/reliability.md names all invariants (base/invariant.h), and code uses all probes."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs/design/reliability.md"
CODE = REPOSITORY / "byteps/byteps"
PROBES = REPOSITORY / "byteps/byteps/base/probe.h"
USE = re.compile(r'BPS_INVARIANT(?:_NOTED)?\(\s*"([^"]+)"')


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table's rows under this heading."""
    section = DOCUMENT.read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def sources() -> list[Path]:
    found = [path for path in CODE.rglob("*") if path.suffix in (".cc", ".h")]
    return [path for path in found if path != CODE / "base/invariant.h"]  # it explains their use


def test_every_invariant_is_in_the_table() -> None:
    used = {name for path in sources() for name in USE.findall(path.read_text())}
    rows = rows_below("## Invariants")
    assert sorted(name for _, names in rows for name in names.split("; ")) == sorted(used)


def test_every_probe_is_reached_somewhere() -> None:
    declared = set(re.findall(r"X\(k(\w+), ", PROBES.read_text()))
    code = "\n".join(path.read_text() for path in sources())
    code += "\n".join(path.read_text() for path in (REPOSITORY / "byteps/tests").rglob("*.cc"))
    assert declared == set(re.findall(r"PS_PROBE\(k(\w+)\)", code))
