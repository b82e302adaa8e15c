"""Imports Megatron-Bridge, even if Transformer Engine is not installed.

Megatron-Bridge always imports Transformer Engine, but uses it only in Transformer Engine's layers.
Megatron's local layers do not need it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "transformer_engine"


def _absent(name: str) -> type:
    """Return a class that annotations and isinstance can use, but that cannot be instantiated."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} needs {_NAME}, which is not installed")

    return type(name, (), {"__init__": refuse})


@contextmanager
def _names_of_transformer_engine() -> Iterator[None]:
    """Return a context that provides the names that Megatron-Bridge imports from Transformer
    Engine."""
    if importlib.util.find_spec(_NAME) is not None:
        yield
        return
    package, pytorch = types.ModuleType(_NAME), types.ModuleType(f"{_NAME}.pytorch")
    modules = {module.__name__: module for module in (package, pytorch)}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
    operations = types.SimpleNamespace(Sequential=_absent("Sequential"))
    vars(pytorch).update(TransformerLayer=_absent("TransformerLayer"), ops=operations)
    vars(package).update(pytorch=pytorch)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@contextmanager
def _silence() -> Iterator[None]:
    """Return a context without logging, because Megatron-Bridge logs a traceback for every missing
    optional package."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@functools.cache
def auto_bridge() -> Any:
    """Return the class ``AutoBridge``. The first call imports it, which takes seconds.

    Raises:
        ImportError: Megatron-Bridge, or a package that it needs, is not installed.
    """
    # This import comes first, so that Megatron finds no Transformer Engine, and takes its local
    # layers.
    import megatron.core.extensions.transformer_engine as core
    import megatron.core.optimizer
    import megatron.training.models  # noqa: F401

    with _names_of_transformer_engine(), _silence():
        from megatron.bridge import AutoBridge
        from megatron.bridge.peft import canonical_lora, dora, lora, utils  # noqa: F401

    if not core.HAVE_TE:
        # Megatron always defines the classes by which it detects the package.
        utils.HAVE_TE = False
    return AutoBridge
