"""Last import of the fork server: work that each rank would otherwise repeat.

Megatron parses the help of its arguments from the source of its classes, twice in each rank. The
result is always the same, and takes a fifth of a small job's CPU time.
"""

from __future__ import annotations

import argparse
import functools
import gc

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

_read = ArgumentGroupFactory._get_field_docstrings
_known: dict[type, dict[str, str]] = {}


@functools.wraps(_read)
def _read_once(self: ArgumentGroupFactory, described: type) -> dict[str, str]:
    if described not in _known:
        _known[described] = _read(self, described)
    return dict(_known[described])


ArgumentGroupFactory._get_field_docstrings = _read_once
add_megatron_arguments(argparse.ArgumentParser())
# No object of the parent is garbage in a rank. A collection there would copy all of its memory.
gc.collect()
gc.freeze()
