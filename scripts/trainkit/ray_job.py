"""One training run under Ray, on this machine or a cluster; needs build/venv-ray or venv-hf."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megatron_byteps_ray.cluster import cluster
from megatron_byteps_ray.console import Console
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.pool import JobError as RayJobError
from megatron_byteps_ray.settings import Settings, preload_for

from .job import ENTRY, JobError, Record, Step, read_record

SAVE_EVERY = 50
"""Steps, where a rank is to be lost; fewer where that is soon."""


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """The counterpart of ``job.Job``; what they share means the same."""

    tree: Path
    folder: Path
    workers: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    servers: int
    spares: int
    address: str | None
    """Of a Ray cluster; None starts one on this machine."""
    lose_at: int | None
    """Kill the actor of the last rank after this step, to see the job go on."""
    gpus: bool
    """Each worker has one."""

    def run(self, progress: Callable[[Record], None]) -> Record:
        """Train; ``progress`` is called with the record as it grows.

        Raises:
            JobError: the job could not go on, or ended without its record.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        record_file = self.folder / "steps-of-rank.jsonl"
        settings = Settings(
            entry=str((self.tree / ENTRY).absolute()),
            arguments=(*self._saving(), *self.arguments, "--record-steps", str(record_file)),
            ranks=self.workers,
            spares=self.spares,
            servers=self.servers,
            gpus_per_rank=float(self.gpus),
            folder=self.folder,
            environment=self.environment,
            python_path=(str(self.tree.absolute()),),
            preload=preload_for(self.arguments),
        )
        record, begin = Record(), [0.0]
        show = Console(lambda text: print(f"  {text}", flush=True))

        def listen(event: dict[str, Any]) -> None:
            if event["event"] != "step":
                show(event)
                return
            begin[0] = begin[0] or event["time"]
            _add(record, event, begin[0])
            progress(record)
            self._lose(job, event)

        job = Job(settings, listen)
        # Ray's sockets need a short path, whatever TMPDIR is.
        with tempfile.TemporaryDirectory(prefix="mbr-", dir="/tmp") as scratch:
            try:
                with cluster(settings, address=self.address, temp_dir=scratch):
                    job.run()
            except RayJobError as error:
                raise JobError(str(error)) from error
        written = read_record(record_file)
        if not record.steps or not written.checksum:
            raise JobError("training ended without its record")
        record.checksum = written.checksum
        return record

    def _saving(self) -> list[str]:
        """Where a run that is to lose a rank keeps its checkpoints."""
        if self.lose_at is None:
            return []
        saved = str((self.folder / "checkpoints").absolute())
        every = max(1, min(SAVE_EVERY, self.lose_at // 2))
        return ["--save", saved, "--load", saved, "--save-interval", str(every)]

    def _lose(self, job: Job, event: dict[str, Any]) -> None:
        first = event["incarnation"] == 0
        if self.lose_at is not None and first and event["step"] == self.lose_at:
            print(f"  step {event['step']}: killing the actor of rank {self.workers - 1}")
            ray.kill(job.pool.assigned[-1].actor)


def _add(record: Record, event: Mapping[str, Any], begin: float) -> None:
    """Add a step; one that is done again after a failure replaces those from it on."""
    while record.steps and record.steps[-1].iteration >= event["step"]:
        record.steps.pop()
    record.steps.append(
        Step(
            iteration=event["step"],
            loss=event["values"]["lm loss"],
            tokens=event["tokens"],
            seconds=event["time"] - begin,
            push_pull_mb_per_s=0.0,
        )
    )
