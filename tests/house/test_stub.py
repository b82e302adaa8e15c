"""The stub of the compiled module, for mypy, has the module's signatures."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from byteps.torch import c_lib

STUB = Path(__file__).resolve().parents[2] / "byteps/byteps/torch/c_lib.pyi"


def _signatures(tree: ast.Module | ast.ClassDef, owner: str = "") -> dict[str, list[str]]:
    """Get the arguments of each function, with = for a default; classes have none."""
    signatures: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            signatures[node.name] = []
            signatures |= _signatures(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            names = [f"arg{n}" for n, _ in enumerate(given.posonlyargs)]
            names += [argument.arg for argument in given.args]
            needed = len(names) - len(given.defaults)
            signatures[owner + node.name] = names[:needed] + [f"{name}=" for name in names[needed:]]
    return signatures


def _compiled() -> dict[str, list[str]]:
    signatures: dict[str, list[str]] = {}
    classes = [value for value in vars(c_lib).values() if isinstance(value, type)]
    for owner in (c_lib, *classes):
        prefix = f"{owner.__name__}." if isinstance(owner, type) else ""
        for name, value in vars(owner).items():
            if isinstance(value, type):
                signatures[name] = []
            # nanobind writes each signature as Python would; Python's own methods have none.
            elif callable(value) and (match := re.match(rf"{name}\(.*", str(value.__doc__))):
                tree = ast.parse(f"def {match[0]}: ...")
                signatures |= _signatures(tree, prefix)
    return signatures


def test_the_stub_is_of_the_compiled_module() -> None:
    assert _signatures(ast.parse(STUB.read_text())) == _compiled()
