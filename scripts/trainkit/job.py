"""One training run: torchrun on this machine, watched through the record that rank 0 writes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.children import Spawned, end_all, last_lines

ENTRY = "pretrain_dpu_gpt.py"
LOG_LINES = 40
_GRACE_S = 10.0
_POLL_S = 0.2


class JobError(Exception):
    """A training run that did not end well; the text holds the end of its logs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the record."""

    iteration: int
    loss: float
    """Average over all tokens of the step on all workers, not rounded."""
    tokens: int
    seconds: float
    """Since the job began to train."""
    push_pull_mb_per_s: float
    pushed_bytes: int = 0
    """By rank 0 since it began, to servers."""


@dataclass(kw_only=True)
class Record:
    """What a run wrote."""

    steps: list[Step] = field(default_factory=list)
    checksum: str = ""
    """SHA-256 over the final parameters; empty while the run goes on."""
    gpu_bytes: int = 0
    """What torch had in use on the rank's GPU at most; 0 without one."""

    def tokens_per_s(self, warm_up: int = 5) -> float:
        """Throughput from the step ``warm_up`` on, or from the first one of a short run."""
        if len(self.steps) < 2:
            return 0.0
        start = min(warm_up, len(self.steps) - 2)
        spent = self.steps[-1].seconds - self.steps[start].seconds
        return sum(step.tokens for step in self.steps[start + 1 :]) / max(spent, 1e-9)


def read_record(path: Path) -> Record:
    """Read what is there of a record; a last line that is not whole yet is left out."""
    record = Record()
    if not path.exists():
        return record
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry: dict[str, Any] = json.loads(line)
        if "parameters_sha256" in entry:
            record.checksum = entry["parameters_sha256"]
            record.gpu_bytes = entry["gpu_bytes"]
        else:
            record.steps.append(
                Step(
                    iteration=entry["iteration"],
                    loss=entry["loss"],
                    tokens=entry["tokens"],
                    seconds=entry["seconds"],
                    push_pull_mb_per_s=entry.get("push_pull_mb_per_s", 0.0),
                    pushed_bytes=entry.get("pushed_bytes", 0),
                )
            )
    return record


@dataclass(frozen=True, kw_only=True)
class Job:
    """How to run Megatron's training loop on this machine."""

    tree: Path
    """The patched Megatron-LM."""
    folder: Path
    """For the record and the logs of this run; emptied first."""
    workers: int
    arguments: Sequence[str]
    """Of the entry script."""
    environment: Mapping[str, str]
    """Added to this process's own."""

    def run(self, progress: Callable[[Record], None]) -> Record:
        """Train; ``progress`` is called with the record as it grows.

        Raises:
            JobError: a worker failed, or the run ended without its record.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        record_file = self.folder / "steps.jsonl"
        with self._torchrun(record_file) as process:
            while process.running:
                time.sleep(_POLL_S)
                progress(read_record(record_file))
        record = read_record(record_file)
        if process.status != 0:
            raise JobError(
                f"training ended with exit status {process.status}\n{self._last_lines()}"
            )
        if not record.steps or not record.checksum:
            raise JobError(f"training ended without its record\n{self._last_lines()}")
        progress(record)
        return record

    @contextmanager
    def _torchrun(self, record_file: Path) -> Iterator[Spawned]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.workers)]
        command += ["--redirects", "3", "--log-dir", str(self.folder / "workers")]
        command += [str(self.tree / ENTRY), *self.arguments, "--record-steps", str(record_file)]
        environment = {**os.environ, **self.environment}
        process = Spawned("torchrun", command, environment, self.folder, cwd=Path.cwd())
        try:
            yield process
        finally:
            end_all([process], _GRACE_S)  # torchrun ends its workers

    def _last_lines(self) -> str:
        """The end of what each worker wrote to stderr, or of torchrun's log when none did."""
        logs = sorted(self.folder.rglob("stderr.log")) or [self.folder / "torchrun.log"]
        return "\n".join(f"---- last lines of {log}\n{last_lines(log, LOG_LINES)}" for log in logs)
