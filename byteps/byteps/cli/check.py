"""The subcommand ``check``: runs the forecast in the patched Megatron that this Python finds."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from byteps.cli import NAME

_USAGE = f"""{NAME} check --hosts N --link-gbps B [options] -- ARGUMENTS

Says what --use-dpu-reduce and its companions would do for the ARGUMENTS of a training script, such
as pretrain_gpt.py. Megatron itself reads them: patched, and importable here. Example:

  {NAME} check --hosts 4 --gpus 8 --link-gbps 25 -- --num-layers 32 ..."""


def main(arguments: Sequence[str]) -> int:
    """Print what BytePS's flags would do for a job.

    Returns:
        The exit status: 0 `--use-dpu-reduce` is accepted; 1 it is refused; 2 bad use, or no
        patched Megatron is found.
    """
    # Users run this in their checkout, so Megatron is imported from there, as by `python -m`.
    sys.path.insert(0, os.getcwd())  # noqa: TID251
    warnings.simplefilter("ignore")  # warnings of Megatron about optional packages
    try:
        from megatron.core.distributed.dpu_reduce import check
    except ImportError as error:
        if {"-h", "--help"} & set(arguments):
            print(f"usage: {_USAGE}")
            return 0
        print(
            f"{NAME} check: no patched Megatron can be imported ({error}): run it in your "
            f"Megatron-LM checkout, or install megatron-core; '{NAME} patch' patches either",
            file=sys.stderr,
        )
        return 2
    status: int = check.main(arguments)
    return status
