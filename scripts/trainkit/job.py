"""A training run and its results. torchrun runs it on this machine, or Ray does.

Progress is read from the record that rank 0 writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.children import Spawned, end_all, last_lines, python_of_ranks
from scripts.progress import aligned

if TYPE_CHECKING:
    from megatron_byteps_ray import job as ray_job

ENTRY = "pretrain_dpu_gpt.py"
SCHEMA = 1
"""Schema version of the JSON of losses."""
SAVE_EVERY = 50
"""Steps between checkpoints if the user wants to lose a rank. If it is lost earlier, there are
fewer."""
LOG_LINES = 40
_GRACE_S = 10.0
_POLL_S = 0.2


class JobError(Exception):
    """Error of a failed training run. The text has the end of its logs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of the record."""

    iteration: int
    loss: float
    """Average over all tokens of the step on all workers, not rounded."""
    tokens: int
    seconds: float
    """Seconds since training began."""
    push_pull_mb_per_s: float
    pushed_bytes: int = 0
    """Bytes that rank 0 has pushed since its start."""


@dataclass(kw_only=True)
class Record:
    """Record of a run."""

    steps: list[Step] = field(default_factory=list)
    checksum: str = ""
    """SHA-256 over the final parameters; empty until the run has ended."""
    gpu_bytes: int = 0
    """Peak GPU memory that torch has allocated on the rank; 0 without a GPU."""

    def tokens_per_s(self, warm_up: int = 5) -> float:
        """Return the throughput from step ``warm_up`` on. In a short run, measure from the first
        step on."""
        if len(self.steps) < 2:
            return 0.0
        start = min(warm_up, len(self.steps) - 2)
        spent = self.steps[-1].seconds - self.steps[start].seconds
        return sum(step.tokens for step in self.steps[start + 1 :]) / max(spent, 1e-9)


def read_record(path: Path) -> Record:
    """Read a record that may be incomplete. An incomplete last line is left out."""
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
    """A run of Megatron's training loop on this machine."""

    tree: Path
    """Folder of the patched Megatron-LM."""
    folder: Path
    """Folder of the record and logs of this run. It is emptied first."""
    workers: int
    arguments: Sequence[str]
    """Arguments of the entry script."""
    environment: Mapping[str, str]
    """Variables that are added to this process's environment."""

    def run(self, progress: Callable[[Record], None]) -> Record:
        """Train. ``progress`` is called with the record as it grows.

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
        command = [python_of_ranks(), "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.workers)]
        command += ["--redirects", "3", "--log-dir", str(self.folder / "workers")]
        command += [str(self.tree / ENTRY), *self.arguments, "--record-steps", str(record_file)]
        environment = {**os.environ, **self.environment}
        process = Spawned("torchrun", command, environment, self.folder, cwd=Path.cwd())
        try:
            yield process
        finally:
            end_all([process], _GRACE_S)  # ends torchrun, which ends its workers

    def _last_lines(self) -> str:
        """Return the end of each worker's stderr. If there is none, return that of torchrun's
        log."""
        logs = sorted(self.folder.rglob("stderr.log")) or [self.folder / "torchrun.log"]
        return "\n".join(f"---- last lines of {log}\n{last_lines(log, LOG_LINES)}" for log in logs)


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a successful run."""

    backend: str
    workers: int
    servers: int
    """Number of servers; 0 without BytePS."""
    record: Record

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.record.steps]

    @property
    def final_loss(self) -> float:
        """Mean loss of the last ten steps, because the loss of a single batch varies."""
        return statistics.fmean(self.losses[-10:])

    @property
    def push_pull_mb_per_s(self) -> float:
        """Median over the steps for which BytePS reported a speed; 0 without BytePS."""
        speeds = [s.push_pull_mb_per_s for s in self.record.steps if s.push_pull_mb_per_s > 0]
        return statistics.median(speeds) if speeds else 0.0


def largest_difference(first: Result, other: Result) -> float:
    """Return the largest difference of the two runs' losses at the same step."""
    return max(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True))


