"""The subcommand ``bench``: reduces a tensor by torch.distributed and by servers, interleaved."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from byteps.cli import NAME, make_parser

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1}
_SAME = "same"
_WIRES = (_SAME, "bf16", "fp8", "int8", "int4")
_EXACT = (_SAME, "bf16")
"""Wire types that must give exact results: all values of a tensor are the same small integer."""


def size(text: str) -> int:
    """Parse a number of bytes such as 64MiB."""
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number.isdigit() and int(number) * factor >= 4:
            return int(number) * factor
    raise argparse.ArgumentTypeError(f"'{text}' is no size such as 4KiB, 64MiB or 1GiB")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "bench",
        "Times an all-reduce of fp32 values over all ranks, by NCCL or gloo and by servers, "
        "interleaved. Checks every result. An iteration takes as long as its slowest rank. All "
        "values of a tensor are equal, which favors no type of value.",
        "Examples:\n"
        "  {prog}                                    two ranks on this host\n"
        "  torchrun --nnodes 4 --nproc-per-node 1 ... --no-python \\\n"
        "      {prog} --sizes 64MiB --wire int8      in a job: on each host\n\n"
        "On one host bytes pass no NIC: that shows what the software costs. Several ranks of a "
        "host\npush each for itself here; a training job reduces inside the host first.\n\n"
        "Exit status: 0 all is well; 1 a result was wrong, or a rank failed; 2 bad use.\n",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="to start here (default: 2)")
    add(
        "--sizes", type=size, nargs="+", default=[2**12, 2**20, 2**26], metavar="SIZE",
        help="of the tensor (default: 4KiB 1MiB 64MiB)",
    )  # fmt: skip
    add(
        "--wire", choices=_WIRES, default=_SAME,
        help="type in which values travel to servers (default: as they are)",
    )  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensor (default: cpu)")
    add("--iters", type=int, default=10, metavar="N", help="timed, of each (default: 10)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run as a rank if a launcher has started this process; otherwise start ranks.

    Returns:
        The exit status: 0 all is well, 1 a wrong result or a failed rank, 2 bad use.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.iters < 1 or options.ranks < 1:
        parser.error("--iters and --ranks are at least 1")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _rank(options)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = ["--standalone", f"--nproc-per-node={options.ranks}", "--module", "byteps.cli", "bench"]
    try:
        run.main([*words, *arguments])
    except ChildFailedError as error:
        print(f"{NAME} bench: {error}", file=sys.stderr)
        return 1
    return 0


def _rank(options: argparse.Namespace) -> int:
    import byteps.torch as bps
    import torch
    import torch.distributed as dist

    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(f"{NAME} bench: --device cuda, and torch sees no GPU here", file=sys.stderr)
        return 2
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend)
    bps.init()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", bps.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    wire = None if options.wire == _SAME else options.wire
    wrong = 0
    if rank == 0:
        wide = f"servers, {options.wire}"
        print(f"# {ranks} ranks, {bps.num_servers()} servers, {options.device}, ms (slowest rank)")
        print(f"{'bytes':>12} {backend:>12} {wide:>16} {'times as fast':>14} {'wrong':>6}")
    for nbytes in options.sizes:
        tensor = torch.empty(nbytes // 4, device=device)
        name = f"bench {nbytes}"

        def by_servers(tensor: torch.Tensor = tensor, name: str = name) -> None:
            bps.push_pull_inplace(tensor, average=False, name=name, wire_dtype=wire)

        def plainly(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        kinds: list[Callable[[], None]] = [plainly, by_servers]
        times: list[list[float]] = [[], []]
        for number in range(-2, options.iters):  # two more iterations warm up
            for kind, reduce in enumerate(kinds):
                tensor.fill_(rank + 1 + number % 3)
                expected = ranks * (ranks + 1) / 2 + ranks * (number % 3)
                dist.barrier()
                begin = time.perf_counter()
                reduce()
                if on_gpu:
                    torch.cuda.synchronize()
                slowest = torch.tensor(time.perf_counter() - begin, device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                allowed = 0.0 if kind == 0 or options.wire in _EXACT else 0.1 * expected
                wrong += int(((tensor - expected).abs() > allowed).sum())
                if number >= 0:
                    times[kind].append(1e3 * slowest.item())
        counted = torch.tensor(wrong, device=device)
        dist.all_reduce(counted)
        wrong = int(counted)
        if rank == 0:
            plain, ours = (statistics.median(durations) for durations in times)
            print(f"{nbytes:12} {plain:12.3f} {ours:16.3f} {plain / ours:14.2f} {wrong:6}")
    bps.shutdown()
    dist.destroy_process_group()
    return 1 if wrong else 0
