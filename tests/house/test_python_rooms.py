"""Benchmarks and tables of layouts lie in folders, each of which knows only those below it; modules
find each other, and mypy sees them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from byteps.torch import c_lib

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"bench": REPOSITORY / "bench", "tests.layouts": REPOSITORY / "tests/layouts"}
ANYBODY = {"bench.kit"}
"""What all benchmarks share."""
BELOW: dict[str, set[str]] = {
    "bench.kit": set(),
    "bench.frameworks": ANYBODY,
    "bench.idle": ANYBODY,
    "bench.pushpull": ANYBODY,
    "bench.ray_failures": {"tests.layouts", "tests.layouts.under_ray"},
    "bench.quality": ANYBODY,
    "bench.rdma": ANYBODY,
    "bench.reducer": ANYBODY,
    "bench.replicas": ANYBODY,
    "bench.training": ANYBODY,
    "tests.layouts": set(),
    "tests.layouts.gpt": {"tests.layouts"},
    "tests.layouts.functional": {"tests.layouts", "tests.layouts.gpt"},
    "tests.layouts.hugging_face": {"tests.layouts", "tests.layouts.gpt"},
    "tests.layouts.under_ray": {"tests.layouts", "tests.layouts.gpt", "tests.layouts.hugging_face"},
    "commands of bench": {*ANYBODY, "bench.pushpull", "bench.training"},
    "commands of layouts": {
        *(
            "tests.layouts",
            "tests.layouts.functional",
            "tests.layouts.gpt",
            "tests.layouts.hugging_face",
        ),
        "tests.layouts.under_ray",
    },
}
"""Of each folder, those whose modules its own may import. In `layouts` lies what its folders share;
the commands that lie there, and in `bench`, are above all."""
COMMANDS = {
    "commands of bench": {"bench.pushpull_bench", "bench.train_bench"},
    "commands of layouts": {
        *(
            "tests.layouts.parity",
            "tests.layouts.functional_tests",
            "tests.layouts.hf_layouts",
            "tests.layouts.ray_layouts",
            "tests.layouts.rl_layouts",
            "tests.layouts.te_layouts",
        ),
    },
}


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            names = path.relative_to(folder).with_suffix("").parts
            if path.name != "__init__.py":
                found[".".join((package, *names))] = path
    return found


MODULES = _modules()


def _imported(module: str) -> Iterator[str]:
    """The modules of ours that this one imports, wherever in its text."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def _folder(module: str) -> str:
    for name, commands in COMMANDS.items():
        if module in commands:
            return name
    return module.rpartition(".")[0]


def test_there_is_no_circle() -> None:
    graph = {module: set(_imported(module)) for module in MODULES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert {"bench.kit.plan", "tests.layouts.gpt.compare"} <= set(order)


def test_no_folder_knows_one_above_it() -> None:
    order = list(TopologicalSorter(BELOW).static_order())  # raises CycleError
    assert set(order) == set(BELOW)
    wrong = []
    for module in MODULES:
        folder = _folder(module)
        assert folder in BELOW, f"{module} is in no folder of BELOW"
        for other in _imported(module):
            if _folder(other) not in {folder, *BELOW[folder]}:
                wrong.append(f"{module} imports {other}")
    assert not wrong


# Benchmarks, scripts and tests find each other: the checkout is installed (pyproject.toml).


EDITS = re.compile(r"\bsys\.path(\.(insert|append|extend)\b|\[.*\] *=|\s*\+?=[^=])")
ALLOWED = {"integrations/ray/megatron_byteps_ray/rank_program.py"}
"""Does for a user's script what Python does for one: its folder comes first."""
FOLDERS = ("Megatron-LM", "bench", "byteps", "integrations", "scripts", "tests")


def test_no_file_edits_the_path() -> None:
    found = {
        str(path.relative_to(REPOSITORY))
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        if EDITS.search(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "module",
    [
        *("bench.kit.plan", "megatron_byteps_ray.settings", "scripts.progress", "tests.native"),
        "pretrain_dpu_gpt",
    ],
)
def test_modules_are_found_from_anywhere(module: str, tmp_path: Path) -> None:
    program = f"import importlib.util; assert importlib.util.find_spec({module!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    "script", ["apply_patches.sh", "locks.py", "merge_traces.py", "progress.py"]
)
def test_scripts_that_need_no_environment(script: str) -> None:
    """They run by any Python, whose packages are not ours."""
    command = [sys.executable, "-S", str(REPOSITORY / "scripts" / script), "--help"]
    if script.endswith(".sh"):
        command = command[2:]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


# scripts/lint.sh has mypy check types: what it is told of the compiled module is so.


ROOT = Path(__file__).resolve().parents[2]
LINT_CACHE = ROOT / "build/types/cache"
STUB = ROOT / "byteps/byteps/torch/c_lib.pyi"
MISTAKES = {
    "from byteps.torch import nodes; nodes.cut_rows(12, 2, 1)": 'no attribute "cut_rows"',
    "from byteps.torch import c_lib; c_lib.poll('a')": 'incompatible type "str"',
    "import byteps.torch as bps; bps.partition_bytes()": "Too few arguments",
    "from megatron.core.distributed.dpu_reduce import bytepslib as b; b.nodes.no_such": "no_such",
    "from megatron.core.distributed.dpu_reduce.bucket_op import no_such": "no_such",
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
