"""torchrun, in a process that has imported torch; the ranks that it starts are programs as ever."""

from __future__ import annotations

from torch.distributed import run

from tests.multiproc.programs.job import Job


def main(job: Job) -> None:
    run.main(job.args["words"])
