#!/usr/bin/env python3
"""Runs a command in a virtual machine with an RDMA device (soft-RoCE).

The guest sees this machine's files read-only; only files that the command writes below $OUT are
kept. The device is rxe0, at 10.77.0.1 and fd77::1. With --guests 2 the command runs in two machines
that are connected by a cable. $GUEST is 1 in the first and 2 in the second, and their addresses end
in that number.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.rdma.vm.guest import Guest, Link
from tests.rdma.vm.kernel import VmError

EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the folder $OUT (default: a new one)")
    parser.add_argument("--memory", default="6G", help="of each guest (default: %(default)s)")
    parser.add_argument("--guests", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="(default: %(default)s)"
    )
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    return parser.parse_args(arguments)


def follow(guests: Sequence[Guest], timeout_s: float) -> int:
    """Print the guests' output until all guests have ended; get the first exit status that is not
    0."""
    deadline = time.monotonic() + timeout_s
    shown = [0] * len(guests)
    while True:
        ended = all(guest.status is not None or not guest.running for guest in guests)
        for number, guest in enumerate(guests):
            text = guest.output.read_bytes() if guest.output.exists() else b""
            sys.stdout.buffer.write(text[shown[number] :])
            sys.stdout.flush()
            shown[number] = len(text)
        if ended or time.monotonic() > deadline:
            statuses = [guest.wait(0) for guest in guests]
            return next((status for status in statuses if status != 0), 0)
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="rdma-vm-"))
    command = ["/bin/bash", "-c", 'cd "$BACK"; exec "$@"', "--", *options.command]
    try:
        with ExitStack() as stack:
            guests = []
            for number in range(1, options.guests + 1):
                folder = out if options.guests == 1 else out / f"guest{number}"
                env = {"OUT": str(folder.resolve()), "GUEST": str(number), "BACK": os.getcwd()}
                cables = []
                if options.guests > 1:
                    cables = [Link(path=out.resolve() / "cable", listens=number == 1)]
                guest = Guest(
                    folder,
                    command,
                    number=number,
                    memory=options.memory,
                    links=cables,
                    env=env,
                )
                guests.append(stack.enter_context(guest).plugged_in(cables))
            return follow(guests, options.timeout)
    except VmError as error:
        print(f"run_in_vm.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
