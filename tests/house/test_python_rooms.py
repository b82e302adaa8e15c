"""Benchmarks and tables of layouts lie in folders, each of which knows only those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"bench": REPOSITORY / "bench", "layouts": REPOSITORY / "tests/layouts"}
ANYBODY = {"bench.kit"}
"""What all benchmarks share."""
BELOW: dict[str, set[str]] = {
    "bench.kit": set(),
    "bench.flood": set(),
    "bench.idle": ANYBODY,
    "bench.planning": set(),
    "bench.pushpull": ANYBODY,
    "bench.ray_failures": {"layouts", "layouts.under_ray"},
    "bench.rdma": ANYBODY,
    "bench.reducer": ANYBODY,
    "bench.simulator": ANYBODY,
    "bench.stragglers": {*ANYBODY, "bench.simulator"},
    "bench.timeline": set(),
    "bench.training": ANYBODY,
    "layouts": set(),
    "layouts.gpt": {"layouts"},
    "layouts.hugging_face": {"layouts", "layouts.gpt"},
    "layouts.reinforcement": {"layouts"},
    "layouts.under_ray": {"layouts", "layouts.gpt", "layouts.hugging_face"},
    "commands of bench": {*ANYBODY, "bench.pushpull", "bench.training"},
    "commands of layouts": {
        *("layouts", "layouts.gpt", "layouts.hugging_face", "layouts.reinforcement"),
        "layouts.under_ray",
    },
}
"""Of each folder, those whose modules its own may import. In `layouts` lies what its folders share;
the commands that lie there, and in `bench`, are above all."""
COMMANDS = {
    "commands of bench": {"bench.pushpull_bench", "bench.train_bench"},
    "commands of layouts": {
        *("layouts.parity", "layouts.hf_layouts", "layouts.ray_layouts", "layouts.rl_layouts"),
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
    assert {"bench.kit.plan", "layouts.gpt.compare"} <= set(order)


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
