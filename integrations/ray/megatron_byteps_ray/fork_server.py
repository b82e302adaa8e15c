"""The process from which the actors of a machine fork their ranks.

Importing torch and Megatron takes many seconds. This process does it once for its machine. It keeps
a *standby* for each actor: a forked child that waits for an order, and becomes the rank of the next
generation within milliseconds, with nothing left of the one before. Where an import asks for the
number of GPUs, CUDA would not start in a forked child: each standby imports such modules itself,
before it is needed.

Actors connect to a Unix socket. Orders go one way and messages the other, one JSON object a line.
This process does nothing else, so that it answers also while a rank hangs. When a connection ends,
its actor is gone, and its rank is ended. When this process is killed, the kernel ends all ranks of
the machine. It ends by itself a while after the last actor.

Orders: ``start`` with ``environment``, ``folder``, ``log``, ``entry`` and ``arguments``; ``signal``
with ``number``, to the rank's process group; ``tell`` with ``number``, to the rank alone. Messages:
what the rank reports (``send``), and ``warm``, ``started`` (``pid``), ``ended`` (``pid``,
``status``), ``failed`` (``text``).
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
from typing import Any, NoReturn

from . import connect, rank_program, send

IDLE_S = 30.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _Lines:
    """Whole lines from a descriptor that does not block."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """What has come; ``ended`` once there will be no more."""
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
    """A forked process: first the standby, then, after its order, the rank."""

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
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is heard of
            while data:
                data = data[os.write(self._order_in, data) :]

    def signal(self, number: int) -> None:
        # Its group: what the rank started (data loaders, checkpoint writers) ends with it. A child
        # that has just been forked has not made it yet.
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tell(self, number: int) -> None:
        """Signal it alone: what it has started goes on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def reap(self) -> int:
        """The exit status; negative for a signal. What is left of its group is ended."""
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
            os._exit(status)  # the interpreter's end would wait for threads of a broken job
    sys.exit(0)


class _Client:
    """An actor's connection, its standby and its rank."""

    def __init__(self, server: ForkServer, connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._lines = _Lines(connection.fileno())
        self._standby: _Child | None = None
        self._rank: _Child | None = None
        server.watch(connection.fileno(), self._take_orders)

    def abandon(self) -> None:
        """In a child: close the connection, and leave its number to the next one opened."""
        os.close(self._connection.detach())

    def send(self, kind: str, **values: Any) -> None:
        self._pass_on({"kind": kind, "time": time.time(), **values})

    def _pass_on(self, message: dict[str, Any]) -> None:
        if self._connection.fileno() < 0:
            return  # the actor is gone, and a child of its was still importing
        # Blocks where the actor does not read, which it always does; its end is heard of elsewhere.
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
    """See the module."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self.modules = modules
        self._listener = listener
        self._clients: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        self.watch(listener.fileno(), self._accept)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Have ``call`` called when the descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        """The opposite; does nothing for one that is not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def abandon(self) -> None:
        """In a child: close what would not end with this process.

        Detached: a socket's object closes its number again when the interpreter ends, and by then
        that may be a connection of the rank's.
        """
        os.close(self._listener.detach())
        for client in self._clients:
            client.abandon()

    def leave(self, client: _Client) -> None:
        self._clients.remove(client)

    def serve(self) -> None:
        """Until no actor has been there for a while."""
        while True:
            ready = self._selector.select(None if self._clients else IDLE_S)
            if not ready and not self._clients:
                return
            for key, _ in ready:
                # An earlier one may have ended what this one belongs to.
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
    # The parent knows now that it listens; and no actor is the parent, with which Ray
    # would end it.
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's business
    for name in options.preload:
        importlib.import_module(name)
    ForkServer(listener, options.modules).serve()
    os.unlink(options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
