"""Process from which the actors of a machine fork their ranks.

Importing torch and Megatron takes many seconds. This process does so once per machine. It keeps a
*standby* for each actor: a forked child that waits for an order. The standby becomes the rank of
the next generation within milliseconds, in a clean state. After an import that queries the number
of GPUs, CUDA cannot start in a forked child. So each standby imports such modules by itself, before
it is needed.

Actors connect to a Unix socket and send orders, and messages come back. Both are JSON objects, one
per line. This process does nothing else, so it answers even while a rank hangs. When a connection
ends, its actor is gone, and the actor's rank is ended. If this process is killed, the kernel ends
all ranks of the machine. It ends IDLE_S after the last actor, and removes the training state that
ranks have kept in memory.

Orders: ``start`` with ``environment``, ``folder``, ``log``, ``entry`` and ``arguments``; ``signal``
with ``number``, to the rank's process group; ``tell`` with ``number``, to the rank alone. Messages:
the rank's reports (``send``), and ``warm``, ``started`` (``pid``), ``ended`` (``pid``, ``status``),
``failed`` (``text``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import connect, memory, rank_program, send

IDLE_S = 30.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _Lines:
    """Reads complete lines from a non-blocking descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have arrived. Sets ``ended`` at the end of input."""
        try:
            while not self.ended:
                data = os.read(self._descriptor, 1 << 16)
                self.ended = not data
                self._rest += data
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True
        *whole, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in whole]


class _Child:
    """Forked process. It is first a standby and then, after its order, the rank."""

    def __init__(self, modules: Sequence[str], abandon: Callable[[], None]) -> None:
        order_out, self._order_in = os.pipe()
        self.messages, message_in = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            abandon()
            for descriptor in (self._order_in, self.messages):
                os.close(descriptor)
            _be_child(parent, order_out, message_in, modules)
        os.close(order_out)
        os.close(message_in)
        self.lines = _Lines(self.messages)
        self.ended = os.pidfd_open(self.pid)

    def order(self, order: dict[str, Any]) -> None:
        data = json.dumps(order).encode() + b"\n"
        # A broken pipe means that the child has ended, which is noticed elsewhere.
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._order_in, data) :]

    def signal(self, number: int) -> None:
        # The signal goes to the process group, so that the rank's data loaders and checkpoint
        # writers end, too. A new child has not created its group yet.
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tell(self, number: int) -> None:
        """Signal only the rank's process, not the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def reap(self) -> int:
        """Return the exit status, negative for a signal. End the rest of the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        for descriptor in (self.messages, self.ended, self._order_in):
            os.close(descriptor)
        return os.waitstatus_to_exitcode(status)


def _be_child(parent: int, orders: int, messages: int, modules: Sequence[str]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for name in modules:
            importlib.import_module(name)
        connect(messages)
        send("standby")
        with os.fdopen(orders, "rb") as source:
            line = source.readline()
        if line:
            status = rank_program.run(json.loads(line))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if status != 0:
            os._exit(status)  # a normal exit would wait for threads of a broken job
    sys.exit(0)


class _Client:
    """Connection of an actor, with its standby and its rank."""

    def __init__(self, server: ForkServer, connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._lines = _Lines(connection.fileno())
        self._standby: _Child | None = None
        self._rank: _Child | None = None
        server.watch(connection.fileno(), self._take_orders)

    def abandon(self) -> None:
        """Close the connection in a child, so that its descriptor can be reused."""
        os.close(self._connection.detach())

    def send(self, kind: str, **values: Any) -> None:
        self._pass_on({"kind": kind, "time": time.time(), **values})

    def _pass_on(self, message: dict[str, Any]) -> None:
        if self._connection.fileno() < 0:
            return  # the actor is gone, and its child was still importing
        # This blocks only if the actor does not read, but actors do. Their end is noticed
        # elsewhere.
        with contextlib.suppress(ConnectionError):
            self._connection.setblocking(True)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        self._connection.setblocking(False)

    def make_standby(self) -> None:
        """Fork the process that will be the next rank."""
        child = self._standby = _Child(self._server.modules, self._server.abandon)
        self._server.watch(child.messages, lambda: self._hear(child))
        self._server.watch(child.ended, lambda: self._bury(child))

    def _take_orders(self) -> None:
        for order in self._lines.read():
            if order["order"] == "start":
                self._start(order)
            elif self._rank is not None and order["order"] == "tell":
                self._rank.tell(order["number"])
            elif self._rank is not None:
                self._rank.signal(order["number"])
        if self._lines.ended:
            for child in (self._rank, self._standby):
                if child is not None:
                    child.signal(signal.SIGKILL)
            self._server.forget(self._connection.fileno())
            self._connection.close()
            self._server.leave(self)

    def _start(self, order: dict[str, Any]) -> None:
        if self._rank is not None or self._standby is None:
            self.send("ended", pid=0, status=1)  # the imports have failed meanwhile
            return
        if folder := memory.folder_of(order["arguments"]):
            self._server.memory.add(folder)
        self._rank, self._standby = self._standby, None
        self._rank.order(order)
        self.send("started", pid=self._rank.pid)
        self.make_standby()

    def _hear(self, child: _Child) -> None:
        for message in child.lines.read():
            if message["kind"] == "standby":
                self.send("warm")
            elif child is self._rank:
                self._pass_on(message)
        if child.lines.ended:
            self._server.forget(child.messages)

    def _bury(self, child: _Child) -> None:
        self._hear(child)
        self._server.forget(child.messages)
        self._server.forget(child.ended)
        status = child.reap()
        if child is self._rank:
            self._rank = None
            self.send("ended", pid=child.pid, status=status)
        else:
            self._standby = None
            self.send("failed", text=f"the imports ended with exit status {status}")


class ForkServer:
    """The fork server (see the module)."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self.modules = modules
        self._listener = listener
        self.memory: set[Path] = set()
        """Folders of the training state that ranks keep in this machine's memory."""
        self._clients: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        self.watch(listener.fileno(), self._accept)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call ``call`` when the descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor. Does nothing if it is not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def abandon(self) -> None:
        """Close the parent's sockets in a child.

        They are detached first. Otherwise a socket object would close its descriptor again when the
        interpreter ends, and by then the rank may have reused the number.
        """
        os.close(self._listener.detach())
        for client in self._clients:
            client.abandon()

    def leave(self, client: _Client) -> None:
        self._clients.remove(client)

    def serve(self) -> None:
        """Serve until there has been no actor for IDLE_S."""
        while True:
            ready = self._selector.select(None if self._clients else IDLE_S)
            if not ready and not self._clients:
                return
            for key, _ in ready:
                # An earlier callback may have unregistered this one.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        client = _Client(self, connection)
        self._clients.append(client)
        client.make_standby()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", help="path to listen at")
    parser.add_argument("--preload", action="append", default=[], help="import before forking")
    parser.add_argument("--import", action="append", default=[], dest="modules", help="and after")
    options = parser.parse_args()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(options.socket)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(options.socket)
    listener.listen(128)
    # The parent now knows that this process listens. This process becomes a child of init, so that
    # Ray does not end it with the actor.
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the driver
    for name in options.preload:
        importlib.import_module(name)
    server = ForkServer(listener, options.modules)
    server.serve()
    for folder in server.memory:
        memory.clear(folder)
    os.unlink(options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
