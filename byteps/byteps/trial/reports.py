"""Messages from ranks to the process that launched them, and between such processes. Each message
has a connection of its own, which carries a line of JSON in each direction."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from byteps.launcher.addresses import default_addresses

VARIABLE = "BYTEPS_TRIAL"
"""Environment variable that makes ranks measure their steps. It is an internal one of
`base/config_table.cc`."""
LOOPBACKS = ("127.0.0.1", "::1")
_CONNECT_S = 10.0

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for the ranks, the value of VARIABLE."""

    steps: int
    """Number of timed steps."""
    skipped: int
    """Number of untimed steps before the timed ones; at least one."""
    number: int
    """Number of the launch."""
    port: int
    """Port at which the process that launched the ranks listens."""
    hosts: tuple[str, ...]
    """Names and addresses of the host on which that process runs."""
    token: str
    """Secret of a process that launches ranks. A message with another token is ignored."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse the variable's value. Raises ValueError if it has another form."""
        fields = json.loads(text)
        return cls(**{**fields, "hosts": tuple(fields["hosts"])})

    def text(self, number: int) -> str:
        """Return the variable's value for a launch."""
        return json.dumps(asdict(replace(self, number=number)))


class Desk:
    """Listens for messages, and answers each in a new thread. It is used as a context manager."""

    def __init__(self, answer: Callable[[Message], Message], steps: int, skipped: int) -> None:
        """
        Args:
            answer: called with each message that has the token. It returns the answer, and may
                block.
        """
        self._answer = answer
        self._socket = _listen()
        self.settings = Settings(
            steps=steps,
            skipped=skipped,
            number=0,
            port=self._socket.getsockname()[1],
            hosts=(*LOOPBACKS, socket.gethostname(), *default_addresses()),
            token=secrets.token_hex(16),
        )
        threading.Thread(target=self._accept, name="byteps-trial", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the socket was closed
            while True:
                connection, _ = self._socket.accept()
                # The thread is no daemon, so that this process ends only after all messages are
                # answered.
                threading.Thread(target=self._serve, args=(connection,), daemon=False).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError, KeyError), connection:
            connection.settimeout(_CONNECT_S)
            message = json.loads(connection.makefile("rb").readline())
            if secrets.compare_digest(str(message.pop("token")), self.settings.token):
                connection.sendall(json.dumps(self._answer(message)).encode() + b"\n")


def _listen() -> socket.socket:
    """Listen at all addresses, on a port that the kernel chooses."""
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def tell(settings: Settings, message: Mapping[str, Any]) -> Message:
    """Send a message to the process that launched this one; return its answer.

    Raises:
        OSError: that process cannot be reached.
    """
    return ask(settings.hosts, settings.port, settings.token, message, _CONNECT_S)


def ask(
    hosts: Sequence[str], port: int, token: str, message: Mapping[str, Any], limit_s: float
) -> Message:
    """Send a message to the first of a host's names at which a process with the token listens.
    Return the answer.

    Raises:
        OSError: no such process was found; the text has the names that were tried.
    """
    failures = []
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
                connection.sendall(json.dumps({**message, "token": token}).encode() + b"\n")
                connection.settimeout(limit_s)
                line = connection.makefile("rb").readline()
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        if line:
            return dict(json.loads(line))
        failures.append(f"{host}: another process listens there")
    raise OSError(f"no process of this trial answers at port {port}: {'; '.join(failures)}")
