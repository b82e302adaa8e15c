"""Compares the packages of locks/ with a list of known vulnerabilities, with pip-audit. Old
versions of torch, which only tests install, are left out.

Exit status: 0 no vulnerability is known; 1 vulnerabilities are known; 3 no service could be asked
about all packages; 2 any other failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.releasekit.contents import ROOT, ReleaseError, ship_tools

FOUND, UNREACHABLE = 1, 3
SERVICES = ("pypi", "osv")
"""Names of the services in pip-audit."""


def ask(program: Path, service: str, lock: Path, ignored: Sequence[str]) -> tuple[int, str]:
    """Return 0, FOUND or UNREACHABLE for the packages of a lock. Also return pip-audit's output."""
    # Without --strict, a package that cannot be looked up would count as safe.
    command: list[str | Path] = [program, "--strict", "--disable-pip", "--require-hashes"]
    command += ["--requirement", lock, "--vulnerability-service", service, "--desc", "off"]
    command += [word for number in ignored for word in ("--ignore-vuln", number)]
    done = subprocess.run(
        [*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return 0, ""
    if done.stdout.strip():
        return FOUND, done.stdout.rstrip()
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return UNREACHABLE, f"{service}, {lock.name}: {reason[:200]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="audit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--service", choices=SERVICES, help="which list (default: one that answers)"
    )
    parser.add_argument(
        "--ignore-vuln", action="append", default=[], metavar="ID",
        help="a vulnerability that does not concern this project",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    locks = [lock for lock in sorted((ROOT / "locks").glob("*.lock")) if lock.name[:6] != "torch-"]
    reasons: list[str] = []
    try:
        program = ship_tools() / "pip-audit"
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for service in [options.service] if options.service else SERVICES:
        vulnerable = 0
        for lock in locks:
            status, said = ask(program, service, lock, options.ignore_vuln)
            if status == UNREACHABLE:
                reasons.append(said)
                break
            if status == FOUND:
                print(f"# {lock.relative_to(ROOT)}\n{said}")
                vulnerable += 1
        else:
            outcome = f"{vulnerable} with packages that have known vulnerabilities"
            print(f"audit: {len(locks)} locks compared ({service}), {outcome}", file=sys.stderr)
            return FOUND if vulnerable else 0
        if vulnerable:
            break
    print(f"audit: not everything could be compared ({'; '.join(reasons)})", file=sys.stderr)
    return FOUND if vulnerable else UNREACHABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
