"""Loads the recipes of Megatron-Bridge without a GPU, Transformer Engine or the model hub."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from scripts.recipekit.features import Outcome, setup_of_recipe, used

PACKAGES = {
    "library recipes": "megatron.bridge.recipes",
    "performance recipes": "megatron.bridge.perf_recipes",
}
LINK_GBPS = 100.0
_FOUR_A_HOST = ("gb200", "gb300", "vr200", "r100")
"""Names of machines with four GPUs. All others have eight."""
_PARTS_OF_MEGATRON = ("megatron.energon",)
"""Packages of other distributions in the namespace of Megatron."""
_MOST_TIMES = 16
_GPUS = re.compile(r"_(\d+)gpu_")


def version() -> str:
    from importlib import metadata

    return metadata.version("megatron-bridge")


def _ignore(*args: Any, **kwargs: Any) -> None: ...


class _Module(types.ModuleType):
    """Module that has any attribute: a class for a capitalized name, a mock for another one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = mock.MagicMock(name=name)
        if name[:1].isupper():
            made = type(name, (), {"__init__": _ignore, "__class_getitem__": lambda *_: made})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, and makes stand-ins. Megatron's own are left out."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        above = name.rpartition(".")[0]
        inside = isinstance(sys.modules.get(above), _Module)
        if not inside and above and name not in _PARTS_OF_MEGATRON:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Module(spec.name)
        made.__version__ = "99"  # type: ignore[attr-defined] # packages have it
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None: ...


@contextlib.contextmanager
def _what_is_not_installed() -> Iterator[None]:
    """Return a context in which missing packages are found as empty modules, because recipes import
    everything that training would."""
    finder, before = _Finder(), set(sys.modules)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], _Module):
                del sys.modules[name]


@functools.cache
def _imported(package: str) -> types.ModuleType:
    from megatron_byteps_hf.bridge import auto_bridge

    auto_bridge()
    with _what_is_not_installed():
        return importlib.import_module(package)


class _Provider:
    """Stand-in for a model whose sizes are on the hub: a GPT, with experts if a recipe splits them.
    A recipe sets the values that it needs; the rest has the defaults of Megatron's config."""

    def __init__(self) -> None:
        from megatron.bridge.models.gpt_provider import GPTModelProvider

        vars(self).update(
            vars(GPTModelProvider(num_layers=32, hidden_size=4096, num_attention_heads=32)),
            vocab_size=128256,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def to_text_provider(self) -> _Provider:
        return self


class _AutoBridge:
    """Stand-in for the class that reads a model's config from the hub."""

    @classmethod
    def from_hf_pretrained(cls, *args: Any, **kwargs: Any) -> _AutoBridge:
        return cls()

    from_hf_config = from_hf_pretrained

    def to_megatron_provider(self, *args: Any, **kwargs: Any) -> _Provider:
        return _Provider()


def names(package: str) -> list[str]:
    return [f"{package}:{name}" for name in _recipes(package)]


@functools.cache
def _recipes(package: str) -> Mapping[str, Callable[[], Any]]:
    from megatron.core.distributed.dpu_reduce import check

    _imported(package)
    with _what_is_not_installed():
        return check.recipes(package)


def examine(name: str) -> Outcome:
    """Return how the flags apply to a recipe. The number of GPUs is that in the recipe's name, or a
    multiple that its experts need."""
    package, _, recipe = name.partition(":")
    times = 1
    while True:
        try:
            return _examined(package, recipe, times)
        except Exception as error:  # any dependency of a recipe may be missing here
            if "cannot be split by" not in str(error) or times >= _MOST_TIMES:
                text = f"{type(error).__name__}: {error}"
                return Outcome(name=recipe, hosts=1, not_read=" ".join(text.split())[:200])
        times *= 2


def _examined(package: str, recipe: str, times: int) -> Outcome:
    from megatron.core.distributed.dpu_reduce import check

    config = _made(_recipes(package)[recipe])
    model = config.model
    needed = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    match = _GPUS.search(recipe)
    ranks = int(match[1]) if match else max(needed, model.expert_model_parallel_size or 1)
    ranks *= times
    gpus = min(ranks, next((4 for machine in _FOUR_A_HOST if f"_{machine}_" in recipe), 8))
    hosts = -(-ranks // gpus)
    if (model.expert_model_parallel_size or 1) > 1:
        model.num_moe_experts = model.num_moe_experts or 8 * model.expert_model_parallel_size
        model.expert_tensor_parallel_size = model.expert_tensor_parallel_size or 1
    machines = check.Machines(
        hosts=hosts,
        gpus=gpus,
        link_gbps=LINK_GBPS,
        spare=hosts,
    )
    with _what_is_not_installed(), _newest_transformer_engine(), _silence():
        verdict = check.judge_recipe(config, machines)
    return Outcome(
        name=recipe,
        hosts=hosts,
        refused=verdict.refused,
        optimizer_refused=verdict.optimizer_refused,
        reaches_servers=verdict.reaches_servers,
        most_hosts=verdict.training.kinds[0].most_hosts,
        left=verdict.left,
        features=used(setup_of_recipe(config)),
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Return a context without logging, because Megatron-Bridge logs all derived values of each
    recipe."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _newest_transformer_engine() -> Iterator[None]:
    from megatron.core import utils
    from packaging.version import Version

    with mock.patch.object(utils, "get_te_version", lambda: Version("99")):
        yield


def _made(recipe: Callable[[], Any]) -> Any:
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.bridge") and "AutoBridge" in vars(module)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_what_is_not_installed())
        stack.enter_context(_newest_transformer_engine())
        stack.enter_context(_silence())
        for module in modules:
            stack.enter_context(mock.patch.object(module, "AutoBridge", _AutoBridge))
        return recipe()
