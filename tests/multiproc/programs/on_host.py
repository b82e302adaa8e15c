"""Programs on an emulated host: in a network namespace."""

from __future__ import annotations

import os
from pathlib import Path

from tests.multiproc.programs import lost_servers, replicas
from tests.multiproc.programs.job import Job


def train(job: Job) -> None:
    """The replicas of replicas.py, on the host whose namespace is `namespace`."""
    _enter(job)
    replicas.train(job)


def with_copies(job: Job) -> None:
    """The workers of lost_servers.py, likewise."""
    _enter(job)
    lost_servers.with_copies(job)


def _enter(job: Job) -> None:
    with Path("/run/netns", job.args["namespace"]).open() as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)  # for the threads to come, too
