"""Keeps a run's checkpoints in an object store too, through NVIDIA's multi-storage-client."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
"""File in which verl keeps the step of its last checkpoint."""
_EVERY_S = 5.0


def last_step(folder: Path | str) -> str:
    """Return the step of the last checkpoint in a folder; empty if there is none."""
    file = Path(folder, LATEST)
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


class Store:
    """A folder of verl's checkpoints, and its copy in a store."""

    def __init__(self, folder: Path, url: str) -> None:
        """``url``: ``s3://BUCKET/PATH``, ``gs://BUCKET/PATH`` or ``msc://PROFILE/PATH``."""
        import multistorageclient  # most runs have no store

        # By default a copy starts a process per core, and training needs these.
        os.environ.setdefault("MSC_NUM_PROCESSES", "1")
        self._msc = multistorageclient
        self._folder, self._url = folder, url.rstrip("/")
        self._tracker = f"{self._url}/{LATEST}"
        self._stored = ""
        if self._msc.is_file(self._tracker):
            with self._msc.open(self._tracker, "rb") as file:
                self._stored = file.read().decode().strip()

    def fetch(self) -> None:
        """Download the store's last checkpoint, unless the folder has it or a later one."""
        step = self._stored
        if step and int(step) > int(last_step(self._folder) or 0):
            self._sync(f"{self._url}/global_step_{step}", str(self._folder / f"global_step_{step}"))
            (self._folder / LATEST).write_text(step, encoding="utf-8")
            print(f"the checkpoint of step {step} comes from {self._url}", flush=True)

    def copy(self) -> None:
        """Upload the folder's last checkpoint, unless the store has it. The store names a
        checkpoint as its last one after all files of it."""
        step = last_step(self._folder)
        if step and step != self._stored:
            self._sync(str(self._folder / f"global_step_{step}"), f"{self._url}/global_step_{step}")
            with self._msc.open(self._tracker, "wb") as file:
                file.write(step.encode())
            self._stored = step

    def _sync(self, source: str, target: str) -> None:
        # By default the client leaves out hidden files, and Megatron's `.metadata` is one.
        self._msc.sync(source, target, ignore_hidden=False)


class StoreError(Exception):
    """The store did not give or take a checkpoint; the text has the reason."""


@contextmanager
def keep_in_store(folder: Path, url: str) -> Iterator[None]:
    """Context that begins with the store's last checkpoint, unless the folder has a later one, and
    copies each new one. At its end the last one is in the store.

    Raises:
        StoreError: the first or last checkpoint could not be copied.
    """
    ended = threading.Event()

    def copy_all() -> None:
        while not ended.wait(_EVERY_S):
            try:
                store.copy()
            except Exception as error:  # The store may answer again; the last copy raises.
                print(f"error: a checkpoint was not copied: {error}", file=sys.stderr, flush=True)

    with _named(f"cannot read checkpoints of {url}"):
        store = Store(folder, url)
        store.fetch()
    thread = threading.Thread(target=copy_all, name="store")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with _named(f"the last checkpoint is not in {url}"):
            store.copy()


@contextmanager
def _named(text: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StoreError(f"{text}: {error}") from error
