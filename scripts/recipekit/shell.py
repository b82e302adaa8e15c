"""What a training script would start, read from a dry run of it.

The script runs in a restricted bash that finds no program: it may set variables and expand them,
and cannot write, change folders or start anything. Names of launchers are functions that print how
they were called.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ADDED = ("--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-4")
"""What a script that starts training adds to what another one lists. A list may have it too."""
_LAUNCHERS = ("torchrun", "python", "python3", "uv", "srun", "numactl", "nohup")
_MARK = "\x1erecipe\x1f"
_LIMIT_S = 20.0
_GIVEN = "8"
"""What a user would give: a number or a path, as either will do."""
_SAY = f'printf "%s" "{_MARK}"; printf "%s{chr(31)}"'
_PRELUDE = f"""
{"".join(f'{name}() {{ {_SAY} {name} "$@"; }}; ' for name in _LAUNCHERS)}
eval() {{ "$@"; }}
cd() {{ :; }}; pushd() {{ :; }}; popd() {{ :; }}; set() {{ :; }}; source() {{ :; }}; exit() {{ :; }}
command_not_found_handle() {{ :; }}
say_arrays() {{
  local name
  for name in $(compgen -v); do
    case $name in BASH_*) ;; *ARGS|*OPTIONS)
      local -n array=$name
      {_SAY} arrays ${{array[@]}};;
    esac
  done
}}
trap say_arrays EXIT
"""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A training script with its arguments."""

    script: str
    """Empty: the shell script only lists arguments, for another one."""
    arguments: tuple[str, ...]
    hosts: int
    gpus: int
    """Per host."""


def started(path: Path, folder: Path) -> list[Started]:
    """The training scripts that a shell script would start.

    Args:
        path: of the shell script.
        folder: that it expects to run in.
    """
    with tempfile.TemporaryDirectory() as scratch:
        prelude = Path(scratch) / "prelude"
        prelude.write_text(_PRELUDE)
        empty = Path(scratch) / "bin"
        empty.mkdir()
        text = path.read_text(errors="replace")
        environment = dict.fromkeys(_unset(text), _GIVEN) | {
            "PATH": str(empty), "HOME": scratch, "BASH_ENV": str(prelude), "USER": "nobody",
            "SLURM_NNODES": "1", "SLURM_JOB_ID": "1", "HOSTNAME": "host",
        }  # fmt: skip
        try:
            done = subprocess.run(
                ["/bin/bash", "-r", str(path), *([_GIVEN] * 9)],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return []
    found, listed = [], []
    for call in done.stdout.decode(errors="replace").split(_MARK)[1:]:
        words = call.split("\x1f")[:-1]
        if words[:1] == ["arrays"]:
            listed += words[1:]
        elif (one := _read(words)) is not None:
            found.append(one)
    if not found and listed:
        # Another script of the checkout reads this one, and starts training with what it lists.
        found.append(Started(script="", arguments=(*_ADDED, *listed), hosts=1, gpus=8))
    return found


def _unset(text: str) -> set[str]:
    """Variables that a script reads and does not set."""
    read = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", text))
    return (
        read - set(re.findall(r"\b([A-Z][A-Z0-9_]*)\+?=", text)) - {"PATH", "HOME", "BASH_SOURCE"}
    )


def _read(words: list[str]) -> Started | None:
    """What a launcher was told to start, if it is a script of Python."""
    flat: list[str] = []
    for word in words:
        # A command line that is one word, for a shell that a launcher starts.
        flat += shlex.split(word) if " " in word and ".py" in word else [word]
    place = next((i for i, word in enumerate(flat) if word.endswith(".py")), None)
    if place is None:
        return None
    before = flat[:place]
    return Started(
        script=flat[place],
        arguments=tuple(word for word in flat[place + 1 :] if word not in ("\\", "&")),
        hosts=_number(before, "nnodes", 1),
        gpus=_number(before, "nproc", 8),
    )


def _number(words: list[str], name: str, default: int) -> int:
    for index, word in enumerate(words):
        key, _, value = word.replace("_", "-").partition("=")
        if key.lstrip("-").startswith(name):
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            if value.isdigit():
                return int(value)
    return default
