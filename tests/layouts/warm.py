"""Imported by the fork server after all else, for what each rank would do again.

Megatron reads the help of its arguments out of the source of its classes, twice a rank. It is the
same each time, and takes a fifth of a small job's CPU time.
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
# What is there by now is no rank's garbage. To look for some would copy all of its memory.
gc.collect()
gc.freeze()
