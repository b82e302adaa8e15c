"""Compiled Python for guests, which would otherwise compile all of torch anew, for minutes.

Some installations keep no bytecode next to their sources, and what a guest writes is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .kernel import VmError

FOLDER = Path(__file__).resolve().parents[3] / "build/vm-bytecode"
IMPORT_S = 400.0


def compiled(modules: Sequence[str], path: Sequence[Path] = ()) -> dict[str, str]:
    """Compile all that importing these modules imports; the variables with which Python uses it.

    Python itself checks that what is there belongs to the sources. Raises VmError when the modules
    cannot be imported here.
    """
    env = {"PYTHONPYCACHEPREFIX": str(FOLDER)}
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    ended = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        env={**kept, **env, **more},
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
        check=False,
    )
    if ended.returncode != 0:
        raise VmError(f"{', '.join(modules)} cannot be imported here:\n{ended.stderr[-2000:]}")
    return env
