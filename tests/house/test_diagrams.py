"""The drawn diagrams are those of their sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(REPOSITORY.glob("docs/diagrams/*.dot"))


def test_there_are_some() -> None:
    assert len(SOURCES) >= 2


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_picture_is_current(source: Path) -> None:
    picture = REPOSITORY / "docs/images" / f"{source.stem}.svg"
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"<!-- source: {checksum} -->" in picture.read_text(), "run scripts/diagrams.sh"
