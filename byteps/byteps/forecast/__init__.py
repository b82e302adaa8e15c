"""What a job would gain, before it runs or when it starts: one answer, which three programs print.

``python -m byteps.sizing`` asks for a number of parameters, ``python -m
megatron.core.distributed.dpu_reduce.check`` for Megatron's arguments, and a job with
``--use-dpu-reduce`` for itself. :func:`forecast` compares plain Megatron with its own best flags,
servers on the workers' hosts, and servers on spare machines. Gains are over the best plain row.

Times are those of the links at their best (:mod:`byteps.cost_model`), or of the cores where they
are too few, for gradients and then parameters. What overlaps with the backward pass gains less.
"""

from __future__ import annotations

from byteps.forecast.machines import Machines
from byteps.forecast.needs import Needs, needs_of
from byteps.forecast.rows import Forecast, Row, forecast
from byteps.forecast.training import FEW_BITS, WIRE_BYTES, Kind, Training
from byteps.forecast.words import answer, break_even, rates_text, servers_text, size_text, table

__all__ = [
    "FEW_BITS",
    "WIRE_BYTES",
    "Forecast",
    "Kind",
    "Machines",
    "Needs",
    "Row",
    "Training",
    "answer",
    "break_even",
    "forecast",
    "needs_of",
    "rates_text",
    "servers_text",
    "size_text",
    "table",
]
