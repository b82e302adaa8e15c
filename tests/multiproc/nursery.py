"""Starts worker processes quickly: imports torch and the engine once, then forks for each request.

Importing torch takes seconds per process, which would be most of the suite's time. A child gets its
whole environment from the request. A child that raises, or is still in its job, ends like any
Python program. A child that has left its job only runs its exit handlers: tearing down torch's
modules would take longer than most tests.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout:
    {"id", "program": "module:function", "folder", "log", "env", "args"}  ->  {"id", "pid"}
and, when that child has ended, {"id", "status"} (negative for a signal). End of file on stdin ends
the nursery, and with it, by the kernel's parent-death signal, every child.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.children import end_with_parent

# The first optimizer would import the last module anyway.
PRELOAD = (
    "torch",
    "torch.distributed.run",
    "byteps.torch",
    "tests.multiproc.programs.job",
    "torch._dynamo",
)


def die_with_parent(parent: int) -> None:
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the call.
        os._exit(1)


def child(request: dict[str, Any], nursery_pid: int) -> Callable[[], int]:
    """Turn this forked process into the requested one; return its main function."""
    die_with_parent(nursery_pid)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    module, _, function = request["program"].partition(":")

    def main() -> int:
        from tests.multiproc.programs.job import Job

        program = getattr(importlib.import_module(f"tests.multiproc.programs.{module}"), function)
        status = Job(Path(request["folder"]), request["args"]).run(program)
        if not importlib.import_module("byteps.torch").is_initialized():
            end_at_once(status)
        return status

    return main


def end_at_once(status: int) -> None:
    """Wait for threads and run exit handlers, but skip the rest of the interpreter's shutdown."""
    threading._shutdown()  # type: ignore[attr-defined] # the interpreter does this at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve() -> Callable[[], int] | None:
    """Answer requests until end of file (None) or, in a child, return the function to run."""
    me = os.getpid()
    out = os.dup(1)

    def answer(**fields: Any) -> None:
        os.write(out, json.dumps(fields).encode() + b"\n")

    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    identity, pid = key.data
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    answer(id=identity, status=status)
                    continue
                piece = os.read(0, 1 << 16)
                if not piece:
                    return None
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    pid = os.fork()
                    if pid == 0:
                        os.close(out)
                        return child(request, me)
                    answer(id=request["id"], pid=pid)
                    selector.register(
                        os.pidfd_open(pid), selectors.EVENT_READ, (request["id"], pid)
                    )


if __name__ == "__main__":
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    # Existing objects are never a child's garbage; scanning them would copy all memory.
    gc.freeze()
    gc.enable()
    todo = serve()
    if todo is not None:
        sys.exit(todo())
