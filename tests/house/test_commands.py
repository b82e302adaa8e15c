"""Commands of README and docs/ name programs, targets and flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "byteps"
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


def commands(text: str) -> list[str]:
    """The lines of all code, those that go on in the next one joined; in a line, too."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.S | re.M)
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", text, re.M)
    blocks += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [line.strip() for block in blocks for line in block.splitlines()]


def told_by(script: Path) -> str:
    """The text of a script, and of the program that it hands its arguments to."""
    if not script.exists():
        return ""
    text = script.read_text(encoding="utf-8")
    for program in re.findall(r"scripts[/.](\w+)(?:\.py)?\b", text):
        if (script.parent / f"{program}.py").exists():
            text += (script.parent / f"{program}.py").read_text(encoding="utf-8")
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_programs_targets_and_flags_are_there(page: Path) -> None:
    missing = []
    for line in commands(page.read_text(encoding="utf-8")):
        for program in re.findall(r"(?<![\w/.-])(?:scripts|bench|tests)/[\w/.-]+\.\w+", line):
            if not any((folder / program).exists() for folder in (REPOSITORY, OVERLAY)):
                missing.append(f"{program}: {line}")
        for target in re.findall(r"(?:^|[;&] *)make ([a-z][a-z0-9-]*)", line):
            if target not in TARGETS:
                missing.append(f"make {target}: {line}")
        if match := re.match(r"(?:build/venv\S*/bin/python )?(scripts/[\w-]+\.sh)(?= )(.*)", line):
            options = re.split(r" -- |#|\|", match[2])[0]
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", options):
                if flag not in told_by(REPOSITORY / match[1]):
                    missing.append(f"{match[1]} {flag}: {line}")
    assert not missing, "\n".join(missing)


def test_what_is_looked_at() -> None:
    text = "`make no`\n\n    scripts/a.sh --b \\\n        --c\n\n```\nmake x\n```\n"
    assert commands(text) == ["make x", "scripts/a.sh --b          --c", "make no"]
