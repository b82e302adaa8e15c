"""Runs a script, or ``module:function``, under torchrun: ``torchrun -m megatron_byteps_ray.entry``.

torchrun ... -m megatron_byteps_ray.entry ENTRY ARGUMENTS
"""

from __future__ import annotations

import importlib.util
import sys

from .profiling import asked_for, profiled
from .rank_program import call_entry, report_megatron_steps

if __name__ == "__main__":
    if asked_for() is not None and importlib.util.find_spec("megatron"):
        report_megatron_steps()
    with profiled():
        call_entry(sys.argv[1], sys.argv[2:])
