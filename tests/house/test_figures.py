"""README's figures: those of the pages that hold the measurements, and of the patches."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SOURCES = sorted(REPOSITORY.glob("docs/results/*.md"))


def test_figure_is_measured() -> None:
    """All numbers between the marks are together in one paragraph of the results."""
    marked = re.findall(r"<!-- figure -->(.*?)<!-- end\s+of figure -->", README, re.S)
    assert marked
    for figure in marked:
        numbers = set(re.findall(r"\d+(?:\.\d+)?", figure))
        paragraphs = [
            paragraph
            for source in SOURCES
            if source.exists()
            for paragraph in source.read_text(encoding="utf-8").split("\n\n")
        ]
        assert any(
            numbers <= set(re.findall(r"\d+(?:\.\d+)?", paragraph)) for paragraph in paragraphs
        ), figure


def test_size_of_the_patches_to_megatron() -> None:
    lines, files = 0, set()
    for patch in REPOSITORY.glob("patches/megatron-core/*/*.patch"):
        text = patch.read_text(encoding="utf-8")
        if "\nPart: cpu" not in text:
            lines += len(re.findall(r"^\+(?!\+\+ )", text, re.M))
            files |= set(re.findall(r"^\+\+\+ b/(.*)$", text, re.M))
    said = rf"by\s+{lines}\s+lines\s+in\s+{len(files)}\s+files"
    assert re.search(said, README), f"README: not {lines} lines in {len(files)} files"
    install = (REPOSITORY / "docs/use/install.md").read_text(encoding="utf-8")
    assert re.search(said.replace("by\\s+", ""), install)
