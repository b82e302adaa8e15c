"""Interface of a worker's program: its rank, named checks, and signals from and to the test."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Job:
    """A worker of a test's job. After a failed check its other checks still run, so that a run
    reports all failures."""

    def __init__(self, folder: Path, args: dict[str, Any]) -> None:
        self.folder = folder
        self.args = args
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._checks: dict[str, str | None] = {}

    def run(self, program: Callable[[Job], None]) -> int:
        """Run a program; return the worker's exit status: 1 if a check failed."""
        try:
            program(self)
        except BaseException:
            # The error is written next to the log, so that a test can read the last error alone.
            self.note("error", traceback.format_exc())
            raise
        finally:
            result = self.folder / f"checks.{self.rank}.{os.getpid()}.json"
            result.write_text(json.dumps(self._checks))
        return 1 if any(self._checks.values()) else 0

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Context in which a failure is recorded under this name."""
        if name in self._checks:
            raise ValueError(f"two checks are called {name!r}")
        self._checks[name] = "did not end"
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(where.filename).name}:{where.lineno}"
            self._checks[name] = f"{type(error).__name__}: {error} ({at})"
            traceback.print_exc()
        else:
            self._checks[name] = None

    @contextmanager
    def check_raises(
        self, name: str, kind: type[Exception] | tuple[type[Exception], ...], pattern: str
    ) -> Iterator[None]:
        """Context that passes if the body raises `kind` with a text that matches `pattern` (a
        regex)."""
        with self.check(name):
            try:
                yield
            except kind as error:
                text = str(error)
                assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"
            else:
                raise AssertionError(f"did not raise {kind}")

    def mark(self, name: str) -> None:
        """Report to the test that the worker has come to this point."""
        self.note(f"mark.{name}", "")

    def note(self, name: str, text: str) -> None:
        part = self.folder / f".{name}.{self.rank}"
        part.write_text(text)
        part.rename(self.folder / f"{name}.{self.rank}")

    def wait_go(self, name: str, timeout_s: float = 200.0) -> None:
        """Wait for the test's signal."""
        sign = self.folder / f"go.{name}"
        self.wait_until(f"the test's sign {name!r}", sign.exists, timeout_s)

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = 200.0) -> None:
        """Wait until `holds()` is true; the error names `what`."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for: {what}")
            time.sleep(0.01)
