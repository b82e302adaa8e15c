"""Named by an entry point of the group ``torch.backends``: ``import torch`` ends with `register`.

It costs nothing unless ``BYTEPS_C10D=1``: `byteps.torch` is imported when the first process group
is made.
"""

from __future__ import annotations

import os


def register() -> None:
    """With ``BYTEPS_C10D=1``, have torch.distributed make process groups that use BytePS."""
    if os.environ.get("BYTEPS_C10D", "0") not in ("", "0"):
        from byteps.c10d_plugin import install

        install()
