#!/usr/bin/env python3
"""Checks the first word of every comment and docstring of the checkout, and Python's names.

A comment begins with a noun or a verb, and a variable says what it holds. The check prints
FILE:LINE of each comment that begins with a word of WORDS, and of each variable, parameter and
function that is called by a word of NAMES, and exits with status 1 if there are any.
Consecutive comment lines are one comment, and a comment after code is a comment of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from subprocess import check_output

ROOT = Path(__file__).resolve().parent.parent
WORDS = "Of|What|Who|That|As|Those|How|Whose|Which|Where|Likewise|Whoever|Whatever"
NAMES = {"asked", "found", "kept", "mine", "one", "place", "some", "told"}
DIRECTIVE = r"!|\s*(?:type:|noqa|ruff|mypy|shellcheck|clang-format)"
OPENING = re.compile(rf"(?:(?:{DIRECTIVE})[^#]*#)?[-=\s]*(?:{WORDS})(?![-\w])", re.I)
SLASHES = re.compile(r"(?:^|(?<=\s))(?://+<?|/\*+)(.*)")
HASHES = re.compile(r"(?:^|(?<=\s))#+(.*)")
WITH_SLASHES = (".cc", ".cpp", ".cu", ".h", ".hpp")
WITH_HASHES = (
    *(".cmake", ".conf", ".env", ".sbatch", ".service", ".sh", ".supp", ".toml", ".yaml", ".yml"),
    *("CMakeLists.txt", "Dockerfile", "Makefile", ".ci/run"),
)


def of_lines(source: str, mark: re.Pattern[str]) -> Iterator[tuple[int, int, bool, str]]:
    """Yield each comment line after a mark as a tuple: line, column, whether no code precedes it,
    text."""
    for number, line in enumerate(source.splitlines(), start=1):
        if match := mark.search(line):
            yield number, match.start(), not line[: match.start()].strip(), match[1]


def of_python(source: str) -> Iterator[tuple[int, int, bool, str]]:
    """Yield comment lines, and strings that are statements: docstrings, also of attributes."""
    before = tokenize.NEWLINE
    for token, after in pairwise(tokenize.generate_tokens(io.StringIO(source).readline)):
        line, column = token.start
        if token.type == tokenize.COMMENT:
            yield line, column, not token.line[:column].strip(), token.string.lstrip("#:")
            continue
        begins = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        ends = after.type in (tokenize.NEWLINE, tokenize.COMMENT)
        if token.type == tokenize.STRING and begins and ends:
            yield line, column, False, re.sub(r"^\w*[\"']+", "", token.string)
        if token.type != tokenize.NL:
            before = token.type


def wrong(path: str, source: str) -> Iterator[str]:
    """Yield a message for each comment of a file that begins with a word of WORDS."""
    mark = SLASHES if path.endswith(WITH_SLASHES) else HASHES
    last = (0, -1)
    comments = of_python(source) if path.endswith((".py", ".pyi")) else of_lines(source, mark)
    for line, column, is_alone, text in comments:
        if not (is_alone and last == (line - 1, column)) and OPENING.match(text):
            yield f"{path}:{line}: {text.strip().splitlines()[0]}"
        last = (0, -1) if re.match(DIRECTIVE, text) else (line, column)


def vague(path: str, source: str) -> Iterator[str]:
    """Yield a message for each variable, parameter and function that is called by a word of NAMES.
    Fields of classes may be: flags and JSON files have such names."""
    fields: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            fields |= {part.target for part in node.body if isinstance(part, ast.AnnAssign)}
        elif isinstance(node, ast.Name) and node.id in NAMES:
            if isinstance(node.ctx, ast.Store) and node not in fields:
                yield f"{path}:{node.lineno}: {node.id} does not say what it holds"
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield f"{path}:{node.lineno}: {node.arg} does not say what it holds"
        elif isinstance(node, ast.FunctionDef) and node.name in NAMES:
            yield f"{path}:{node.lineno}: {node.name} does not say what it does"


def main() -> str:
    """Check all files that git tracks or would add. Return the messages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    listed = check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    checked = (".py", ".pyi", *WITH_SLASHES, *WITH_HASHES)
    names = [name for name in sorted(set(listed.splitlines())) if name.endswith(checked)]
    texts = {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    messages = [message for name, text in texts.items() for message in wrong(name, text)]
    for name in filter(lambda name: name.endswith(".py"), texts):
        messages += vague(name, texts[name])
    return "\n".join(messages)


if __name__ == "__main__":
    sys.exit(main() or None)
