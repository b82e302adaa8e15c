"""Commands that README and docs/use/ show, for the tests that run them as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/use/*.md"))]
_PLACEHOLDERS = {"HOST:PORT": "10.0.0.1:9000", "HOST": "10.0.0.1", "PORT": "9000"}


def blocks(text: str) -> list[list[str]]:
    """List the lines of each indented block of a page, with continued lines joined."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r" *(?: #.*)?\\\n *", " ", text)
    indented = re.findall(r"(?<=\n\n)(?: {4}\S.*\n)(?: {4,}.*\n|\n(?= {4}))*", text)
    indented += re.findall(r"(?<=\n\n)(?: {6}\S.*\n)+", text)  # below an item of a list
    return [[line.strip() for line in block.splitlines() if line.strip()] for block in indented]


def block_under(page: str, title: str) -> list[str]:
    """Get the first block of commands under a title, without comments."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(title)}$", text, maxsplit=1, flags=re.M)[1]
    return [re.sub(r" +#.*", "", line) for line in blocks(section)[0] if line[0] != "#"]


def lines_with(pattern: str) -> list[list[str]]:
    """List the words of each different line of all pages that matches, ready to run.

    Words that a reader must fill in are replaced by examples, and the dots for further flags are
    dropped.
    """
    shown = [block for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]
    lines = dict.fromkeys(line for block in shown for line in block if re.search(pattern, line))
    split = [shlex.split(line, comments=True) for line in lines]
    return [[_PLACEHOLDERS.get(word, word) for word in words if word != "..."] for words in split]
