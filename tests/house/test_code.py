"""Code keeps its rules: rooms of C++ know only those below them, files and classes stay small,
invariants are named, hooks in Megatron have no conditions.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = REPOSITORY / "byteps/byteps"
BELOW: dict[str, set[str]] = {
    "base": set(),
    "net/link": {"base"},
    "net/auth": {"base"},
    "net/tls": {"base", "net/auth"},
    "net/membership": {"base", "net/link"},
    "net/tcp": {"base", "net/link", "net/auth", "net/tls", "net/membership"},
    "net/rdma": {"base", "net/link", "net/auth", "net/membership"},
    "net": {"base", "net/link", "net/membership", "net/tcp", "net/rdma"},
    "device": {"base", "net/link"},
    "cluster": {"base", "net/link", "net/auth", "net/tls", "net/membership"},
    "observe": {"base", "net/link", "net/membership", "net/tcp", "cluster"},
    "engine": {"base", "cluster", "device", "observe"},
    "server/optimizer": {"base", "observe"},
    "server": {"base", "net/link", "net/auth", "net/membership", "net/rdma", "cluster", "observe"}
    | {"server/optimizer"},
    "torch": {"base", "net/link", "cluster", "device", "engine", "observe"},
}
"""Of each room, those whose headers its files may include."""
PS_LITE = re.compile(r"(ps|dmlc)/")
"""How the headers of upstream's ps-lite begin."""
KNOW_PS_LITE = re.compile(
    r"net/(link|membership)/.*|net/\w+_base\.cc|cluster/(session\.cc|ps_message\.h)"
    # Of the transports what carries ps-lite's messages, not their sockets and devices.
    r"|net/tcp/(van|connection\w*|frames|greeter)\.(h|cc)"
    r"|net/rdma/(van|endpoint|queues|pool|verbs)\.(h|cc)"
    r"|net/(auth/secret|tls/tls)\.cc"  # its settings
)
"""Files that may include such headers."""


def room_of(path: str) -> str:
    folders = path.split("/")[:-1]
    inner = "/".join(folders[:2])
    return inner if inner in BELOW else folders[0]


def includes() -> Iterator[tuple[str, str]]:
    for path in sorted(CODE.rglob("*")):
        if path.suffix in (".h", ".cc"):
            for name in re.findall(r'#include "([^"]+)"', path.read_text()):
                yield path.relative_to(CODE).as_posix(), name


def test_no_room_knows_one_above_it() -> None:
    order = list(TopologicalSorter(BELOW).static_order())  # raises CycleError
    assert set(order) == set(BELOW)
    wrong = []
    for path, name in includes():
        room = room_of(path)
        assert room in BELOW, f"{path} is in no room"
        if name.startswith("byteps/") and not name.startswith("byteps/common/"):  # upstream's
            other = room_of(name.removeprefix("byteps/"))
            if other != room and other not in BELOW[room]:
                wrong.append(f"{path} includes {name}")
    assert not wrong


def test_nothing_is_allowed_that_nothing_needs() -> None:
    used: dict[str, set[str]] = {room: set() for room in BELOW}
    for path, name in includes():
        if name.startswith("byteps/") and not name.startswith("byteps/common/"):
            used[room_of(path)].add(room_of(name.removeprefix("byteps/")))
    assert {room: below - used[room] for room, below in BELOW.items() if below - used[room]} == {}


def test_only_the_network_knows_ps_lite() -> None:
    """And outside of it no file but session and ps_message, not even by what a header includes."""
    included: dict[str, list[str]] = {}
    for path, name in includes():
        included.setdefault(path, []).append(name)
    wrong = [
        f"{path} includes {name}"
        for path, names in included.items()
        for name in names
        if PS_LITE.match(name) and not KNOW_PS_LITE.fullmatch(path)
    ]
    for path in included:
        if room_of(path).startswith("net") or KNOW_PS_LITE.fullmatch(path):
            continue
        reached: set[str] = set()
        waiting = [path]
        while waiting:
            for name in included.get(waiting.pop(), []):
                inner = name.removeprefix("byteps/")
                if PS_LITE.match(name):
                    wrong.append(f"{path} reaches {name}")
                elif inner in included and inner not in reached:
                    reached.add(inner)
                    waiting.append(inner)
    assert not wrong


def test_nothing_of_ours_lies_among_upstreams_files() -> None:
    assert not [path for path in (REPOSITORY / "byteps/3rdparty").rglob("*") if path.is_file()]


def test_upstreams_files_include_none_of_ours() -> None:
    added = [
        f"{patch.name}: {line}"
        for patch in sorted((REPOSITORY / "patches/byteps").rglob("*.patch"))
        for part in patch.read_text().split("\ndiff --git ")[1:]
        if part.startswith("a/3rdparty/")
        for line in part.splitlines()
        if re.match(r'\+#include "byteps/', line)
    ]
    assert not added


def test_tests_lie_where_the_code_lies() -> None:
    """Each `*_test.cc` in a folder of byteps/tests named as the room that it tries."""
    tests = REPOSITORY / "byteps/tests"
    folders = {
        path.relative_to(tests).as_posix() + "/"
        for path in {found.parent for found in tests.rglob("*_test.cc")}
    }
    rooms = tuple(f"{room}/" for room in BELOW)
    assert [folder for folder in folders if not folder.startswith(rooms)] == []


# Files and classes stay small enough to be read at once (CONTRIBUTING.md).


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


# docs/design/reliability.md names all invariants (base/invariant.h), and code uses all probes.


DOCUMENT = REPOSITORY / "docs/design/reliability.md"
PROBES = REPOSITORY / "byteps/byteps/base/invariant.h"
USE = re.compile(r'BPS_INVARIANT(?:_NOTED)?\(\s*"([^"]+)"')


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table's rows under this heading."""
    section = DOCUMENT.read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def cpp_sources() -> list[Path]:
    found = [path for path in CODE.rglob("*") if path.suffix in (".cc", ".h")]
    return [path for path in found if path != CODE / "base/invariant.h"]  # it explains their use


def test_every_invariant_is_in_the_table() -> None:
    used = {name for path in cpp_sources() for name in USE.findall(path.read_text())}
    rows = rows_below("## Invariants")
    assert sorted(name for _, names in rows for name in names.split("; ")) == sorted(used)


def test_every_probe_is_reached_somewhere() -> None:
    declared = set(re.findall(r"X\(k(\w+), ", PROBES.read_text()))
    code = "\n".join(path.read_text() for path in cpp_sources())
    code += "\n".join(path.read_text() for path in (REPOSITORY / "byteps/tests").rglob("*.cc"))
    assert declared == set(re.findall(r"PS_PROBE\(k(\w+)\)", code))


# The rule for hooks in Megatron: they are called without a condition, and look at their flag.


PATCHES = Path(__file__).resolve().parents[2] / "patches/megatron-core"
LOOKS = re.compile(r"^\+\s*(if|elif|while|assert)\b.*\b(use_dpu_reduce|dpu_optimizer)\b")


def test_megatron_looks_at_none_of_our_flags() -> None:
    """So that each is tested in one place, dpu_reduce/hooks.py."""
    lines = [
        f"{patch.name}: {line}"
        for patch in sorted(PATCHES.rglob("*.patch"))
        for line in patch.read_text().splitlines()
        if LOOKS.match(line)
    ]
    assert not lines
