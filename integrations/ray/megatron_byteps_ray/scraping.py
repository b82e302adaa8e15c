"""Where the metrics of a job's processes are: a port for each, and the list for Prometheus.

``BYTEPS_METRICS_PORT`` is the first one. Servers have one each, whatever machines they are on, and
ranks the ports after those: no two processes of a machine have the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .places import local_variables

VARIABLE = "BYTEPS_METRICS_PORT"
FILE = "prometheus.json"
"""In the job's folder; Prometheus reads it as ``file_sd_configs``, and again when it changes."""


def first_port(environment: Mapping[str, str]) -> int:
    """0 where metrics are off.

    Raises:
        ValueError: the variable is no port.
    """
    text = environment.get(VARIABLE, "0")
    if not (text.isdigit() and int(text) < 1 << 16):
        raise ValueError(f"{VARIABLE}={text} is no port: set it to the first of those to use, or 0")
    return int(text)


def of_server(environment: Mapping[str, str], index: int) -> dict[str, str]:
    """The variable of one of the servers."""
    first = first_port(environment)
    return {VARIABLE: str(first + index)} if first else {}


def of_ranks(environment: Mapping[str, str], servers: int) -> dict[str, str]:
    """The variable of ranks, each of which adds its BYTEPS_LOCAL_RANK."""
    return of_server(environment, servers)


def write_list(
    folder: Path, ranks: int, servers: Sequence[str], places: Sequence[Mapping[str, Any]]
) -> None:
    """Replace the list in this folder.

    Args:
        ranks: the port of ranks, before they add to it.
        servers: where each server's metrics are, as ``address:port``.
        places: of ranks; see ``places.local_variables``, with ``address``.
    """
    targets = [
        {"targets": [where], "labels": {"job": folder.name, "server": str(index)}}
        for index, where in enumerate(servers)
    ]
    for rank, place in enumerate(places):
        port = ranks + int(local_variables(places, rank)["BYTEPS_LOCAL_RANK"])
        labels = {"job": folder.name, "worker": str(rank)}
        targets.append({"targets": [f"{place['address']}:{port}"], "labels": labels})
    new = folder / f"{FILE}.new"
    new.write_text(json.dumps(targets, indent=1) + "\n", encoding="utf-8")
    new.replace(folder / FILE)
