"""What a store does with the parts of objects that it is sent at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

WAIT_S = 120.0


@dataclass(kw_only=True)
class Transfers:
    """The parts that S3 is being sent, each by its object's name and its number.

    Nothing of it depends on how long something takes: a part is held until `together` of each of
    `objects` objects are in flight, once, or the deadline is over, which `met` tells.
    """

    together: int = 1
    """Parts of one object."""
    objects: int = 1
    refuses: Callable[[str, int, int], bool] = lambda name, number, attempt: False
    """Whether a part is not taken, at this attempt; the first one is 1."""
    met: bool = False
    """Whether so many were in flight."""
    refused: list[tuple[str, int]] = field(default_factory=list)
    _attempts: Counter[tuple[str, int]] = field(default_factory=Counter)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def around(self, application: Any) -> Any:
        """A WSGI application that passes on to another one what is not refused."""

        def received(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            query = parse_qs(environ.get("QUERY_STRING", ""))
            if environ["REQUEST_METHOD"] != "PUT" or "partNumber" not in query:
                return application(environ, start)
            name, number = environ["PATH_INFO"], int(query["partNumber"][0])
            with self._part(name, number) as attempt:
                if self.refuses(name, number, attempt):
                    self.refused.append((name, number))
                    environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                    start("500 Internal Server Error", [("Content-Length", "0")])
                    return []
                # All of it: the part is in flight until the store has it.
                return list(application(environ, start))

        return received

    def _enough(self) -> bool:
        ready = [name for name, count in self._in_flight.items() if count >= self.together]
        self.met = self.met or len(ready) >= self.objects
        return self.met

    @contextmanager
    def _part(self, name: str, number: int) -> Iterator[int]:
        """While a part is in flight; which attempt it is."""
        with self._changed:
            self._attempts[name, number] += 1
            attempt = self._attempts[name, number]
            self._in_flight[name] += 1
            self._changed.notify_all()
            self._changed.wait_for(self._enough, WAIT_S)
        try:
            yield attempt
        finally:
            with self._changed:
                self._in_flight[name] -= 1
