# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""BytePS, imported when it is first needed, so that Megatron runs without it."""

from __future__ import annotations

from types import ModuleType


def byteps() -> ModuleType:
    """The module ``byteps.torch``.

    Raises:
        RuntimeError: it is not there or does not load.
    """
    try:
        import byteps.torch as bps
    except ImportError as error:
        raise RuntimeError(
            "--use-dpu-reduce needs the package byteps (the build of Megatron-BytePS, with "
            "byteps.torch), which this Python cannot import: "
            f"{error}. Install it with `make setup` in a Megatron-BytePS checkout, or "
            "`pip install <checkout>/build/byteps`; or drop --use-dpu-reduce."
        ) from error
    return bps


def nodes() -> ModuleType:
    """The module ``byteps.torch.nodes``. Raises RuntimeError as :func:`byteps` does."""
    byteps()
    from byteps.torch import nodes as module

    return module


def pieces() -> ModuleType:
    """The module ``byteps.torch.pieces``. Raises RuntimeError as :func:`byteps` does."""
    byteps()
    from byteps.torch import pieces as module

    return module


def server_state() -> ModuleType:
    """The module ``byteps.torch.server_state``. Raises RuntimeError as :func:`byteps` does."""
    byteps()
    from byteps.torch import server_state as module

    return module


def server_nodes() -> ModuleType:
    """The module ``byteps.torch.server_nodes``. Raises RuntimeError as :func:`byteps` does."""
    byteps()
    from byteps.torch import server_nodes as module

    return module
