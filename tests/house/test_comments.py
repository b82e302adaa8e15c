"""The lint rule about the first word of comments finds planted ones in each language."""

from __future__ import annotations

import pytest

from scripts.comments import wrong


@pytest.mark.parametrize(
    ("path", "source", "lines"),
    [
        ("a.py", '"""What a module has."""\n# Bytes\n# of a sum.\n', [1]),
        ("a.py", "def f():\n    r'''As g.'''\n    return \"Of text\"\n", [2]),
        ("a.py", 'x = 1\n"""Of a rank."""  # noqa\ny = [  # those sent\n    "that",\n]\n', [2, 3]),
        ("a.pyi", "# ----- how links break\nx: int  # Of-course is allowed\n", [1]),
        (
            "a.cc",
            "int x;   // of a link\n         // that is\nint y;  //< Which link.\n",
            [1, 3],
        ),
        ("a.py", "x = y  # type: ignore[attr-defined] # as a module has it\n", [1]),
        ("a.h", 'f("http://that");\n/* Whose lock. */\n// Lock\n// of x.\n', [2]),
        ("a.sh", "#!/bin/sh\n# What it does.\nx=$#  # which counts\necho ${#that}\n", [2, 3]),
        ("docker/server.Dockerfile", "FROM a\n# Where it runs.\n", [2]),
        ("CMakeLists.txt", "# Likewise.\nset(a b) # whatever\n", [1, 2]),
    ],
)
def test_planted_comments_are_found(path: str, source: str, lines: list[int]) -> None:
    assert [int(found.split(":")[1]) for found in wrong(path, source)] == lines
