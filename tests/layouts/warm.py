"""First import of the fork server: work that each rank would otherwise repeat.

Megatron parses the help of its arguments from the source of its classes, twice in each rank. The
result is always the same, and this takes a fifth of a small job's CPU time. Megatron also starts a
new Python for the queue of a checkpoint's writers, which takes longer than the rest of a small job.
Here the queue is in a fork instead, as with Megatron's persistent writers.
"""

from __future__ import annotations

import argparse
import functools
import gc

gc.disable()  # Imports leave no garbage. Each rank switches the collector on again.

# ruff: noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async
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
filesystem_async.get_write_results_queue = functools.partial(
    filesystem_async.get_write_results_queue, mp_mode="fork"
)
