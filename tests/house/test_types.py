"""scripts/lint.sh has mypy check types: that it sees the project's own modules, however they are
found, and that what it is told of the compiled module is so."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from byteps.torch import c_lib

ROOT = Path(__file__).resolve().parents[2]
LINT_CACHE = ROOT / "build/types/cache"
STUB = ROOT / "byteps/byteps/torch/c_lib.pyi"
MISTAKES = {
    "from byteps.torch import nodes; nodes.whole_pieces(12, 2, 1)": 'no attribute "whole_pieces"',
    "from byteps.torch import c_lib; c_lib.poll('a')": 'incompatible type "str"',
    "import byteps.torch as bps; bps.partition_bytes()": "Too few arguments",
    "from megatron.core.distributed.dpu_reduce import bytepslib as b; b.nodes.no_such": "no_such",
    "from megatron.core.distributed.dpu_reduce.naming import no_such": "no_such",
    "from bench.kit.plan import no_such": "no_such",
    "from tests.layouts.gpt.rows import no_such": "no_such",
    "from scripts.trainkit.job import no_such": "no_such",
    "from scripts.progress import no_such": "no_such",
    "from megatron_byteps_hf.options import no_such": "no_such",
    "from megatron_byteps_ray.settings import no_such": "no_such",
    "from scripts.trainkit.rl_settings import no_such": "no_such",
    "from tests.multiproc.cluster import no_such": "no_such",
    "from tests.multiproc.programs.job import no_such": "no_such",
    "from tests.rdma.vm.guest import no_such": "no_such",
    "import torch; torch.zeros(3).no_such()": 'no attribute "no_such"',
    "import no_such_module": "no_such_module",
}
"""A line of a program, and what mypy says of it."""


@pytest.mark.slow
def test_mistakes_are_found(tmp_path: Path) -> None:
    program = tmp_path / "mistaken.py"
    program.write_text("".join(f"def _{n}() -> None: {one}\n" for n, one in enumerate(MISTAKES)))
    # A cache of its own, since another mypy may run meanwhile, with what lint has left: mypy writes
    # its files anew, and so does not change those of the other.
    (ROOT / "build/types").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build/types") as folder:
        cache = Path(folder) / "cache"
        if LINT_CACHE.is_dir():
            shutil.copytree(LINT_CACHE, cache, copy_function=os.link)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--cache-dir", cache, "byteps", "Megatron-LM", program],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip
    found = dict(re.findall(r"mistaken\.py:(\d+): error: (.*)", done.stdout))
    assert set(found) == {str(n) for n in range(1, len(MISTAKES) + 1)}, done.stdout + done.stderr
    for said, wanted in zip(found.values(), MISTAKES.values(), strict=True):
        assert wanted in said


def _signatures(tree: ast.Module | ast.ClassDef, owner: str = "") -> dict[str, list[str]]:
    """Of each function the arguments, with = where they have a default; classes have none."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = []
            found |= _signatures(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            names = [f"arg{n}" for n, _ in enumerate(given.posonlyargs)]
            names += [one.arg for one in given.args]
            needed = len(names) - len(given.defaults)
            found[owner + node.name] = names[:needed] + [f"{name}=" for name in names[needed:]]
    return found


def _compiled() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    classes = [value for value in vars(c_lib).values() if isinstance(value, type)]
    for owner in (c_lib, *classes):
        prefix = f"{owner.__name__}." if isinstance(owner, type) else ""
        for name, value in vars(owner).items():
            if isinstance(value, type):
                found[name] = []
            # pybind11 writes each signature as Python would; Python's own methods have none.
            elif callable(value) and (match := re.match(rf"{name}\(.*", str(value.__doc__))):
                tree = ast.parse(f"def {match[0]}: ...")
                found |= _signatures(tree, prefix)
    return found


def test_the_stub_is_of_the_compiled_module() -> None:
    assert _signatures(ast.parse(STUB.read_text())) == _compiled()
