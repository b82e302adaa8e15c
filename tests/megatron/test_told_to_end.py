"""All processes of a job get SIGTERM at the same time, as with Slurm's time limit or `kubectl
delete`."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.train import MODEL
from tests.multiproc.cluster import RUN_S, processes_with, wait_all
from tests.multiproc.scripted import MARK, Scripted

TINY = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"),
    *("--train-iters", "1000000", "--log-interval", "1", "--save-interval", "1000000"),
    *("--use-dpu-reduce", "--dpu-reduce-backend", "flat", "--exit-signal-handler"),
]


@pytest.fixture
def scripted(run_dir: Path) -> Iterator[Scripted]:
    made = Scripted(run_dir)
    yield made
    made.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="end-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("words", "is_embedded"),
    [
        pytest.param((), False, id="ranks keep the optimizer", marks=pytest.mark.thorough),
        pytest.param(("--dpu-optimizer",), False, id="servers keep the optimizer"),
        pytest.param(("--dpu-optimizer",), True, id="embedded", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_is_saved(
    scripted: Scripted,
    tree: Path,
    short_folder: Path,
    warm_python: str,
    words: tuple[str, ...],
    is_embedded: bool,
) -> None:
    """The scheduler and servers wait for the checkpoint and, with --dpu-optimizer, for their own
    state."""
    nodes = () if is_embedded else scripted.start_nodes(workers=2, servers=1)
    cluster = () if is_embedded else ("--scheduler", f"127.0.0.1:{scripted.port}")
    saved = scripted.folder / "checkpoint"
    # Sockets of Megatron's writers are in TMPDIR, and a socket's path must be short.
    env = {
        "MEGATRON_CPU": "1",
        "PYTHON_EXEC": warm_python,
        "PYTHONPATH": str(tree),
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(short_folder),
    }
    worker = scripted.start(
        "worker",
        *(*cluster, "--servers", "1"),
        *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        # torchrun kills ranks that take longer than this, and on a busy machine they do.
        *("--shutdown-timeout", str(int(RUN_S))),
        *("--", str(tree / "pretrain_dpu_gpt.py"), *MODEL, *TINY, *words, "--save", str(saved)),
        env=env,
    )
    deadline = time.monotonic() + RUN_S
    while not re.search(r"iteration +3/", worker.text):
        assert worker.running and time.monotonic() < deadline, worker.text[-3000:]
        time.sleep(0.05)
    for pid in processes_with(MARK, scripted.mark):
        os.kill(pid, signal.SIGTERM)
    wait_all([worker, *nodes], RUN_S)
    for process in (worker, *nodes):
        assert process.wait(0) == 143, process.text[-3000:]
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert last >= 3
    assert (saved / f"iter_{last:07d}").is_dir()
    for process in (worker, *nodes):
        assert "Error" not in process.text, process.text[-3000:]
