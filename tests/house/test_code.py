"""Order of the C++ folders' includes, names of invariants, and hooks without conditions."""

from __future__ import annotations

import re
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
    "net": {"base", "net/link", "net/auth", "net/tls", "net/membership", "net/tcp", "net/rdma"},
    "device": {"base", "net/link"},
    "cluster": {"base", "net/link", "net/membership", "net"},
    "observe": {"base", "net/link", "net/membership", "net/tcp", "cluster"},
    "engine": {"base", "cluster", "device", "observe"},
    "server/optimizer": {"base", "observe"},
    "server": {"base", "cluster", "observe", "server/optimizer"},
    "recovery/scheduler": {"base", "net/link", "net/membership"},
    "program": {"base", "net/link", "net/auth", "net/membership", "net/rdma", "cluster", "observe"}
    | {"server", "recovery/scheduler", "recovery/server"},
    "recovery/worker": {"base", "device", "engine"},
    "recovery/server": {"base", "cluster", "observe", "server", "server/optimizer"},
    "torch": {"base", "net/link", "cluster", "device", "engine", "observe", "recovery/worker"},
}
"""Folders whose headers each folder's files may include."""
PS_LITE = re.compile(r"(ps|dmlc)/")
"""Prefix of the headers of upstream's ps-lite."""
KNOW_PS_LITE = re.compile(
    r"(net/(link|membership)|recovery/scheduler)/.*|net/\w+_base\.cc|cluster/(session\.cc|ps_message\.h)"
    # Transport files that carry ps-lite's messages, without sockets and devices.
    r"|net/tcp/(van|memory_pool|frames|frame_reader)\.(h|cc)"
    r"|net/tcp/(connection_dial|greeter)\.cc"
    r"|net/rdma/(van|endpoint|queues|pool)\.(h|cc)"
    r"|net/rdma/connector_handshake\.cc"
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
    """Outside the network only session and ps_message include ps-lite, even indirectly."""
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


CLASS = re.compile(
    r"^(?:template <[^>]*>\n)?(?:class|struct) (?:PS_\w+\((?:[^()]|\([^()]*\))*\) )?(\w+)"
    r"(?: final)?(?: : [^{;]*)? \{\n(.*?)^\};",
    re.M | re.S,
)
"""A class of a header, and the text between its braces."""
METHOD = re.compile(r"\)(?: const)?(?: override| noexcept| PS_\w+\([^)]*\))*(?: = \w+)?(?:;| \{)")
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
LEAST_IN_THEIR_FILE = 0.6


def test_a_class_stands_in_the_file_of_its_name() -> None:
    """Most classes with methods have their own file; the others belong to a class of their file."""
    elsewhere = []
    count = 0
    for path in sorted(CODE.rglob("*.h")):
        for name, body in CLASS.findall(re.sub(r"//[^\n]*", "", path.read_text())):
            if METHOD.search(body):
                count += 1
                if WORD.sub("_", name).lower() != path.stem:
                    elsewhere.append(f"{path.relative_to(CODE)}: {name}")
    assert 1 - len(elsewhere) / count >= LEAST_IN_THEIR_FILE, elsewhere


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
    """Each `*_test.cc` is in a folder of byteps/tests with the name of the tested folder."""
    tests = REPOSITORY / "byteps/tests"
    folders = {
        path.relative_to(tests).as_posix() + "/"
        for path in {file.parent for file in tests.rglob("*_test.cc")}
    }
    rooms = tuple(f"{room}/" for room in BELOW)
    assert [folder for folder in folders if not folder.startswith(rooms)] == []


# docs/design/reliability.md names all invariants (base/invariant.h), and code uses all probes.


DOCUMENT = REPOSITORY / "docs/design/reliability.md"
PROBES = REPOSITORY / "byteps/byteps/base/invariant.h"
USE = re.compile(r'BPS_INVARIANT(?:_NOTED)?\(\s*"([^"]+)"')


def rows_below(heading: str) -> list[list[str]]:
    """Get the cells of the table's rows under this heading."""
    section = DOCUMENT.read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def cpp_sources() -> list[Path]:
    paths = [path for path in CODE.rglob("*") if path.suffix in (".cc", ".h")]
    return [path for path in paths if path != CODE / "base/invariant.h"]  # it explains their use


def test_every_invariant_is_in_the_table() -> None:
    used = {name for path in cpp_sources() for name in USE.findall(path.read_text())}
    rows = rows_below("## Invariants")
    assert sorted(name for _, names in rows for name in names.split("; ")) == sorted(used)


def test_every_probe_is_reached_somewhere() -> None:
    declared = set(re.findall(r"X\(k(\w+), ", PROBES.read_text()))
    code = "\n".join(path.read_text() for path in cpp_sources())
    code += "\n".join(path.read_text() for path in (REPOSITORY / "byteps/tests").rglob("*.cc"))
    assert declared == set(re.findall(r"PS_PROBE\(k(\w+)\)", code))


# The rule for hooks in Megatron: calls are unconditional, and the hook checks its flag.


PATCHES = Path(__file__).resolve().parents[2] / "patches/megatron-core"
LOOKS = re.compile(r"^\+\s*(if|elif|while|assert)\b.*\b(use_dpu_reduce|dpu_optimizer)\b")


def test_megatron_looks_at_none_of_our_flags() -> None:
    """Megatron's code tests no flag of ours: only dpu_reduce/hooks.py does, each flag once."""
    lines = [
        f"{patch.name}: {line}"
        for patch in sorted(PATCHES.rglob("*.patch"))
        for line in patch.read_text().splitlines()
        if LOOKS.match(line)
    ]
    assert not lines
