"""Compares the packages of locks/ with a list of known vulnerabilities, by pip-audit. Old versions
of torch, which tests alone install, are left out.

Exits with 0 if none is known, 1 if some are, 3 if no list could be asked about all of them, 2 for
any other failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.releasekit.contents import ReleaseError, pins, ship_tools

FOUND, UNREACHABLE = 1, 3
SERVICES = ("pypi", "osv")
"""pip-audit's names of the lists that it can ask."""
Pin = tuple[str, str]


class UnreachableError(Exception):
    """A list could not be asked, and why."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    known: dict[Pin, list[dict[str, Any]]]
    """The vulnerabilities of each package that the list was asked about."""
    unknown: list[Pin]
    """Those that the list has nothing about, which says nothing about them."""


def passes(packages: Iterable[Pin]) -> list[list[Pin]]:
    """Lists in each of which a name stands once, as pip wants requirements."""
    found: list[dict[str, Pin]] = []
    for name, version in packages:
        place = next((one for one in found if name not in one), None)
        if place is None:
            found.append(place := {})
        place[name] = (name, version)
    return [[*one.values()] for one in found]


def ask(program: Path, service: str, packages: Sequence[Pin], more: Sequence[str]) -> Answer:
    """What the list says of these packages.

    Raises:
        UnreachableError: it could not be asked.
        ReleaseError: pip-audit's answer is not understood.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "requirements.txt")
        asked.write_text("".join(f"{name}=={version}\n" for name, version in packages), "utf-8")
        command: list[str | Path] = [
            program,
            "--requirement",
            asked,
            "--no-deps",
            "--disable-pip",
            *more,
        ]
        command += ["--vulnerability-service", service, "--format", "json", "--desc", "off"]
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False
        )
    if not done.stdout.strip():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnreachableError(f"{service}: {reason.partition('(')[0][:100]}")
    try:
        listed = json.loads(done.stdout)["dependencies"]
        by_name = {one["name"]: one for one in listed}
        answers = [(pin, by_name[pin[0]]) for pin in packages]
        # pip-audit counts a package that it could not look up as one without vulnerabilities.
        return Answer(
            known={pin: one["vulns"] for pin, one in answers if "skip_reason" not in one},
            unknown=[pin for pin, one in answers if "skip_reason" in one],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ReleaseError(f"pip-audit's answer is not understood: {error!r}") from error


def choose_service(program: Path, services: Iterable[str], probe: Pin) -> str:
    """The first list that knows this package, which all know.

    Raises:
        UnreachableError: there is none.
    """
    reasons = []
    for service in services:
        try:
            if ask(program, service, [probe], []).known:
                return service
            reasons.append(f"{service}: nothing about {probe[0]} {probe[1]}")
        except UnreachableError as error:
            reasons.append(str(error))
    raise UnreachableError("; ".join(reasons))


def audited() -> dict[Pin, list[str]]:
    """All packages but those that come with an old torch, which tests alone install: it is there
    for what users may have. With the groups that hold each."""
    return {
        pin: groups
        for pin, (groups, _) in pins().items()
        if not all(group.startswith("torch-") for group in groups)
    }


def report(groups: dict[Pin, list[str]], answer: Answer) -> None:
    for (name, version), found in answer.known.items():
        for one in found:
            aliases = ", ".join([one["id"], *one.get("aliases", [])])
            fixed = ", ".join(one.get("fix_versions", [])) or "in no version"
            print(
                f"{name} {version} ({' '.join(groups[name, version])}): {aliases}; fixed: {fixed}"
            )


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
    groups = audited()
    more = [word for one in options.ignore_vuln for word in ("--ignore-vuln", one)]
    services = [options.service] if options.service else SERVICES
    whole = Answer(known={}, unknown=[])
    try:
        program = ship_tools() / "pip-audit"
        probe = next(pin for pin in groups if pin[0] == "packaging")
        service = choose_service(program, services, probe)
        for packages in passes(groups):
            answer = ask(program, service, packages, more)
            whole.known.update(answer.known)
            whole.unknown.extend(answer.unknown)
    except UnreachableError as error:
        print(f"audit: no list of vulnerabilities can be reached, nothing was compared ({error})",
              file=sys.stderr)  # fmt: skip
        return UNREACHABLE
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(groups, whole)
    vulnerable = sum(bool(found) for found in whole.known.values())
    print(f"audit: {len(whole.known)} packages compared ({service}), {vulnerable} with known "
          "vulnerabilities", file=sys.stderr)  # fmt: skip
    if vulnerable:
        return FOUND
    if whole.unknown:
        names = ", ".join(f"{name} {version}" for name, version in whole.unknown)
        print(f"audit: the list has nothing about {names}", file=sys.stderr)
        return UNREACHABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
