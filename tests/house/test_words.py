"""Pages, errors and help texts use the field's words, by which people search: NIC, bandwidth.

Code in pages is left alone: blocks, and what is in backticks. So are tables of docs/design and
docs/results, many of which commands write, and what commands write between marks. Of the sources
that users run the texts count that have a space: errors, log lines, help. A name has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    r"\b(?:on|amid) (?:its|their|the) way\b": "in flight",
    r"\bno way to\b": "no path to",
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
ANY = re.compile("|".join(INSTEAD).replace(" ", r"\s+"), re.I)

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(REPOSITORY.glob("docs/**/*.md")),
]
FOLDERS = ("byteps/byteps", "Megatron-LM", "integrations", "scripts", "bench")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.suffix in (".py", ".cc", ".h", ".sh")
]
OTHERS = ("Makefile", "deploy/grafana/byteps.json", "scripts/examples/slurm.sbatch")
MOST_WORDS = 45_000
"""Of docs/: each thing is said once, and raw figures are records, not pages."""


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


def faults(text: str) -> list[str]:
    """A line for each word that has a better one."""
    found = []
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.I):
            line = text.count("\n", 0, match.start()) + 1
            words = " ".join(match[0].split())
            found.append(f"line {line}: '{words}': write {instead}")
    return found


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string, but of docstrings only a module's that is printed as help."""
    tree = ast.parse(source)
    notes = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    if "__doc__" in source and isinstance(tree.body[0], ast.Expr):
        notes.discard(tree.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in notes:
            yield node.lineno, node.value


def texts_of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string, those next to each other joined."""
    text = r'"(?:\\.|[^"\\\n])*"'
    tokens = rf"//[^\n]*|/\*.*?\*/|{text}(?:\s*{text})*|'(?:\\.|[^'\\])+'"
    for match in re.finditer(tokens, source, re.S):
        if match[0].startswith('"'):
            joined = re.sub(r'"\s*"', "", match[0])
            yield source.count("\n", 0, match.start()) + 1, joined


def shown(path: Path) -> str:
    """All texts of a source that somebody may read, at their lines."""
    source = path.read_text(encoding="utf-8")
    if not ANY.search(re.sub(r'"\s*f?"', "", source)):
        return ""  # most sources; so they need not be parsed
    if path.suffix == ".sh":
        return re.sub(r"^\s*#.*$", "", source, flags=re.M)
    texts = texts_of_python(source) if path.suffix == ".py" else texts_of_cpp(source)
    lines = [""] * (source.count("\n") + 2)
    for number, text in texts:
        if " " in text.strip():
            lines[number] += " ".join(text.split()) + " | "
    return "\n".join(lines[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_field_words(page: Path) -> None:
    part = page.relative_to(REPOSITORY).parts[1:2]
    tables = part not in [("design",), ("results",)]
    found = faults(prose(page.read_text(encoding="utf-8"), tables=tables))
    assert not found, "\n".join([f"{page.relative_to(REPOSITORY)}:", *found])


def test_field_words_in_errors_and_help() -> None:
    assert len(SOURCES) > 300
    found = [
        f"{path.relative_to(REPOSITORY)}, {fault}"
        for path in SOURCES
        for fault in faults(shown(path))
    ]
    for name in OTHERS:
        found += [f"{name}, {fault}" for fault in faults((REPOSITORY / name).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["A host's card carries it.", "two processors", "What is under\nway is lost.", "mended",
     "10 MB a second", "two GPUs a host", "strangers", "in turn"],
)  # fmt: skip
def test_old_words_are_found(text: str) -> None:
    assert faults(prose(text))


@pytest.mark.parametrize("text", ["`stopped by order`", "```\nmended\n```\n", "a NIC per host"])
def test_code_and_field_words_are_not(text: str) -> None:
    assert not faults(prose(text))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("error.py", 'raise ValueError(\n    f"{count} processors are "\n    "too few"\n)\n'),
        ("help.py", '"""Measures.\n\nStatus: 1 a bar was missed.\n"""\nprint(__doc__)\n'),
        ("error.cc", '// Fine.\nthrow Error("a sum is under "\n            "way to " + name);\n'),
        ("usage.sh", "cat <<TEXT\nload the card's driver\nTEXT\n"),
    ],
)
def test_old_words_in_sources_are_found(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).write_text(source)
    assert len(faults(shown(tmp_path / name))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("name.py", '"""A card of a game."""\nevent["incarnation"] = 1  # under way\n'),
        ("note.py", 'X = 1\n"""What a bar is."""\n'),
        ("name.cc", '// Under way.\nout.Number("incarnation", 1);\n'),
        ("note.sh", "  # whoever calls\n"),
    ],
)
def test_names_and_comments_are_not(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).write_text(source)
    assert not faults(shown(tmp_path / name))


def test_words_that_people_search_for_are_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for word in ("NIC", "bandwidth", "throughput", "in flight", "restart", "rendezvous"):
        assert re.search(rf"\b{word}\b", text), word


def test_pages_stay_short() -> None:
    """A word has a letter or a digit: the lines of tables are none."""
    words = sum(
        len([word for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)])
        for page in REPOSITORY.glob("docs/**/*.md")
    )
    assert words <= MOST_WORDS, f"docs/ has {words} words: say each thing once, in fewer words"
