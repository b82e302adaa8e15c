"""CUDA's Multi-Process Service: kernels of several processes run on a GPU at once.

Without it processes that share a GPU take turns, and a collective between them waits for each turn.
Ranks that have a GPU each, as those of a cluster do, never wait so; a comparison in which they take
turns flatters the backend with fewer kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.kit.plan import Plan
from scripts.children import Late, Spawned, end_all

_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_S, _QUIT_S = 10.0, 10.0


@contextmanager
def together(plan: Plan) -> Iterator[None]:
    """Meanwhile ranks of the plan that share a GPU run on it at once, if this machine has the
    service; what was done is said on stderr. The service of a user who set
    ``CUDA_MPS_PIPE_DIRECTORY`` is left alone."""
    sharing = _sharing(plan)
    if not sharing:
        yield
    elif _PIPES in os.environ:
        _tell(f"{sharing}, by the service at {_PIPES}={os.environ[_PIPES]}")
        yield
    elif shutil.which(_PROGRAM) is None:
        _tell(f"{sharing}, one after the other: {_PROGRAM} is not on PATH")
        yield
    else:
        # A socket's path has to be short.
        with tempfile.TemporaryDirectory(prefix="bps-mps-", dir="/tmp") as folder:
            yield from _served(Path(folder), sharing)


def _sharing(plan: Plan) -> str:
    """How many share what; nothing where each rank has a GPU of its own."""
    if not plan.shares_gpus():
        return ""
    from scripts.gpus import count_gpus

    return f"{plan.topology.workers} ranks share {count_gpus()} GPUs"


def _served(folder: Path, sharing: str) -> Iterator[None]:
    variables = {_PIPES: str(folder), _LOGS: str(folder)}
    service = Spawned("mps", [_PROGRAM, "-f"], {**os.environ, **variables}, folder)
    try:
        if _answers(service, variables):
            _tell(f"{sharing}, at once: by the Multi-Process Service")
            os.environ |= variables
        else:
            why = f"{_PROGRAM} does not serve: {service.text.strip()}"
            _tell(f"{sharing}, one after the other: {why}")
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        if service.running and _ask("quit", variables):
            with suppress(Late):
                service.wait(_QUIT_S)
        end_all([service], _QUIT_S)


def _answers(service: Spawned, variables: dict[str, str]) -> bool:
    deadline = time.monotonic() + _START_S
    while service.running and time.monotonic() < deadline:
        if _ask("get_server_list", variables):
            return True
        time.sleep(0.1)
    return False


def _ask(command: str, variables: dict[str, str]) -> bool:
    """Whether the service took a command."""
    try:
        done = subprocess.run(
            [_PROGRAM],
            input=f"{command}\n",
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_QUIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
