"""Log lines of Python code, in the same format as the C++ lines (``base/log.h``)."""

from __future__ import annotations

import json
import logging
import socket
import sys
import time

FORMAT = "BYTEPS_LOG_FORMAT"
HIDE_TIME = "BYTEPS_LOG_HIDE_TIME"
LOGGERS = ("byteps", "megatron.core.distributed.dpu_reduce")
"""Loggers to which :func:`install` adds a handler."""

_SEVERITIES = {"CRITICAL": "FATAL"}
_HANDLER_NAME = "byteps log lines"


class LineFormatter(logging.Formatter):
    """Formats lines with time (UTC), severity, role, rank, host, source and message.

    Args:
        rank: this worker's rank; less than 0 if it is unknown.
        as_json: one JSON object per line instead of text.
        hide_time: leave the time out.
    """

    def __init__(self, *, rank: int, as_json: bool, hide_time: bool) -> None:
        super().__init__()
        self._rank = rank
        self._as_json = as_json
        self._hide_time = hide_time
        self._host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        seconds = int(record.created)
        microseconds = int((record.created - seconds) * 1e6)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{microseconds:06d}Z"
        severity = _SEVERITIES.get(record.levelname, record.levelname)
        source = f"{record.filename}:{record.lineno}"
        if self._as_json:
            fields = {
                **({} if self._hide_time else {"time": moment}),
                "severity": severity,
                "role": "worker",
                "rank": None if self._rank < 0 else self._rank,
                "host": self._host,
                "source": source,
                "message": message,
            }
            return json.dumps(fields)
        head = "" if self._hide_time else f"{moment} "
        rank = "-" if self._rank < 0 else str(self._rank)
        head += f"{severity} worker {rank} {self._host} {source}: "
        return "\n".join(head + line for line in message.splitlines() or [""])


_formatter = LineFormatter(rank=-1, as_json=False, hide_time=False)


def render(level: int, message: str) -> str:
    """Format a message without a final newline, for callers that cannot use a logger."""
    caller = sys._getframe(1).f_code
    record = logging.LogRecord(
        "byteps", level, caller.co_filename, caller.co_firstlineno, message, None, None
    )
    return _formatter.format(record)


def install(rank: int, *, form: str | None = None, hide_time: bool = False) -> None:
    """Add a handler to this project's loggers. It writes lines in that format to stderr.

    A second call, for example after a fork, changes the rank in the lines.

    Args:
        form: BYTEPS_LOG_FORMAT. None: it is not set; if the program has configured logging itself,
            nothing is installed.
        hide_time: BYTEPS_LOG_HIDE_TIME.
    """
    global _formatter
    _formatter = LineFormatter(rank=rank, as_json=form == "json", hide_time=hide_time)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        ours = [h for h in logger.handlers if h.get_name() == _HANDLER_NAME]
        if not ours and form is None and logger.hasHandlers():
            continue
        for old in ours:
            logger.removeHandler(old)
        handler = logging.StreamHandler(sys.stderr)
        handler.set_name(_HANDLER_NAME)
        handler.setFormatter(_formatter)
        logger.addHandler(handler)
        # With propagation, the program's own handlers would write each line a second time.
        logger.propagate = False
