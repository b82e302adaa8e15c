"""README and docs/ use the field's words, by which people search: NIC, bandwidth, throughput.

Code is left alone: blocks, and what is in backticks, such as an error's text. So are tables of
docs/design and docs/results, many of which commands write, and what commands write between marks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RATE = r"(?:[kMGT]i?(?:B|bit)|bytes?|bits?|gradients|connections|lines?|steps?|ms)"
INSTEAD = {
    r"\b(?:network )?cards?\b": "NIC",
    r"\bprocessors?\b": "core, CPU; processor time: CPU time",
    r"\bpart of what (?:the|a) links? allows?": "fraction of link bandwidth",
    r"\bbars?\b": "threshold",
    r"\bunder way\b": "in flight, running",
    r"\b(?:on|amid) (?:its|their) way\b": "in flight",
    r"\bmend(?:ed|s|ing)?\b": "fixed",
    r"\bincarnations?\b": "restart, generation",
    r"\bstopped by order\b": "stopped by SIGTERM",
    r"\bstrangers?\b": "unauthenticated peers",
    r"\bin turns?\b": "interleaved",
    rf"\b{RATE} an? (?:second|host|GPU|rank|parameter|server|step)\b": "per second, per host",
    r"\b(?:GPUs|ranks|NICs) a (?:host|machine)\b": "per host",
    r"\bwhoever\b": "anybody who, a process that",
    r"\bbeside\b": "next to, compared with",
}
"""A pattern, and what to write instead."""

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]


def prose(text: str, *, tables: bool = True) -> str:
    """The text without code, and without what commands write, of the same number of lines."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"<!-- (?:made|results).*?<!-- end", blank, text, flags=re.S)
    if not tables:
        text = re.sub(r"^\|.*$", blank, text, flags=re.M)
    text = re.sub(r"^```.*?^```", blank, text, flags=re.S | re.M)
    text = re.sub(r"(?<=\n\n)(?:(?: {4}|\t).*\n|\n(?= {4}))+", blank, text)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", blank, text, flags=re.S)


def faults(text: str, *, tables: bool = True) -> list[str]:
    """A line for each word that has a better one."""
    text = prose(text, tables=tables)
    found = []
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.I):
            line = text.count("\n", 0, match.start()) + 1
            words = " ".join(match[0].split())
            found.append(f"line {line}: '{words}': write {instead}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_field_words(page: Path) -> None:
    part = page.relative_to(REPOSITORY).parts[1:2]
    found = faults(page.read_text(encoding="utf-8"), tables=part not in [("design",), ("results",)])
    assert not found, "\n".join([f"{page.relative_to(REPOSITORY)}:", *found])


@pytest.mark.parametrize(
    "text",
    ["A host's card carries it.", "two processors", "What is under\nway is lost.", "mended",
     "10 MB a second", "two GPUs a host", "strangers", "in turn"],
)  # fmt: skip
def test_old_words_are_found(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize("text", ["`stopped by order`", "```\nmended\n```\n", "a NIC per host"])
def test_code_and_field_words_are_not(text: str) -> None:
    assert not faults(text)


def test_words_that_people_search_for_are_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for word in ("NIC", "bandwidth", "throughput", "in flight", "restart", "rendezvous"):
        assert re.search(rf"\b{word}\b", text), word
