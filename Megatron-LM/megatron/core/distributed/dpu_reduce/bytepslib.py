# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Imports BytePS when it is first needed, so that Megatron runs without it.

``bytepslib.byteps`` is the module ``byteps.torch``, ``bytepslib.nodes`` is ``byteps.torch.nodes``,
and so on; ``forecast`` is ``byteps.forecast``. Access raises RuntimeError if BytePS is not
installed or does not load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "byteps",
    "diloco",
    "engine",
    "figures",
    "forecast",
    "fsdp",
    "identity",
    "load",
    "members",
    "names",
    "node_groups",
    "nodes",
    "operations",
    "reductions",
    "routes",
    "server_bucket",
    "server_tensor",
    "session",
    "step_machine",
    "step_metrics",
    "wire",
    "world",
]

if TYPE_CHECKING:
    # Only type checkers import these.
    import byteps.torch as byteps
    from byteps import forecast
    from byteps.torch import (
        diloco,
        engine,
        figures,
        fsdp,
        members,
        names,
        node_groups,
        nodes,
        operations,
        routes,
        server_bucket,
        server_tensor,
        session,
        step_machine,
        step_metrics,
        wire,
        world,
    )
    from byteps.torch.c10d import identity, reductions
else:

    def __getattr__(name: str) -> Any:
        if name == "byteps":
            return load()
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        load()
        within = "torch.c10d." if name in ("identity", "reductions") else "torch."
        within = "" if name == "forecast" else within
        module = globals()[name] = importlib.import_module(f"byteps.{within}{name}")
        return module


def load() -> Any:
    """Import ``byteps.torch``.

    Raises:
        RuntimeError: BytePS is not installed, or does not load.
    """
    try:
        return importlib.import_module("byteps.torch")
    except ImportError as error:
        raise RuntimeError(
            "--use-dpu-reduce needs the package byteps (the build of Megatron-BytePS, with "
            "byteps.torch), which this Python cannot import: "
            f"{error}. Install it with `make setup` in a Megatron-BytePS checkout, or "
            "`pip install <checkout>/build/byteps`; or drop --use-dpu-reduce."
        ) from error
