#!/usr/bin/env python3
"""Locks the packages of pyproject.toml's dependency groups in locks/; prints all pins of a group.

A lock has only pins that differ from the locks of included groups. Hashes are those of files for
Linux on x86-64 and arm64 (tool.locked-files); no index is named. Needs Python >= 3.11, no packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Pins = dict[str, str]
"""Entry by package name: version, marker and hashes, as in a requirements file."""


def configuration() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def included(group: str, groups: dict[str, list[Any]]) -> list[str]:
    """Return the groups that this group includes, innermost first."""
    names: list[str] = []
    for entry in groups[group]:
        if isinstance(entry, dict):
            names += [*included(entry["include-group"], groups), entry["include-group"]]
    return list(dict.fromkeys(names))


def read(text: str) -> Pins:
    pins: Pins = {}
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE):
        if entry[:1].isalnum():
            name = re.split(r"[=\[]", entry, maxsplit=1)[0]
            if name in pins:
                raise SystemExit(
                    f"error: {name} has a version for each of several environments, and a lock "
                    f"holds one: name it in the group\n{pins[name]}{entry}"
                )
            pins[name] = entry
    return pins


def covers(known: str, entry: str) -> bool:
    """Return whether two entries have the same version and conditions. (Their files may be for
    different versions of Python.)"""
    (head, *more), (known_head, *known_more) = (
        [line.removesuffix(" \\") for line in text.splitlines() or [""]] for text in (entry, known)
    )
    return head == known_head and {*more} <= {*known_more}


def lock(group: str) -> Path:
    return ROOT / "locks" / f"{group}.lock"


def whole(group: str, groups: dict[str, list[Any]]) -> Pins:
    """Return the pins of a group and of the groups that it includes."""
    pins: Pins = {}
    for name in (*included(group, groups), group):
        if lock(name).exists():
            pins |= read(lock(name).read_text(encoding="utf-8"))
    return dict(sorted(pins.items()))


def uv(*arguments: str | Path, folder: Path = ROOT) -> None:
    command = [os.environ.get("UV", "uv"), *arguments, "--quiet", "--python", sys.executable]
    try:
        subprocess.run(command, check=True, cwd=folder, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SystemExit(f"error: no {command[0]}: put uv on PATH, or name it in UV") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None


def resolve(group: str, known: Pins, settings: dict[str, Any], folder: Path) -> Pins:
    """Resolve the pins of a group, keeping known versions if possible.

    `uv pip compile` keeps versions, and `uv lock` leaves out files for other platforms.
    """
    listed = folder / "listed"
    listed.write_text("".join(known.values()), encoding="utf-8")
    options = ["--universal", "--python-version", "3.12", "--no-header", "--no-annotate"]
    options += ["--no-emit-index-url", "--no-emit-find-links"]
    uv("pip", "compile", *options, "--group", group, "-o", listed)
    lines = listed.read_text(encoding="utf-8").splitlines()
    files = settings["locked-files"]
    python = files["requires-python"].get(group, files["requires-python"]["base"])
    text = f'[project]\nname = "locked"\nversion = "0"\nrequires-python = "{python}"\n'
    text += f"dependencies = {json.dumps(lines)}\n[tool.uv]\npackage = false\n"
    text += f"environments = {json.dumps(files['environments'])}\n"
    for entry in settings["uv"]["dependency-metadata"]:
        text += "[[tool.uv.dependency-metadata]]\n"
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    exported = folder / "exported"
    uv("lock", folder=folder)
    options = ["--frozen", "--no-emit-project", "--no-header", "--no-annotate"]
    uv("export", *options, "--output-file", exported, folder=folder)
    hashes = {
        name: sorted(re.findall(r"--hash=\S+", entry))
        for name, entry in read(exported.read_text(encoding="utf-8")).items()
    }
    return {
        name: " \\\n    ".join([entry.rstrip(), *hashes[name]]) + "\n"
        for name, entry in read("\n".join(lines)).items()
        if name in hashes  # files without a hash are for other platforms
    }


def update(chosen: list[str], upgrade: bool) -> None:
    settings = configuration()
    groups = settings["dependency-groups"]
    for group in groups:
        if chosen and group not in chosen:
            continue
        below: Pins = {}
        for outer in included(group, groups):
            below |= read(lock(outer).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            known = below if upgrade else whole(group, groups)
            pins = resolve(group, known, settings["tool"], Path(folder))
        own = [entry for name, entry in pins.items() if not covers(below.get(name, ""), entry)]
        lock(group).write_text("".join(own), encoding="utf-8")
        print(f"{lock(group).relative_to(ROOT)}: {len(own)} of {len(pins)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="locks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    updates = commands.add_parser(
        "update", help="resolve the groups anew; needs uv on PATH, or its path in $UV"
    )
    updates.add_argument("--upgrade", action="store_true", help="else versions stay where they fit")
    updates.add_argument("groups", nargs="*", metavar="GROUP", help="default: all")
    show = commands.add_parser("show", help="print all pins of a group, as a requirements file")
    show.add_argument("group", metavar="GROUP")
    options = parser.parse_args()
    groups = configuration()["dependency-groups"]
    for name in options.groups if options.command == "update" else [options.group]:
        if name not in groups:
            parser.error(f"pyproject.toml has no dependency group {name}, only {', '.join(groups)}")
    if options.command == "update":
        update(options.groups, options.upgrade)
    else:
        print("".join(whole(options.group, groups).values()), end="")


if __name__ == "__main__":
    main()
