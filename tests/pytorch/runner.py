"""Runs tests of PyTorch's own suite of torch.distributed, from its wheel.

A program: imports that suite once, and forks the ranks of each test. Standard output gets a JSON
line for each test that has ended.

    runner.py --backend gloo|byteps|rounded [--stand-in] [--ranks N] [--per-host N] [--wire TYPE]
        [--tests NAME ...]

``rounded`` is ``byteps`` without rounding on the wire: each tensor is rounded to the wire dtype
before it is sent, and the sum after it has returned.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.pytorch import stand_in

LIMIT_S = 120.0
"""Limit of a test in seconds, against hangs."""
BARRIER_S = 60.0
"""Seconds that a rank waits for the others between two parts of a test. The suite's own 10 s are
too short: results would depend on the machine's load."""
ERROR_CHARS = 3000
"""Characters kept from the end of each rank's output."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "byteps", "rounded"], required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="ranks that share a host")
    parser.add_argument("--wire", default="same", help="BYTEPS_C10D_WIRE_DTYPE")
    parser.add_argument("--stand-in", action="store_true", help="the CPU stands in for GPUs")
    parser.add_argument("--tests", nargs="*", default=[], metavar="NAME", help="default: all")
    options = parser.parse_args()
    prepare(options)
    case = case_of()
    every = sorted(name for name in dir(case) if name.startswith("test_"))
    for name in options.tests or every:
        outcome = run_test(case, name, options)
        print(json.dumps({"test": name, **outcome}), flush=True)
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Import the suite with this number of ranks."""
    # The suite reads these variables when it is imported.
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

    sync = suite.Barrier.sync

    def sync_when_busy(wait_for: int | None = None, timeout: float = 0) -> None:
        sync(wait_for, max(timeout, BARRIER_S))

    setattr(suite.Barrier, "sync", sync_when_busy)  # noqa: B010 # mypy refuses a plain one


def case_of(*added: type) -> Any:
    """Make the suite's class of tests with ranks, extended by `added`."""
    from torch.testing._internal.distributed import distributed_test as suite

    bases = (*added, suite.TestDistBackend, suite.DistributedTest._DistTestBase)
    return type("Case", bases, {})


def run_test(
    case: Any, name: str, options: argparse.Namespace, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Run a test on its own ranks. On return, all ranks have ended.

    Returns:
        "outcome": "passed", "skipped", "failed" or "late". "error": the end of the ranks' output,
        unless the test passed. "operations": all-reduces that went through servers, on all ranks.
        "without_shapes": an event of the profiler lacked input shapes.
    """
    from torch.testing._internal.distributed import distributed_test as suite

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as made:
        os.environ["TEMP_DIR"] = made
        suite.initialize_temp_directories()
        suite.Barrier.init()
        outcome = _run_in(Path(made), case, name, options, limit_s)
    return {**outcome, "seconds": round(time.monotonic() - begin, 1)}


def _run_in(
    folder: Path, case: Any, name: str, options: argparse.Namespace, limit_s: float
) -> dict[str, Any]:
    ranks = [_fork(case, name, rank, folder, options) for rank in range(options.ranks)]
    codes = _wait(ranks, limit_s)
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(len(ranks))]
    outcome = _outcome(case, name, codes)
    counts = folder.glob("operations.*")
    return {
        "outcome": outcome,
        "codes": codes,
        "error": "" if outcome in ("passed", "skipped") else "\n".join(map(_end_of, logs)),
        "operations": sum(int(count.read_text()) for count in counts),
        "without_shapes": any(folder.glob("without_shapes.*")),
    }


def _end_of(log: str) -> str:
    """Get the end of a rank's output, without torch's second copy of the traceback."""
    lines = [line for line in log.splitlines() if not line.startswith("[rank")]
    return "\n".join(lines)[-ERROR_CHARS:]


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
        if options.backend != "gloo":
            _through_servers(case, rank, folder, options)
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
    """Replaces the pipe that reports errors to the suite's parent. The errors are in the log.

    The suite's thread waits on it together with a real pipe, so it must have a file descriptor.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def send(self, text: object) -> None:
        print(text, file=sys.stderr)

    def close(self) -> None:
        pass


def _through_servers(case: Any, rank: int, folder: Path, options: argparse.Namespace) -> None:
    os.environ.update(
        BYTEPS_EMBEDDED_SERVERS="1",
        BYTEPS_C10D_MIN_BYTES="1",
        BYTEPS_C10D_BACKEND="flat" if options.per_host == 1 else "node-first",
        BYTEPS_HOST_ID=f"host{rank // options.per_host}",
    )
    import byteps.torch as bps
    from byteps import c10d_plugin
    from byteps.torch import session

    if options.backend == "rounded":
        _round_values(options.wire)
    else:
        os.environ["BYTEPS_C10D_WIRE_DTYPE"] = options.wire
    c10d_plugin.install()
    leave = session.shutdown

    def counted(*arguments: Any, **named: Any) -> Any:
        if session.is_initialized():
            done = bps.get_metrics()["byteps_worker_operations_total"]
            (folder / f"operations.{rank}").write_text(str(done))
        return leave(*arguments, **named)

    session.shutdown = counted
    case.assertEqual = _takes_no_shapes(case.assertEqual, (folder / f"without_shapes.{rank}").touch)


def _takes_no_shapes(compare: Callable[..., None], note: Callable[[], None]) -> Callable[..., None]:
    """Wrap the suite's comparison: it accepts profiler events without any shapes, and calls
    `note`."""

    def compare_others(self: Any, x: Any, y: Any, msg: Any = None, **named: Any) -> None:
        is_of_shapes = isinstance(msg, str) and msg.startswith("event shape:")
        if is_of_shapes and not len(x):
            note()
        else:
            compare(self, x, y, msg, **named)

    return compare_others


def _round_values(wire_name: str) -> None:
    """Round the input of sums and their results like the wire dtype."""
    from byteps.torch import wire
    from byteps.torch.c10d.reductions import Reductions

    of_wire = wire.NAMES[wire_name]
    begin = Reductions.begin

    def rounded(self: Any, tensor: Any, **named: Any) -> Any:
        if not self.takes(tensor) or not of_wire.takes(tensor.dtype):
            return begin(self, tensor, **named)
        flat = wire.flat_view(tensor, "the tensor")
        _round(flat, of_wire)
        work = begin(self, tensor, **named)
        if work is not None:
            work.wait()
            _round(flat, of_wire)
        return work

    setattr(Reductions, "begin", rounded)  # noqa: B010 # mypy refuses a plain one


def _round(flat: Any, of_wire: Any) -> None:
    from byteps.torch import wire

    blocks = of_wire.empty(flat.numel(), flat.device)
    wire.encode(flat, of_wire, blocks)
    wire.decode(blocks, of_wire, flat)


def _wait(pids: Sequence[int], limit_s: float) -> list[int | None]:
    """Wait for exit codes; None for a rank that exceeded the limit and was killed."""
    deadline = time.monotonic() + limit_s
    codes: dict[int, int | None] = dict.fromkeys(pids)
    while None in codes.values() and time.monotonic() < deadline:
        for pid in pids:
            if codes[pid] is None:
                codes[pid] = _code_of_ended(pid)
        time.sleep(0.01)
    for pid, code in codes.items():
        # Processes of a rank are in its session, unless they left it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            with contextlib.suppress(ProcessLookupError):  # the process has no session yet
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return list(codes.values())


def _code_of_ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    sys.exit(main())
