"""Files and classes stay small enough to be read at once (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = 500
"""At most, of a file of C++ or Python."""
FIELDS = 25
"""At most, of a class."""
CPP = (".h", ".cc")


def sources() -> Iterator[Path]:
    """Our own files of C++ and Python."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.split("\0"):
        path = REPOSITORY / name
        if path.suffix in (".py", *CPP) and path.is_file():
            yield path


PERHAPS_FIELDS = re.compile(r"^\s+\w+\s*:|\bself\.\w+", re.M)


def python_fields(text: str, least: int = 0) -> Iterator[tuple[str, int]]:
    """(class, number of its fields): annotated in its body, or set on self.

    Nothing for a file that has so few names of this kind that no class can have more than `least`.
    """
    if len(set(PERHAPS_FIELDS.findall(text))) <= least:
        return  # parsing is what takes time
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            named = {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign)
                and isinstance(part.target, ast.Name)
                and "ClassVar" not in ast.dump(part.annotation)
            }
            named |= {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == "self"
            }
            yield node.name, len(named)


# What has no meaning for the number of fields, and could be taken for one.
NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"  # comments, directives
    r'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'',
    re.S | re.M,
)
HEAD = re.compile(
    r"\b(?:class|struct)\s+(?:alignas\([^)]*\)\s*|PS_\w+(?:\([^)]*\))?\s*)?"
    r"(\w+)(?:\s+final)?(?:\s*:[^;{(]*)?\s*$"
)
NO_FIELD = re.compile(
    r"\s*(?:using|typedef|friend|static|enum|template|class \w+$|struct \w+$|union|constexpr|"
    r"extern|explicit|virtual|operator)\b"
)
MACROS = re.compile(r"\b(?:PS_\w+|alignas)\s*\([^()]*\)|\[\[[^\]]*\]\]")
PARENTHESES = re.compile(r"\([^()]*\)")
ANGLES = re.compile(r"<[^<>]*>")
BRACKETS = re.compile(r"\[[^\[\]]*\]")


def _without(pattern: re.Pattern[str], text: str, replacement: str = "") -> str:
    """The text without what the pattern matches, from the inside out."""
    while (shorter := pattern.sub(replacement, text)) != text:
        text = shorter
    return text


def _declared(statement: str) -> int:
    """The number of fields that a statement in the body of a class declares."""
    statement = re.sub(r"\b(?:public|protected|private)\s*:(?!:)", "", statement)
    if NO_FIELD.match(statement) or not statement.strip():
        return 0
    statement = MACROS.sub("", statement)
    # std::function<void(int)> is a type; what has parentheses elsewhere is a function.
    for _ in range(4):
        statement = re.sub(r"<[^<>]*>", "", re.sub(r"(<[^<>()]*)\([^()]*\)", r"\1", statement))
    declarator = _without(BRACKETS, statement.split("=", 1)[0])
    if "(" in declarator or len(re.findall(r"[\w:]+", declarator)) < 2:
        return 0
    initial = _without(PARENTHESES, _without(ANGLES, statement))
    return 1 + initial.count(",")


def cpp_fields(text: str) -> Iterator[tuple[str, int]]:
    """(class, number of its fields)."""
    text = NOISE.sub(lambda match: " " if match[0][0] != '"' else '""', text)
    # Of each open brace: the class that it begins, or "", and that class's fields so far.
    open_braces: list[tuple[str, int]] = []
    statement = ""
    for part in re.split(r"([{};])", text):
        if part == "{":
            head = HEAD.search(statement)
            open_braces.append((head[1] if head else "", 0))
            # A class begins statements of its own; an initialiser or a body is part of one.
            statement = "" if head else statement + "\x01"
        elif part == "}" and open_braces:
            name, fields = open_braces.pop()
            begun = statement.split("\x01", 1)[0]
            if name:
                yield name, fields
                statement = "Class "  # of a field in `struct {...} field;`
            elif "(" in _without(ANGLES, MACROS.sub("", begun)):
                statement = ""  # a function has ended
            else:
                statement = begun
        elif part == ";":
            if open_braces and open_braces[-1][0]:
                name, fields = open_braces[-1]
                open_braces[-1] = (name, fields + _declared(statement))
                statement = ""
            elif "\x01" not in statement:
                statement = ""
        else:
            statement += part


def test_the_count_of_fields() -> None:
    python = """
class A:
    one: int
    two: ClassVar[int]
    def __init__(self):
        self.one = self.three = 3
        other.four = 4
"""
    assert dict(python_fields(python)) == {"A": 2}
    cpp = """
// int comment;
class A : public B<int, int>, private C {
 public:
  A() : one_(1) { int local; }
  int Get(int a, int b) const;
  int Inline() const { return one_; }
  using X = int;
  static int count;
  struct Inner { int x = 0, y = 0; std::map<int, int> z; };
  enum Kind { K, L };
  friend class D;

 private:
  int one_;
  std::map<int, int> two_ PS_GUARDED_BY(mu_);
  std::function<void(int, std::string)> three_;
  std::vector<int> four_{1, 2};
  const char* five_ = "a;b", *six_ = nullptr;
  char seven_[64] = {};
  std::atomic<bool> eight_{false};
  Mutex mu_;
};
void Function() { int local; }
struct E { int e; };
"""
    assert dict(cpp_fields(cpp)) == {"Inner": 3, "A": 9, "E": 1}


def test_no_file_is_too_long() -> None:
    large = [
        f"{path.relative_to(REPOSITORY)} has {lines} lines"
        for path in sources()
        if (lines := path.read_text(encoding="utf-8").count("\n")) > LINES
    ]
    assert not large, f"more than {LINES} lines: split {'; '.join(large)}"


def test_no_class_has_too_many_fields() -> None:
    large = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        found = cpp_fields(text) if path.suffix in CPP else python_fields(text, FIELDS)
        large += [
            f"{path.relative_to(REPOSITORY)}:{name} has {fields}"
            for name, fields in found
            if fields > FIELDS
        ]
    assert not large, f"more than {FIELDS} fields: divide {'; '.join(large)}"