def same_parameters(first: Result, other: Result) -> bool:
    """Return whether the final parameters of the two runs are bit-identical."""
    return first.record.checksum == other.record.checksum


def table(results: Sequence[Result]) -> str:
    """Return the summary table of ``make train``."""
    head = [
        "backend",
        "workers",
        "servers",
        "first loss",
        "last loss",
        "tokens/s",
        "push-pull MB/s",
    ]
    rows = [head]
    for result in results:
        rows.append(
            [
                result.backend,
                str(result.workers),
                str(result.servers) if result.servers else "-",
                f"{result.losses[0]:.4f}",
                f"{result.final_loss:.4f}",
                f"{result.record.tokens_per_s():,.0f}",
                f"{result.push_pull_mb_per_s:,.1f}" if result.push_pull_mb_per_s else "-",
            ]
        )
    lines = aligned(rows, left=1).splitlines()
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def write_json(results: Sequence[Result], path: Path) -> None:
    """Write every loss with full precision, and each run's properties."""
    runs = [
        {
            "backend": result.backend,
            "workers": result.workers,
            "servers": result.servers,
            "losses": result.losses,
            "tokens_per_s": result.record.tokens_per_s(),
            "push_pull_mb_per_s": result.push_pull_mb_per_s,
            "parameters_sha256": result.record.checksum,
        }
        for result in results
    ]
    path.write_text(json.dumps({"schema": SCHEMA, "runs": runs}, indent=1) + "\n")


def draw(
    results: Sequence[Result],
    path: Path,
    title: str = "GPT on text, byte by byte: data-parallel gradients summed by BytePS",
    unit: str = "byte",
) -> None:
    """Draw the loss curves as a PNG. Losses are per ``unit``."""
    # The import is here, because matplotlib takes a second, and a failed run does not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles: list[dict[str, Any]] = [
        {"linewidth": 3.5, "alpha": 0.45},
        {"linewidth": 1.0, "color": "black"},
    ]
    for result, style in zip(results, styles, strict=False):
        steps = [step.iteration for step in result.record.steps]
        label = f"{result.backend}, {result.workers} workers"
        axes.plot(steps, result.losses, label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """Counterpart of Job that trains under Ray, on this machine or a cluster. It needs
    build/venv-ray or venv-hf. Fields of the same name have the same meaning."""

    tree: Path
    folder: Path
    workers: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    servers: int
    spares: int
    address: str | None
    """Address of a Ray cluster; None starts a cluster on this machine."""
    lose_at: int | None
    """Kill the actor of the last rank after this step, to show that the job goes on."""
    gpus: bool
    """Whether each worker has a GPU."""

    def run(self, progress: Callable[[Record], None]) -> Record:
        """Train. ``progress`` is called with the record as it grows.

        Raises:
            JobError: the job could not go on, or ended without its record.
        """
        from megatron_byteps_ray import job as ray_job
        from megatron_byteps_ray.cluster import JobError as RayJobError
        from megatron_byteps_ray.cluster import cluster
        from megatron_byteps_ray.job import Console
        from megatron_byteps_ray.settings import Settings, preload_for

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

        job = ray_job.Job(settings, listen)
        # Ray's sockets need a short path, independent of TMPDIR.
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
        """Return the checkpoint arguments of a run that will lose a rank."""
        if self.lose_at is None:
            return []
        saved = str((self.folder / "checkpoints").absolute())
        every = max(1, min(SAVE_EVERY, self.lose_at // 2))
        return ["--save", saved, "--load", saved, "--save-interval", str(every)]

    def _lose(self, job: ray_job.Job, event: dict[str, Any]) -> None:
        first = event["generation"] == 0
        if self.lose_at is not None and first and event["step"] == self.lose_at:
            import ray

            print(f"  step {event['step']}: killing the actor of rank {self.workers - 1}")
            ray.kill(job.pool.assigned[-1].actor)


def _add(record: Record, event: Mapping[str, Any], begin: float) -> None:
    """Add a step. A step that is repeated after a failure replaces itself and all later steps."""
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
