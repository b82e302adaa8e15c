"""The gain of a job, computed before it runs or when it starts: an answer that three programs
print.

``megatron-byteps sizing`` asks for a number of parameters, ``megatron-byteps
check`` for Megatron's arguments, and a job with
``--use-dpu-reduce`` for itself. :func:`forecast` compares plain Megatron with its own best flags,
servers on the workers' hosts, and servers on spare machines. Gains are over the best plain row.

Times are those of the links at their best (:mod:`byteps.cost_model`), or of the cores or the memory
of a machine where these take longer, for gradients and then parameters. With the time for which a
micro-batch computes, what hides behind it gains nothing.
"""

from __future__ import annotations

from byteps.forecast.machines import Machines
from byteps.forecast.needs import Needs, needs_of
from byteps.forecast.rows import Forecast, Row, forecast
from byteps.forecast.training import DDP, FEW_BITS, MEGATRON, WIRE_BYTES, Kind, Program, Training
from byteps.forecast.words import (
    answer,
    break_even,
    limit_text,
    rates_text,
    servers_text,
    size_text,
    table,
)

__all__ = [
    "DDP",
    "FEW_BITS",
    "MEGATRON",
    "WIRE_BYTES",
    "Forecast",
    "Kind",
    "Machines",
    "Needs",
    "Program",
    "Row",
    "Training",
    "answer",
    "break_even",
    "forecast",
    "limit_text",
    "needs_of",
    "rates_text",
    "servers_text",
    "size_text",
    "table",
]
