"""Keeps the file of verl's file logger, which verl empties whenever training begins."""

from __future__ import annotations

import itertools
import os
from pathlib import Path


def keep_metrics(project: str, experiment: str) -> None:
    """Rename the file to ``NAME.1.jsonl``, ``NAME.2.jsonl`` and so on.

    Args:
        project: ``trainer.project_name``.
        experiment: ``trainer.experiment_name``.
    """
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", "."), project, f"{experiment}.jsonl")
    file = Path(os.environ.get("VERL_FILE_LOGGER_PATH", root))
    if file.is_file() and file.stat().st_size:
        names = (file.with_suffix(f".{number}{file.suffix}") for number in itertools.count(1))
        file.rename(next(other for other in names if not other.exists()))
