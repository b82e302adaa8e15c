"""The project's pages: their links lead somewhere, their drawings are those of their sources, and
README's figures those of the pages that hold the measurements, and of the patches."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
DIAGRAMS = sorted(REPOSITORY.glob("docs/diagrams/*.dot"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RESULTS = sorted(REPOSITORY.glob("docs/results/*.md"))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_there_are_diagrams() -> None:
    assert len(DIAGRAMS) >= 2


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_diagram_is_current(source: Path) -> None:
    picture = REPOSITORY / "docs/images" / f"{source.stem}.svg"
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"<!-- source: {checksum} -->" in picture.read_text(), "run scripts/diagrams.sh"


def test_figure_is_measured() -> None:
    """All numbers between the marks are together in one paragraph of the results."""
    marked = re.findall(r"<!-- figure -->(.*?)<!-- end\s+of figure -->", README, re.S)
    assert marked
    for figure in marked:
        numbers = set(re.findall(r"\d+(?:\.\d+)?", figure))
        paragraphs = [
            paragraph
            for source in RESULTS
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
