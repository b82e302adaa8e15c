"""A python that is forked from a process which has imported torch, instead of importing it.

That import is most of the CPU time of a small job. `install` writes an executable that torchrun
starts in place of Python if ``PYTHON_EXEC`` names it. The executable hands its words, variables,
folder, input and output to `serve`, which forks a process that runs them in the same namespaces.
The executable passes signals on, and ends as the forked process ends. If the executable is killed,
the forked process is killed, too. In the forked process ``sys.executable`` is the executable, so
Pythons that it starts are forked, too. In /proc, the forked process has the variables of its
parent, and its modules are already loaded. Tests for which this matters need a real Python.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from scripts.children import end_with_parent, server_executable

_CLIENT = """#!{python} -SE
import json, os, signal, socket, sys

peer = socket.socket(socket.AF_UNIX)
peer.connect({address!r})
words = {{"words": sys.argv, "env": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(peer, [b"."], [0, 1, 2])
answers = peer.makefile("rw")
answers.write(json.dumps(words) + "\\n")
answers.flush()
pid = int(answers.readline())


def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = int(answers.readline())
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def install(folder: Path) -> tuple[Path, str]:
    """Write the executable into an existing folder, next to which programs find byteps-server.

    Returns:
        Its path, and the address for `serve`.
    """
    address = str(folder / "socket")  # an abstract one would be this network namespace's alone
    (folder / "byteps-server").symlink_to(server_executable())
    path = folder / "python"
    path.write_text(_CLIENT.format(python=sys.executable, address=address))
    path.chmod(0o755)
    return path, address


def listen(address: str) -> socket.socket:
    """Make the socket at which `serve` gets its requests."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def serve(listener: socket.socket) -> NoReturn:
    """Fork a process for each request, until this process is killed."""
    gc.freeze()  # objects of this process are no child's garbage
    gc.enable()
    clients: dict[int, tuple[socket.socket, int, int]] = {}
    events = select.epoll()
    events.register(listener, select.EPOLLIN)
    me = os.getpid()
    while True:
        for descriptor, _ in events.poll():
            if descriptor == listener.fileno():
                peer, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    events.close()
                    listener.close()
                    _become(peer, me)
                end = os.pidfd_open(pid)
                clients[end] = clients[peer.fileno()] = (peer, pid, end)
                events.register(peer, select.EPOLLRDHUP)
                events.register(end, select.EPOLLIN)
            elif descriptor in clients:
                peer, pid, end = clients[descriptor]
                if descriptor != end:  # The executable was killed.
                    events.unregister(peer)
                    os.kill(pid, signal.SIGKILL)
                    continue
                del clients[end], clients[peer.fileno()]
                os.close(end)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with peer, suppress(OSError):
                    peer.sendall(f"{status}\n".encode())


def _become(peer: socket.socket, parent: int) -> NoReturn:
    """Run what the executable was asked to run, in this forked process."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the call.
        os._exit(1)
    os.setsid()
    _enter_namespaces(peer)
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 3)
    with peer, peer.makefile("rw") as answers:
        request = json.loads(answers.readline())
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        answers.write(f"{os.getpid()}\n")
        answers.flush()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.executable, *words = request["words"]
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr] # a real file
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # the default, not that of the parent
    status = 0
    try:
        # torch calls this at the end of its import, but it must not be part of that import.
        importlib.import_module("byteps.c10d_plugin").autoload()
        _run(words)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # The interpreter's own end would also take modules apart. This takes longer than most tests
    # take.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _enter_namespaces(peer: socket.socket) -> None:
    """Enter the namespaces of an emulated host, if the executable runs on one."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    client, _, _ = struct.unpack("3i", credentials)
    kinds = {"net": os.CLONE_NEWNET, "uts": os.CLONE_NEWUTS, "mnt": os.CLONE_NEWNS}
    for name, kind in kinds.items():
        theirs = f"/proc/{client}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            namespace = os.open(theirs, os.O_RDONLY)
            os.setns(namespace, kind)
            os.close(namespace)


def _run(words: list[str]) -> None:
    while words[0] in ("-u", "-W"):
        words = words[2 if words[0] == "-W" else 1 :]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")
