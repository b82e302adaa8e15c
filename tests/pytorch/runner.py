"""Runs tests of PyTorch's own suite of torch.distributed, which its wheel has.

A program: it imports that suite once, and forks the ranks of each test. On its standard output is a
JSON line for each test that has ended.

    runner.py --backend gloo|byteps [--stand-in] [--ranks N] [--per-host N] [--tests NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pytorch import stand_in

LIMIT_S = 150.0
"""Limit of one test, in seconds: it is there to end a hang."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "byteps"], required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="ranks that share a host")
    parser.add_argument("--stand-in", action="store_true", help="the CPU stands in for GPUs")
    parser.add_argument("--tests", nargs="*", default=[], metavar="NAME", help="default: all")
    options = parser.parse_args()
    # The suite reads these when it is imported.
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(options.ranks),
        TEMP_DIR=tempfile.gettempdir(),
        MASTER_ADDR="127.0.0.1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    if options.stand_in:
        stand_in.prepare()
    from torch.testing._internal.distributed import distributed_test as suite

    case = type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})
    every = sorted(name for name in dir(case) if name.startswith("test_"))
    for name in options.tests or every:
        outcome = run_test(case, name, options)
        print(json.dumps({"test": name, **outcome}), flush=True)
    return 0


def run_test(case: Any, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one test on ranks of its own.

    Returns:
        "outcome": "passed", "skipped", "failed" or "late"; "error": the end of the ranks' output,
        where it did not pass; "operations": all-reduces that went through servers, on all ranks.
    """
    from torch.testing._internal.distributed import distributed_test as suite

    with tempfile.TemporaryDirectory(prefix=f"{name}-") as made:
        return _run_in(Path(made), suite, case, name, options)


def _run_in(
    folder: Path, suite: Any, case: Any, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    os.environ["TEMP_DIR"] = str(folder)
    suite.initialize_temp_directories()
    suite.Barrier.init()
    ranks = [_fork(case, name, rank, folder, options) for rank in range(options.ranks)]
    codes = _wait(ranks)
    # Whatever a rank has started has its session.
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(len(ranks))]
    outcome = _outcome(case, name, codes)
    counts = [folder / f"operations.{rank}" for rank in range(len(ranks))]
    return {
        "outcome": outcome,
        "codes": codes,
        "error": "\n".join(log[-3000:] for log in logs) if outcome in ("failed", "late") else "",
        "operations": sum(int(count.read_text()) for count in counts if count.exists()),
    }


def _outcome(case: Any, name: str, codes: Sequence[int | None]) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    if None in codes:
        return "late"
    if any(code in skips for code in codes):
        return "skipped"
    # This test ends its ranks itself.
    if name == "test_ddp_has_finalized":
        return "passed"
    return "passed" if not any(codes) else "failed"


def _fork(case: Any, name: str, rank: int, folder: Path, options: argparse.Namespace) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if options.backend == "byteps":
            _through_servers(rank, folder, options)
        with stand_in.OnCpu() if options.stand_in else contextlib.nullcontext():
            case._run(rank, name, str(folder / "store"), _Pipe())
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Pipe:
    """In the place of the pipe by which the suite's parent is told of errors: they are in the log.

    The suite's thread waits on it together with a real pipe, so it has a file descriptor.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def send(self, text: object) -> None:
        print(text, file=sys.stderr)

    def close(self) -> None:
        pass


def _through_servers(rank: int, folder: Path, options: argparse.Namespace) -> None:
    os.environ.update(
        BYTEPS_EMBEDDED_SERVERS="1",
        BYTEPS_C10D_MIN_BYTES="1",
        BYTEPS_C10D_BACKEND="flat" if options.per_host == 1 else "node-first",
        BYTEPS_HOST_ID=f"host{rank // options.per_host}",
    )
    import byteps.torch as bps
    from byteps import c10d_plugin
    from byteps.torch import session

    c10d_plugin.install()
    leave = session.shutdown

    def counted(*arguments: Any, **named: Any) -> Any:
        done = bps.get_metrics()["byteps_worker_operations_total"]
        (folder / f"operations.{rank}").write_text(str(done))
        return leave(*arguments, **named)

    session.shutdown = counted


def _wait(pids: Sequence[int]) -> list[int | None]:
    deadline = time.monotonic() + LIMIT_S
    codes: dict[int, int | None] = dict.fromkeys(pids)
    while None in codes.values() and time.monotonic() < deadline:
        for pid in pids:
            if codes[pid] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid, code in codes.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return list(codes.values())


if __name__ == "__main__":
    sys.exit(main())
