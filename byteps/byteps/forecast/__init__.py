"""Forecast of a job's gain from servers, before the job runs or when it starts.

Three programs print it: ``megatron-byteps sizing`` for a number of parameters, ``megatron-byteps
check`` for Megatron's arguments, and a job with ``--use-dpu-reduce`` for itself. :func:`forecast`
compares plain Megatron with its best own flags, servers on the workers' hosts, and servers on spare
machines. Gains are relative to the best plain row.

A row's time is that of its gradients plus that of its parameters. Each is the least time that links
allow (:mod:`byteps.cost_model`), or the time of a machine's cores or memory, if that is longer. If
the computing time of a micro-batch is known, communication that hides behind it counts as no gain.
"""

from __future__ import annotations

from byteps.forecast.machines import Machines
from byteps.forecast.needs import Needs, needs_of
from byteps.forecast.rows import Forecast, Row, forecast
from byteps.forecast.training import (
    DDP,
    FEW_BITS,
    FSDP2,
    MEGATRON,
    WIRE_BYTES,
    Kind,
    Program,
    Training,
)
from byteps.forecast.words import (
    answer,
    break_even,
    change_text,
    limit_text,
    rates_text,
    servers_text,
    size_text,
    table,
)

__all__ = [
    "DDP",
    "FEW_BITS",
    "FSDP2",
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
    "change_text",
    "forecast",
    "limit_text",
    "needs_of",
    "rates_text",
    "servers_text",
    "size_text",
    "table",
]
