"""Runs ``module:function`` under torchrun: ``torchrun -m megatron_byteps_ray.entry ENTRY ...``."""

from __future__ import annotations

import sys

from .rank_program import call_entry

if __name__ == "__main__":
    call_entry(sys.argv[1], sys.argv[2:])
