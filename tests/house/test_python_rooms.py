"""Benchmarks and tables of layouts lie in folders, each of which knows only those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"bench": REPOSITORY / "bench", "tests.layouts": REPOSITORY / "tests/layouts"}
ANYBODY = {"bench.kit"}
"""What all benchmarks share."""
BELOW: dict[str, set[str]] = {
    "bench.kit": set(),
    "bench.flood": set(),
    "bench.frameworks": ANYBODY,
    "bench.idle": ANYBODY,
    "bench.planning": set(),
    "bench.pushpull": ANYBODY,
    "bench.ray_failures": {"tests.layouts", "tests.layouts.under_ray"},
    "bench.quality": ANYBODY,
    "bench.rdma": ANYBODY,
    "bench.reducer": ANYBODY,
    "bench.replicas": ANYBODY,
    "bench.simulator": ANYBODY,
    "bench.stragglers": {*ANYBODY, "bench.simulator"},
    "bench.timeline": set(),
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
